"""Receives KV from the ranks of other instances. Enters: parcels, as they are said, and their bytes. Leaves: whole
units on this rank's devices, for the lane to insert. Called by `pdjax.mpi.part`.

A source may send as many parcels as it has credit for, which is as many as there are slots for them here. One thread
copies them out of the slots into fresh arrays, and gives credit again. Parcels of a transfer that has ended are
received and dropped: a send cannot be taken back.

What comes from device to device needs no slot: bytes that are received into a device array of their own, if they are
just what a device here holds, and arrays that are pulled from a transfer server.
"""

import dataclasses
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from pdjax.transfer.base import Unit, UnitHeader
from pdjax.transfer.parcel import Carrier, Credit, Parcel, Side
from pdjax.transfer.parcels import Share, heads_of, shares
from pdjax.transfer.pointers import fresh, pointer
from pdjax.transfer.pulls import Puller
from pdjax.transfer.shards import aligned
from pdjax.transfer.staging import SLOTS, Ring, slot_bytes

CLOSE_S = 5.0
_log = logging.getLogger("pdjax")


@dataclasses.dataclass(slots=True)
class _Assembly:
    """A unit of which not all parcels are here.

    Attributes:
        shards: first head -> [layers, 2, T, K_local, H] of each different shard of this process; on the host, or on a
            device if it came as it is.
    """

    header: UnitHeader
    missing: set[Share]
    shards: dict[int, Any]
    sent_s: float
    arrived_s: float = 0.0


@dataclasses.dataclass(slots=True, eq=False)
class _Coming:
    """A parcel that is on its way, or here.

    Attributes:
        credited: there was credit for it, which its source gets back.
        slot: of the ring, that its bytes are in; or None.
        kv: array of the parcel's shape.
    """

    rank: int
    parcel: Parcel
    credited: bool
    slot: np.ndarray | None = None
    kv: Any = None
    here: bool = False
    at_s: float = 0.0
    error: Exception | None = None


@dataclasses.dataclass(slots=True, eq=False)
class _Transfer:
    """`early`: what came before this rank was told of it, in order."""

    key: int
    src: int
    tokens: int
    deliver: Callable[[Unit], None]
    failed: Callable[[str], None]
    early: list[_Coming]
    units: dict[tuple[int, int], _Assembly] = dataclasses.field(default_factory=dict)  # (layer, start)
    filled: dict[int, int] = dataclasses.field(default_factory=dict)  # layer -> tokens delivered
    closed: bool = False


class Inbox:
    """Of one rank. Thread-safe; nothing blocks but `end`.

    Args:
        carrier: to the other ranks.
        sides: how each instance cuts its heads, by its number.
        index: the instance of this rank.
        shardings: of the units that hold a layer, by layer.
        kv_heads, head_dim, dtype: of its KV.
        head_bytes: most bytes of one head of a unit.
        pointers: the carrier takes device memory (`pdjax.transfer.pointers`).
        host: parcels are pulled from transfer servers, by this address of this host; None: their bytes are fetched.
        timeout_s: of one pull.

    Raises:
        ValueError: a unit is too large for a message.
    """

    def __init__(
        self,
        carrier: Carrier,
        sides: Sequence[Side],
        index: int,
        shardings: Sequence[NamedSharding],
        kv_heads: int,
        head_dim: int,
        dtype: str,
        head_bytes: int,
        pointers: bool = False,
        host: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._carrier, self._sides, self._index, self._shardings = carrier, sides, index, shardings
        self._kv_heads, self._head_dim, self._dtype = kv_heads, head_dim, dtype
        self._pointers, self._host, self._timeout_s = pointers, host, timeout_s
        plans = [self._plan(source) for source in range(len(sides))]
        self._slot_bytes = max(slot_bytes(plan, head_bytes) for plan in plans)
        self._device = next(iter(shardings[0].addressable_devices))
        self._held = heads_of(kv_heads, sides[index], carrier.rank)
        self._instance_of = {rank: number for number, side in enumerate(sides) for rank in side.ranks}
        self._lock = threading.Lock()  # of all below
        self._transfers: dict[int, _Transfer] = {}
        self._newest = 0  # key of a transfer that was opened; keys grow
        self._credits: dict[int, int] = {}  # by source rank: parcels that it may say
        self._rings: dict[int, Ring] = {}  # by source rank
        self._pullers: dict[int, Puller] = {}  # by source rank
        self._lost: set[int] = set()  # ranks
        self._early: dict[int, list[_Coming]] = {}  # by key; of transfers that this rank has not been told of yet
        # By source rank, in the order in which they were said: bytes may be complete in another.
        self._coming: dict[int, deque[_Coming]] = {rank: deque() for rank in self._instance_of}
        self._news: queue.SimpleQueue[_Transfer | deque[_Coming] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="inbox", daemon=True)
        self._thread.start()

    def share(self, nbytes: int) -> int:
        """The part of a unit's bytes that this rank holds."""
        return nbytes // self._kv_heads * len(self._held)

    def open(
        self, key: int, src: int, tokens: int, deliver: Callable[[Unit], None], failed: Callable[[str], None]
    ) -> None:
        """From now on `deliver` takes the units of a transfer; `failed` says why no more come. Keys must grow."""
        with self._lock:
            transfer = _Transfer(key, src, tokens, deliver, failed, self._early.pop(key, []))
            self._transfers[key] = transfer
            self._newest = max(self._newest, key)
        self._news.put(transfer)

    def parcel(self, rank: int, parcel: Parcel) -> None:
        """A source rank says what it sends: it is received. More than was agreed is, too, and fails its transfer."""
        with self._lock:
            credited = self._credits.get(rank, 0) > 0 and parcel.nbytes <= self._slot_bytes
            coming = _Coming(rank, parcel, credited)
            line = self._coming[rank]
            line.append(coming)
            if credited:
                self._credits[rank] -= 1
            puller = self._pullers.get(rank)

        def here(error: Exception | None) -> None:
            coming.at_s = self._carrier.now()
            coming.error = error
            if error is None and not credited:
                coming.error = ValueError(f"rank {rank} sent {parcel.nbytes} bytes without credit for as many")
            coming.here = True
            self._news.put(line)

        def pulled(kv: jax.Array | None, error: Exception | None) -> None:
            coming.kv = kv
            here(error)

        if parcel.offer is not None:
            if puller is None:
                here(ValueError(f"rank {rank} offers a parcel; allowed: bytes"))
            else:
                puller.pull(parcel, pulled)
            return
        if credited and self._pointers and (device := self._holder(parcel)) is not None:
            coming.kv = fresh(parcel.shape, parcel.unit.dtype, device)
            self._carrier.fetch(rank, parcel.tag, pointer(coming.kv), here)
            return
        if credited:
            with self._lock:
                slot = coming.slot = self._rings[rank].take()
        else:
            slot = np.empty(parcel.nbytes, np.uint8)
        buffer = slot[: parcel.nbytes]
        coming.kv = buffer.view(np.dtype(parcel.unit.dtype)).reshape(parcel.shape)
        self._carrier.fetch(rank, parcel.tag, buffer, here)

    def close(self, key: int) -> None:
        """The transfer has ended: what still comes of it is dropped."""
        with self._lock:
            transfer = self._transfers.pop(key, None)
        if transfer is not None:
            transfer.closed = True

    def gone(self, instance: int) -> None:
        """An instance is lost; slots that its ranks may still write to are left to the carrier."""
        with self._lock:
            ranks = self._sides[instance].ranks
            self._lost.update(ranks)
            for rank in ranks:
                self._rings.pop(rank, None)
                self._credits.pop(rank, None)
            pullers = [self._pullers.pop(rank) for rank in ranks if rank in self._pullers]
        for puller in pullers:
            puller.end()

    def end(self) -> None:
        """Ends the threads, within 5 s."""
        with self._lock:
            pullers, self._pullers = list(self._pullers.values()), {}
        for puller in pullers:
            puller.end()
        self._news.put(None)
        self._thread.join(CLOSE_S)

    # --- the inbox's thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (news := self._news.get()) is not None:
            if isinstance(news, _Transfer):
                self._welcome(news.src)
                self._catch_up(news)
                continue
            while news and news[0].here:
                self._sort(news.popleft())

    def _welcome(self, src: int) -> None:
        """Gives the ranks of an instance their first credit."""
        for rank in {share.src_rank for share in self._plan(src)}:
            if rank in self._credits or rank in self._lost:
                continue
            puller, ring = None, None
            if self._host is not None:
                puller = Puller(self._device, self._host, self._timeout_s, f"inbox-{rank}")
            else:
                ring = Ring(SLOTS, self._slot_bytes)
            with self._lock:
                if rank in self._lost:
                    continue
                if puller is not None:
                    self._pullers[rank] = puller
                if ring is not None:
                    self._rings[rank] = ring
                self._credits[rank] = SLOTS
            self._carrier.tell(rank, Credit(SLOTS))

    def _sort(self, coming: _Coming) -> None:
        """A parcel is here: to its transfer, or away."""
        key = coming.parcel.unit.key
        with self._lock:
            transfer = self._transfers.get(key)
            if transfer is None and key > self._newest:
                self._early.setdefault(key, []).append(coming)
                return
        if transfer is not None:
            self._catch_up(transfer)
            self._use(transfer, coming)
        self._free(coming)

    def _catch_up(self, transfer: _Transfer) -> None:
        early, transfer.early = transfer.early, []
        for coming in early:
            self._use(transfer, coming)
            self._free(coming)

    def _use(self, transfer: _Transfer, coming: _Coming) -> None:
        if transfer.closed:
            return
        try:
            self._take(transfer, coming)
        except Exception as error:  # of one transfer; the thread has others to serve
            _log.debug("transfer %d", transfer.key, exc_info=True)
            if not transfer.closed:
                self.close(transfer.key)
                transfer.failed(f"{type(error).__name__}: {error}")

    def _free(self, coming: _Coming) -> None:
        """There is room for another."""
        coming.kv = None
        with self._lock:
            if not coming.credited or coming.rank in self._lost:
                return
            if coming.slot is not None:
                self._rings[coming.rank].give(coming.slot)
            self._credits[coming.rank] += 1
        self._carrier.tell(coming.rank, Credit(1))

    def _take(self, transfer: _Transfer, arrived: _Coming) -> None:
        if isinstance(arrived.error, ConnectionError):
            return  # its rank is dead, of which rank 0 tells
        if arrived.error is not None:
            raise arrived.error
        parcel, header = arrived.parcel, arrived.parcel.unit
        share = Share(arrived.rank, self._carrier.rank, parcel.start, parcel.stop)
        assembly = transfer.units.get((header.layer, header.start))
        if assembly is None:
            self._check(transfer, header)
            missing = set(self._plan(transfer.src))
            assembly = _Assembly(header, missing, self._empty(header), parcel.sent_s)
            transfer.units[header.layer, header.start] = assembly
        if assembly.header != header or share not in assembly.missing:
            raise ValueError(f"a parcel is {share} of {header}; allowed: {assembly.missing} of {assembly.header}")
        self._put(assembly, parcel, arrived.kv)
        assembly.missing.discard(share)
        assembly.sent_s = min(assembly.sent_s, parcel.sent_s)
        assembly.arrived_s = max(assembly.arrived_s, arrived.at_s)
        if not assembly.missing:
            del transfer.units[header.layer, header.start]
            self._deliver(transfer, assembly)

    def _put(self, assembly: _Assembly, parcel: Parcel, kv: Any) -> None:
        """Copies a parcel's heads into the shards; takes over a device array that is a shard as it is."""
        tokens = parcel.unit.tokens
        for first, shard in assembly.shards.items():
            start, stop = max(parcel.start, first), min(parcel.stop, first + shard.shape[3])
            if start >= stop:
                continue
            if isinstance(kv, jax.Array) and kv.shape == shard.shape and parcel.start == first:
                assembly.shards[first] = kv
            else:
                part = np.asarray(kv)[:, :, :tokens, start - parcel.start : stop - parcel.start]
                shard[:, :, :tokens, start - first : stop - first] = part

    def _deliver(self, transfer: _Transfer, assembly: _Assembly) -> None:
        header = assembly.header
        for layer in range(header.layer, header.layer + header.layers):
            # Each layer's tokens come in order from 0: one rule against gaps, overlaps and repeats.
            expected = transfer.filled.get(layer, 0)
            if header.start != expected:
                raise ValueError(
                    f"start is {header.start} in layer {layer}; allowed: {expected}, where the last one ended"
                )
            transfer.filled[layer] = header.start + header.tokens
        sharding = self._shardings[header.layer]

        def shard(index: Any) -> Any:
            return assembly.shards[index[3].start or 0]

        # A fifth of what `jax.device_put` costs in Python.
        kv = jax.make_array_from_callback(header.shape, sharding, shard)
        transfer.deliver(Unit(header, kv, (assembly.sent_s, assembly.arrived_s)))

    def _check(self, transfer: _Transfer, header: UnitHeader) -> None:
        """ValueError if a unit is not what this rank can take."""
        layers, two, T, heads, dim = header.shape
        known = (header.layers, 2, self._kv_heads, self._head_dim, self._dtype)
        if (layers, two, heads, dim, header.dtype) != known or not 0 < header.tokens <= T:
            raise ValueError(f"the unit is {header}; allowed: layers, 2, K, H and dtype as in {known}, 1 to T tokens")
        if not 0 <= header.layer < header.layer + layers <= len(self._shardings):
            raise ValueError(f"the unit is {header}; allowed: layers 0 to {len(self._shardings) - 1}")
        if not 0 <= header.start < header.start + header.tokens <= transfer.tokens:
            raise ValueError(f"the unit is {header}; allowed: tokens 0 to {transfer.tokens - 1}")

    def _empty(self, header: UnitHeader) -> dict[int, np.ndarray]:
        """An array for each different shard of this process, by first head."""
        sharding = self._shardings[header.layer]
        shape = sharding.shard_shape(header.shape)
        indices = sharding.addressable_devices_indices_map(header.shape).values()
        firsts = {index[3].start or 0 for index in indices if index is not None}
        shards = {first: aligned(shape, header.dtype) for first in firsts}
        for shard in shards.values():
            shard[:, :, header.tokens :] = 0
        return shards

    def _holder(self, parcel: Parcel) -> jax.Device | None:
        """A device that holds exactly what a parcel brings."""
        header = parcel.unit
        if not 0 <= header.layer < len(self._shardings) or parcel.shape[2] != header.shape[2]:
            return None
        sharding = self._shardings[header.layer]
        if sharding.shard_shape(header.shape)[3] != parcel.stop - parcel.start:
            return None
        devices = sharding.addressable_devices_indices_map(header.shape).items()
        return next((device for device, index in devices if index and (index[3].start or 0) == parcel.start), None)

    def _plan(self, src: int) -> list[Share]:
        """What this rank gets from an instance."""
        plan = shares(self._kv_heads, self._sides[src], self._sides[self._index])
        return [share for share in plan if share.dst_rank == self._carrier.rank]
