"""Sends the KV that a rank's lane offers to the ranks of other instances. Enters: units, maybe still being computed,
and the credit that destinations give. Leaves: parcels and their bytes. Called by `pdjax.mpi.part`.

A thread for each destination instance waits for a unit to be computed, then for room at the destination, copies the
heads into a slot of that rank's ring, and hands it to the carrier. So neither the lane nor another destination waits.
Who has no credit keeps units as they are, on the device; what waits is bounded by the destination's pages, which were
reserved before.
"""

import dataclasses
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import jax
import ml_dtypes  # noqa: F401  bfloat16 as a numpy dtype
import numpy as np

from pdjax.transfer.base import Unit
from pdjax.transfer.parcel import Carrier, Credit, Parcel, Side
from pdjax.transfer.parcels import Share, shares
from pdjax.transfer.staging import Ring

CLOSE_S = 5.0
SLOTS = 4  # parcels on their way from one rank to another
_log = logging.getLogger("pdjax")


@dataclasses.dataclass(slots=True, eq=False)
class _Transfer:
    key: int
    failed: Callable[[str], None]
    road: "_Road"
    closed: bool = False


class Outbox:
    """Of one rank. Thread-safe; nothing blocks but `end`.

    Args:
        carrier: to the other ranks.
        sides: how each instance cuts its heads, by its number.
        index: the instance of this rank.
        kv_heads: K.
        head_bytes: most bytes of one head of a unit.
        timeout_s: a unit that waits longer for room at its destination fails its transfer.
        first_tag: of the parcels; no other outbox of the job on this rank had those from there on.
    """

    def __init__(
        self,
        carrier: Carrier,
        sides: Sequence[Side],
        index: int,
        kv_heads: int,
        head_bytes: int,
        timeout_s: float,
        first_tag: int = 0,
    ) -> None:
        self._carrier, self._sides, self._index, self._kv_heads = carrier, sides, index, kv_heads
        self._head_bytes, self._timeout_s = head_bytes, timeout_s
        self._lock = threading.Lock()  # of the two tables
        self._transfers: dict[int, _Transfer] = {}
        self._roads: dict[int, _Road] = {}  # by destination instance
        self._instance_of = {rank: number for number, side in enumerate(sides) for rank in side.ranks}
        self._lost: set[int] = set()  # instances
        self._tags = itertools.count(first_tag)

    def open(self, key: int, dst: int, failed: Callable[[str], None]) -> None:
        """From now on units of this transfer go to an instance; `failed` says why they do not any more."""
        with self._lock:
            if (road := self._road(dst)) is not None:
                self._transfers[key] = _Transfer(key, failed, road)

    def send(self, unit: Unit) -> None:
        """Offers a unit; one of an ended transfer is dropped."""
        with self._lock:
            transfer = self._transfers.get(unit.header.key)
        if transfer is not None:
            transfer.road.units.put((transfer, unit))

    def credit(self, rank: int, word: Credit) -> None:
        """A destination rank has room for more parcels; it may say so before this rank is told of a transfer to it."""
        with self._lock:
            road = self._road(self._instance_of[rank])
        if road is not None:
            road.credit(rank, word.parcels)

    def close(self, key: int) -> None:
        """The transfer has ended: what is not sent yet is dropped."""
        with self._lock:
            transfer = self._transfers.pop(key, None)
        if transfer is not None:
            transfer.closed = True
            transfer.road.wake()

    def gone(self, instance: int) -> None:
        """An instance is lost: nothing is sent to it any more."""
        with self._lock:
            self._lost.add(instance)
            road = self._roads.pop(instance, None)
            self._transfers = {key: one for key, one in self._transfers.items() if one.road is not road}
        if road is not None:
            road.end()

    def end(self) -> None:
        """Ends all threads, within 5 s."""
        with self._lock:
            roads, self._roads, self._transfers = list(self._roads.values()), {}, {}
        for road in roads:
            road.end()
        deadline = time.monotonic() + CLOSE_S
        for road in roads:
            road.thread.join(max(0.0, deadline - time.monotonic()))

    def _road(self, dst: int) -> "_Road | None":
        """To an instance, made when first needed; None if it is lost. Under the lock."""
        if dst in self._lost:
            return None
        if dst not in self._roads:
            plan = shares(self._kv_heads, self._sides[self._index], self._sides[dst])
            mine = [share for share in plan if share.src_rank == self._carrier.rank]
            self._roads[dst] = _Road(self._carrier, mine, self._head_bytes, self._timeout_s, self._tags, dst)
        return self._roads[dst]


class _Road:
    """To one instance. `shares`: what this rank gives to its ranks."""

    def __init__(
        self,
        carrier: Carrier,
        mine: Sequence[Share],
        head_bytes: int,
        timeout_s: float,
        tags: "itertools.count[int]",
        dst: int,
    ) -> None:
        self._carrier, self._shares, self._timeout_s, self._tags = carrier, mine, timeout_s, tags
        self._head_bytes = head_bytes
        self.units: queue.SimpleQueue[tuple[_Transfer, Unit] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # of all below
        self._credits = {share.dst_rank: 0 for share in mine}
        self._rings: dict[int, Ring] = {}  # made with the first credit
        self._ended = False
        self.thread = threading.Thread(target=self._work, name=f"outbox-{dst}", daemon=True)
        self.thread.start()

    def credit(self, rank: int, parcels: int) -> None:
        with self._changed:
            if rank not in self._credits or self._ended:
                return
            if rank not in self._rings:
                widest = max(share.stop - share.start for share in self._shares if share.dst_rank == rank)
                self._rings[rank] = Ring(SLOTS, widest * self._head_bytes)
            self._credits[rank] += parcels
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._rings.clear()  # quarantined: the carrier keeps what is on its way
            self._changed.notify_all()
        self.units.put(None)

    def _work(self) -> None:
        while (item := self.units.get()) is not None and not self._ended:
            transfer, unit = item
            if transfer.closed or not self._shares:
                continue
            try:
                self._send(transfer, unit)
            except Exception as error:  # of one transfer; the thread has others to serve
                _log.debug("transfer %d", transfer.key, exc_info=True)
                if not transfer.closed:
                    transfer.closed = True
                    transfer.failed(f"{type(error).__name__}: {error}")
            del item, unit  # or the last unit would stay in device memory until the next comes

    def _send(self, transfer: _Transfer, unit: Unit) -> None:
        held = _held(jax.block_until_ready(unit.kv))
        for share in self._shares:
            slot = self._slot(transfer, share.dst_rank)
            if slot is None:
                return
            parcel = Parcel(unit.header, share.start, share.stop, next(self._tags), self._carrier.now())
            buffer = slot[: parcel.nbytes]
            fill(buffer, parcel, held)
            self._carrier.tell(share.dst_rank, dataclasses.replace(parcel, sent_s=self._carrier.now()))
            self._carrier.ship(share.dst_rank, parcel.tag, buffer, self._given_back(share.dst_rank, slot))

    def _slot(self, transfer: _Transfer, rank: int) -> np.ndarray | None:
        """Waits for room at the destination and a slot here; None if the transfer ends first."""

        def ready() -> bool:
            return self._ended or transfer.closed or (self._credits[rank] > 0 and self._rings[rank].free > 0)

        with self._changed:
            if not self._changed.wait_for(ready, self._timeout_s):
                raise TimeoutError(f"rank {rank} had no room for a parcel within {self._timeout_s:g} s")
            if self._ended or transfer.closed:
                return None
            self._credits[rank] -= 1
            return self._rings[rank].take()

    def _given_back(self, rank: int, slot: np.ndarray) -> Callable[[Exception | None], None]:
        def done(error: Exception | None) -> None:
            if error is not None:  # the rank is dead, of which rank 0 tells
                _log.debug("a parcel to rank %d did not arrive: %s", rank, error)
            with self._changed:
                if rank in self._rings:
                    self._rings[rank].give(slot)
                    self._changed.notify_all()

        return done


def _held(kv: jax.Array) -> dict[int, np.ndarray]:
    """First head -> the host's view of a shard of this process, [layers, 2, T, K_local, H]; replicas once."""
    shards = {(shard.index[3].start or 0): shard.data for shard in kv.addressable_shards}
    return {first: np.asarray(data) for first, data in shards.items()}


def fill(buffer: np.ndarray, parcel: Parcel, held: dict[int, np.ndarray]) -> None:
    """Writes a parcel's heads, without padding, into `buffer` [bytes]."""
    header = parcel.unit
    layers, two, _, _, dim = header.shape
    heads = parcel.stop - parcel.start
    view = buffer.view(np.dtype(header.dtype)).reshape(layers, two, header.tokens, heads, dim)
    for first, shard in held.items():
        start, stop = max(parcel.start, first), min(parcel.stop, first + shard.shape[3])
        if start < stop:
            source = shard[:, :, : header.tokens, start - first : stop - first]
            view[:, :, :, start - parcel.start : stop - parcel.start] = source
