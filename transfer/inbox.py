"""Receives KV from the ranks of other instances. Enters: parcels, as they are said, and their bytes. Leaves: whole
units on this rank's devices, for the lane to insert. Called by `pdjax.mpi.part`.

A source may send as many parcels as it has credit for, which is as many as there are slots for them here. One thread
copies them out of the slots into fresh arrays, and gives credit again. Parcels of a transfer that has ended are
received and dropped: a send cannot be taken back.
"""

import dataclasses
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from pdjax.transfer.base import Unit, UnitHeader
from pdjax.transfer.parcel import Carrier, Credit, Parcel, Side
from pdjax.transfer.parcels import Share, heads_of, shares
from pdjax.transfer.shards import aligned
from pdjax.transfer.staging import Ring

CLOSE_S = 5.0
SLOTS = 4  # as `pdjax.transfer.outbox.SLOTS`
_log = logging.getLogger("pdjax")


@dataclasses.dataclass(slots=True)
class _Assembly:
    """A unit of which not all parcels are here. `shards`: first head -> array, [layers, 2, T, K_local, H]."""

    header: UnitHeader
    missing: set[Share]
    shards: dict[int, np.ndarray]
    sent_s: float
    arrived_s: float = 0.0


@dataclasses.dataclass(slots=True, eq=False)
class _Coming:
    """A parcel whose bytes are on their way, or here."""

    rank: int
    parcel: Parcel
    slot: np.ndarray
    spare: bool  # the slot is none of the ring's
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
    ) -> None:
        self._carrier, self._sides, self._index, self._shardings = carrier, sides, index, shardings
        self._kv_heads, self._head_dim, self._dtype, self._head_bytes = kv_heads, head_dim, dtype, head_bytes
        self._held = heads_of(kv_heads, sides[index], carrier.rank)
        self._instance_of = {rank: number for number, side in enumerate(sides) for rank in side.ranks}
        self._lock = threading.Lock()  # of all below
        self._transfers: dict[int, _Transfer] = {}
        self._newest = 0  # key of a transfer that was opened; keys grow
        self._rings: dict[int, Ring] = {}  # by source rank
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
            for share in self._plan(src):
                if share.src_rank not in self._rings:
                    widest = max(other.stop - other.start for other in self._plan(src))
                    self._rings[share.src_rank] = Ring(SLOTS, widest * self._head_bytes)
                    self._carrier.tell(share.src_rank, Credit(SLOTS))
        self._news.put(transfer)

    def parcel(self, rank: int, parcel: Parcel) -> None:
        """A source rank says what it sends: its bytes are received into a slot."""
        with self._lock:
            ring = self._rings.get(rank)
            fits = ring is not None and ring.free > 0 and parcel.nbytes <= ring.nbytes
            slot = ring.take() if ring is not None and fits else np.empty(parcel.nbytes, np.uint8)
            coming = _Coming(rank, parcel, slot, not fits)
            line = self._coming[rank]
            line.append(coming)

        def done(error: Exception | None) -> None:
            coming.at_s, coming.here = self._carrier.now(), True
            coming.error = error
            if error is None and not fits:
                coming.error = ValueError(f"rank {rank} sent {parcel.nbytes} bytes without credit for as many")
            self._news.put(line)

        self._carrier.fetch(rank, parcel.tag, slot[: parcel.nbytes], done)

    def close(self, key: int) -> None:
        """The transfer has ended: what still comes of it is dropped."""
        with self._lock:
            transfer = self._transfers.pop(key, None)
        if transfer is not None:
            transfer.closed = True

    def gone(self, instance: int) -> None:
        """An instance is lost; slots that its ranks may still write to are left to the carrier."""
        with self._lock:
            for rank in self._sides[instance].ranks:
                self._rings.pop(rank, None)

    def end(self) -> None:
        """Ends the thread, within 5 s."""
        self._news.put(None)
        self._thread.join(CLOSE_S)

    # --- the inbox's thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (news := self._news.get()) is not None:
            if isinstance(news, _Transfer):
                self._catch_up(news)
                continue
            while news and news[0].here:
                self._sort(news.popleft())

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
        """Its slot may be used again."""
        with self._lock:
            ring = self._rings.get(coming.rank)
            if ring is None or coming.spare:
                return
            ring.give(coming.slot)
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
        layers, two, _, _, dim = header.shape
        view = arrived.slot[: parcel.nbytes].view(np.dtype(header.dtype))
        kv = view.reshape(layers, two, header.tokens, parcel.stop - parcel.start, dim)
        for first, shard in assembly.shards.items():
            start, stop = max(parcel.start, first), min(parcel.stop, first + shard.shape[3])
            if start < stop:
                part = kv[:, :, :, start - parcel.start : stop - parcel.start]
                shard[:, :, : header.tokens, start - first : stop - first] = part
        assembly.missing.discard(share)
        assembly.sent_s = min(assembly.sent_s, parcel.sent_s)
        assembly.arrived_s = max(assembly.arrived_s, arrived.at_s)
        if not assembly.missing:
            del transfer.units[header.layer, header.start]
            self._deliver(transfer, assembly)

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
        devices = sharding.addressable_devices_indices_map(header.shape)
        hosts = [assembly.shards[index[3].start or 0] for index in devices.values() if index is not None]
        placed = jax.device_put(hosts, list(devices))
        kv = jax.make_array_from_single_device_arrays(header.shape, sharding, placed)
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
        return {first: aligned(shape, header.dtype) for first in firsts}

    def _plan(self, src: int) -> list[Share]:
        """What this rank gets from an instance."""
        plan = shares(self._kv_heads, self._sides[src], self._sides[self._index])
        return [share for share in plan if share.dst_rank == self._carrier.rank]
