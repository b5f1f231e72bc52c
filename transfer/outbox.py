"""Sends the KV that a rank's lane offers to the ranks of other instances. Enters: units, maybe still being computed,
and the credit that destinations give. Leaves: parcels and their bytes. Called by `pdjax.mpi.part`.

A thread for each destination instance waits for a unit to be computed, then for room at the destination, copies the
heads into a slot of that rank's ring, and hands it to the carrier. So neither the lane nor another destination waits.
Who has no credit keeps units as they are, on the device; what waits is bounded by the destination's pages, which were
reserved before.

Two other roads need no slot. With device pointers the carrier ships a shard that a destination rank gets as it is from
where it lies. With transfer servers (`host`) a parcel's array is registered, and the destination pulls it; a server for
each destination rank, since what is not pulled stays registered until the server goes.
"""

import dataclasses
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import numpy as np

from pdjax.transfer.base import Unit
from pdjax.transfer.jax_transfer import Source
from pdjax.transfer.parcel import Carrier, Credit, Offer, Parcel, Side
from pdjax.transfer.parcels import Share, shares
from pdjax.transfer.pointers import pointer
from pdjax.transfer.staging import SLOTS, Ring, slot_bytes

CLOSE_S = 5.0
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
        pointers: the carrier takes device memory (`pdjax.transfer.pointers`).
        host: transfer servers offer the parcels at this address of this host; None: their bytes are shipped.

    Raises:
        ValueError: a unit is too large for a message.
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
        pointers: bool = False,
        host: str | None = None,
    ) -> None:
        self._carrier, self._timeout_s, self._pointers, self._host = carrier, timeout_s, pointers, host
        self._shares = [  # by destination instance
            [share for share in shares(kv_heads, sides[index], side) if share.src_rank == carrier.rank]
            for side in sides
        ]
        self._slot_bytes = max(slot_bytes(mine, head_bytes) for mine in self._shares)
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
            self._lost.update(self._instance_of.values())  # late credit makes no new road
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
            give: _Give
            if self._host is not None:
                give = _Servers(self._carrier, self._host)
            else:
                give = _Bytes(self._carrier, self._slot_bytes, self._pointers, self._timeout_s)
            self._roads[dst] = _Road(self._carrier, self._shares[dst], give, self._timeout_s, self._tags, dst)
        return self._roads[dst]


class _Give(Protocol):
    """How a parcel leaves. Called by the thread of a road, but for `end`."""

    def give(self, rank: int, parcel: Parcel, shards: "_Shards") -> None:
        """Says the parcel and lets it be taken. There is credit for it; blocks only until a slot is free."""
        ...

    def end(self) -> None:
        """Ends what blocks; nothing is given any more."""
        ...


class _Road:
    """To one instance. `mine`: what this rank gives to its ranks."""

    def __init__(
        self,
        carrier: Carrier,
        mine: Sequence[Share],
        give: _Give,
        timeout_s: float,
        tags: "itertools.count[int]",
        dst: int,
    ) -> None:
        self._carrier, self._shares, self._give, self._timeout_s, self._tags = carrier, mine, give, timeout_s, tags
        self.units: queue.SimpleQueue[tuple[_Transfer, Unit] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # of all below
        self._credits = {share.dst_rank: 0 for share in mine}
        self._ended = False
        self.thread = threading.Thread(target=self._work, name=f"outbox-{dst}", daemon=True)
        self.thread.start()

    def credit(self, rank: int, parcels: int) -> None:
        with self._changed:
            self._credits[rank] += parcels
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._give.end()
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
                if not (transfer.closed or self._ended):
                    transfer.closed = True
                    transfer.failed(f"{type(error).__name__}: {error}")
            del item, unit  # or the last unit would stay in device memory until the next comes

    def _send(self, transfer: _Transfer, unit: Unit) -> None:
        shards = _shards(jax.block_until_ready(unit.kv))
        for share in self._shares:
            if not self._room(transfer, share.dst_rank):
                return
            parcel = Parcel(unit.header, share.start, share.stop, next(self._tags), self._carrier.now())
            self._give.give(share.dst_rank, parcel, shards)

    def _room(self, transfer: _Transfer, rank: int) -> bool:
        """Waits for credit of the destination; False if the transfer ends first."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._ended or transfer.closed or self._credits[rank] > 0, self._timeout_s
            ):
                raise TimeoutError(f"rank {rank} had no room for a parcel within {self._timeout_s:g} s")
            if self._ended or transfer.closed:
                return False
            self._credits[rank] -= 1
            return True


class _Bytes:
    """Through a ring of host memory for each destination rank, or straight from a shard that goes as it is."""

    def __init__(self, carrier: Carrier, slot_bytes: int, pointers: bool, timeout_s: float) -> None:
        self._carrier, self._slot_bytes, self._pointers, self._timeout_s = carrier, slot_bytes, pointers, timeout_s
        self._changed = threading.Condition()  # of all below
        self._rings: dict[int, Ring] = {}
        self._ended = False

    def give(self, rank: int, parcel: Parcel, shards: "_Shards") -> None:
        if self._pointers and (whole := _whole(parcel, shards)) is not None:
            parcel = dataclasses.replace(parcel, padded=True, sent_s=self._carrier.now())
            self._carrier.tell(rank, parcel)
            self._carrier.ship(rank, parcel.tag, pointer(whole), lambda error: _log_lost(rank, error))
            return
        slot = self._slot(rank)
        if slot is not None:
            buffer = slot[: parcel.nbytes]
            fill(buffer, parcel, shards)
            self._carrier.tell(rank, dataclasses.replace(parcel, sent_s=self._carrier.now()))
            self._carrier.ship(rank, parcel.tag, buffer, lambda error: self._given_back(rank, slot, error))

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._rings.clear()  # quarantined: the carrier keeps what is on its way
            self._changed.notify_all()

    def _slot(self, rank: int) -> np.ndarray | None:
        """Waits for a slot, which is free soon: the destination has room for what was sent before. None at the end."""
        if rank not in self._rings:
            ring = Ring(SLOTS, self._slot_bytes)
            with self._changed:
                if not self._ended:
                    self._rings[rank] = ring
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended or self._rings[rank].free > 0, self._timeout_s):
                raise TimeoutError(f"parcels to rank {rank} did not leave within {self._timeout_s:g} s")
            return None if self._ended else self._rings[rank].take()

    def _given_back(self, rank: int, slot: np.ndarray, error: Exception | None) -> None:
        _log_lost(rank, error)
        with self._changed:
            if not self._ended:
                self._rings[rank].give(slot)
                self._changed.notify_all()


class _Servers:
    """By a transfer server for each destination rank."""

    def __init__(self, carrier: Carrier, host: str) -> None:
        self._carrier, self._host = carrier, host
        self._sources: dict[int, Source] = {}

    def give(self, rank: int, parcel: Parcel, shards: "_Shards") -> None:
        parcel = dataclasses.replace(parcel, padded=True)
        array = _whole(parcel, shards)
        device = next(iter(shards.values())).device
        if array is None:
            host = np.empty(parcel.shape, parcel.unit.dtype)
            fill(host.reshape(-1).view(np.uint8), parcel, shards)
            array = jax.device_put(host, device)
        if rank not in self._sources:
            self._sources[rank] = Source(device, self._host)
        source = self._sources[rank]
        offer = Offer(source.server.address(), source.register([array]))
        self._carrier.tell(rank, dataclasses.replace(parcel, offer=offer, sent_s=self._carrier.now()))

    def end(self) -> None:
        self._sources = {}


def _log_lost(rank: int, error: Exception | None) -> None:
    if error is not None:  # the rank is dead, of which rank 0 tells
        _log.debug("a parcel to rank %d did not arrive: %s", rank, error)


_Shards = dict[int, jax.Array]  # first head -> a shard of this process, [layers, 2, T, K_local, H]; replicas once


def _shards(kv: jax.Array) -> _Shards:
    return {(shard.index[3].start or 0): shard.data for shard in kv.addressable_shards}


def _whole(parcel: Parcel, shards: _Shards) -> jax.Array | None:
    """The shard that has exactly a parcel's heads."""
    shard = shards.get(parcel.start)
    return shard if shard is not None and shard.shape[3] == parcel.stop - parcel.start else None


def fill(buffer: np.ndarray, parcel: Parcel, shards: _Shards) -> None:
    """Writes a parcel's array into `buffer` [bytes]."""
    view = buffer.view(np.dtype(parcel.unit.dtype)).reshape(parcel.shape)
    for first, shard in shards.items():
        start, stop = max(parcel.start, first), min(parcel.stop, first + shard.shape[3])
        if start < stop:
            source = np.asarray(shard)[:, :, : view.shape[2], start - first : stop - first]
            view[:, :, :, start - parcel.start : stop - parcel.start] = source
