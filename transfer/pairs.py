"""What transports of one process have in common: open transfers, a thread per pair of instances, and a watchdog.

Enters: units that a source's lane offers, maybe still being computed. Leaves: the same units on the destination's
devices, or the reason why not. Called by the local cluster, whose lanes must never wait for a device or a peer: the
waiting is done by threads here. How the bytes of one unit cross is the transport's own: a `Link`.
"""

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import NamedSharding

from pdjax.transfer.base import TransferState, Unit, advance
from pdjax.transfer.shards import SPEC, is_wire

CLOSE_S = 5.0
TIMEOUT_S = 60.0
GRACE_S = 5.0  # for a move to end in once nobody wants its unit any more
_log = logging.getLogger("pdjax")


class Link(Protocol):
    """The road from one instance to another. One thread moves; a link whose move raised or hung is not used again."""

    def move(self, unit: Unit, src: NamedSharding, dst: NamedSharding) -> jax.Array:
        """The unit's KV, which is computed, from `src` onto `dst`; may return before it is there."""
        ...

    def close(self) -> None:
        """Frees what the link holds; a move that hangs should end by it. Called by any thread, once."""
        ...


@dataclasses.dataclass(slots=True)
class _Transfer:
    """One transfer. `lock` is held while a callback of it runs, so that `abort` can wait for a running one."""

    key: int
    src: Sequence[NamedSharding]  # by layer
    dst: Sequence[NamedSharding]
    items: "queue.SimpleQueue[_Item]"
    deliver: Callable[[Unit], None]
    failed: Callable[[str], None]
    state: TransferState = TransferState.STARTED
    lock: Any = dataclasses.field(default_factory=threading.RLock)  # reentrant: a callback may end its own transfer
    filled: dict[int, int] = dataclasses.field(default_factory=dict)  # layer -> tokens taken so far


_Item = tuple[_Transfer, Unit] | None  # None ends the thread


@dataclasses.dataclass(slots=True, eq=False)
class _Worker:
    """The thread of a pair. `moving`, `deadline` and `left` (behind, since it hangs) change under the lock."""

    pair: tuple[int, int]
    items: "queue.SimpleQueue[_Item]"
    thread: threading.Thread | None = None
    link: Link | None = None  # made when first needed
    moving: _Transfer | None = None
    deadline: float = 0.0  # of the move, on `time.monotonic`
    left: bool = False


class Pairs:
    """A `Transport` in one process; instance i has the wire arrays of layer j sharded as `shardings[i][j]`.

    There is one thread per (source, destination) pair, made when first used. Units of one source become ready in the
    order in which they are sent, so a thread that waits for the first of them delays no other that could move; with
    one thread per destination, a slow prefill would hold up what another instance has ready.

    The queues have no bound of their own: `send` may not block, and a dropped unit is a failed transfer. What waits
    is bounded by the destination's pool, since pages are reserved before a transfer starts.

    A move that takes longer than `timeout_s` fails its transfer with a TimeoutError. Its thread and its link are left
    behind, with a warning, and the pair's other transfers go on with new ones; the same happens GRACE_S after a
    transfer has ended while a unit of it moves. The time a unit takes to be computed is not counted.

    Args:
        shardings: per instance and layer, of [layers, 2, T, K, H]: `SPEC` over a ("kv", "rep") mesh. Layers of one
            unit have the same.
        connect: makes the link of a pair (source, destination).
        timeout_s: limit of one unit's move.
        clock: gives the seconds of `Unit.moved_s`.

    Raises:
        ValueError: a sharding is not of that kind.
    """

    def __init__(
        self,
        shardings: Sequence[Sequence[NamedSharding]],
        connect: Callable[[int, int], Link],
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.perf_counter,
    ):
        for index, layers in enumerate(shardings):
            for sharding in layers:
                if not is_wire(sharding):
                    raise ValueError(f'shardings[{index}] has {sharding}; allowed: {SPEC} over a mesh ("kv", "rep")')
        self._shardings = tuple(tuple(layers) for layers in shardings)
        self._connect = connect
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()  # of all below
        self._changed = threading.Condition(self._lock)  # the watchdog has something sooner to look at
        self._transfers: dict[int, _Transfer] = {}  # STARTED ones only
        self._workers: dict[tuple[int, int], _Worker] = {}
        self._watchdog: threading.Thread | None = None
        self._asleep_until: float | None = None  # None: until told
        self._closed = False

    def start(
        self,
        key: int,
        src: int,
        dst: int,
        deliver: Callable[[Unit], None],
        failed: Callable[[str], None],
    ) -> None:
        """Opens a transfer.

        Both callbacks should only enqueue: while one runs, `abort` of that transfer waits.

        Raises:
            ValueError: `key` is open already, or there is no such instance.
            RuntimeError: the transport is closed.
        """
        for name, index in (("src", src), ("dst", dst)):
            if not 0 <= index < len(self._shardings):
                raise ValueError(f"{name} is {index}; allowed: an instance, 0..{len(self._shardings) - 1}")
        with self._lock:
            if self._closed:
                raise RuntimeError("the transport is closed")
            if key in self._transfers:
                raise ValueError(f"key is {key}; allowed: a key that no open transfer has")
            if self._watchdog is None:
                self._watchdog = threading.Thread(target=self._watch, name="transfer-watchdog", daemon=True)
                self._watchdog.start()
            if (src, dst) not in self._workers:
                self._employ((src, dst), queue.SimpleQueue())
            items = self._workers[src, dst].items
            self._transfers[key] = _Transfer(key, self._shardings[src], self._shardings[dst], items, deliver, failed)

    def send(self, unit: Unit) -> None:
        """Offers a unit to its transfer's thread; drops it if that transfer has ended."""
        with self._lock:
            transfer = self._transfers.get(unit.header.key)
            if transfer is not None:
                transfer.items.put((transfer, unit))

    def finish(self, key: int) -> None:
        """STARTED -> COMMITTED; RuntimeError if the transfer has ended or never was."""
        if self._end(key, TransferState.COMMITTED) is None:
            raise RuntimeError(f"transfer {key} is not open; it cannot be committed")

    def abort(self, key: int) -> bool:
        """STARTED -> ABORTED; False if it had ended. Waits for a callback that is running, never for a device."""
        transfer = self._end(key, TransferState.ABORTED)
        if transfer is None:
            return False
        with transfer.lock:
            return True

    def close(self) -> None:
        """Aborts what is open, then joins the threads, 5 s at most. Idempotent."""
        with self._lock:
            self._closed = True
            self._changed.notify()
            keys = list(self._transfers)
            workers, self._workers = list(self._workers.values()), {}
        for key in keys:
            self._end(key, TransferState.ABORTED)
        for worker in workers:
            worker.items.put(None)
            if worker.moving is not None:
                self._unlink(worker)
        deadline = time.monotonic() + CLOSE_S
        for thread in (self._watchdog, *(worker.thread for worker in workers)):
            if thread is None:
                continue
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.warning("%s still waits for a device or a callback and was left behind", thread.name)
        for worker in workers:
            self._unlink(worker)

    def _end(self, key: int, state: TransferState) -> _Transfer | None:
        """Closes an open transfer. Of several who try, one gets it."""
        with self._lock:
            transfer = self._transfers.pop(key, None)
            if transfer is not None:
                transfer.state = advance(transfer.state, state)
                for worker in self._workers.values():
                    if worker.moving is transfer:
                        self._due(worker, min(worker.deadline, time.monotonic() + GRACE_S))
            return transfer

    # --- the thread of a pair ---------------------------------------------------------------------------------------

    def _employ(self, pair: tuple[int, int], items: "queue.SimpleQueue[_Item]") -> None:
        """A thread, and later a link, for a pair. Under the lock."""
        worker = self._workers[pair] = _Worker(pair, items)
        name = f"transfer-{pair[0]}-{pair[1]}"
        worker.thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
        worker.thread.start()

    def _work(self, worker: _Worker) -> None:
        while not worker.left and (item := worker.items.get()) is not None:
            self._carry(worker, *item)
            del item  # or the last unit would stay in device memory until the next comes

    def _carry(self, worker: _Worker, transfer: _Transfer, unit: Unit) -> None:
        try:
            if transfer.state is not TransferState.STARTED:
                return
            _check(transfer, unit)
            jax.block_until_ready(unit.kv)
            if transfer.state is not TransferState.STARTED:
                return
            moved = self._move(worker, transfer, unit)
            with transfer.lock:
                if transfer.state is TransferState.STARTED:
                    transfer.deliver(moved)
        except BaseException as error:  # whatever a unit does, the thread has other transfers to serve
            self._fail(transfer, f"{type(error).__name__}: {error}")

    def _move(self, worker: _Worker, transfer: _Transfer, unit: Unit) -> Unit:
        with self._lock:
            worker.moving = transfer
            self._due(worker, time.monotonic() + self._timeout_s)
        layer, begun = unit.header.layer, self._clock()
        try:
            link = worker.link = worker.link or self._connect(*worker.pair)
            kv = jax.block_until_ready(link.move(unit, transfer.src[layer], transfer.dst[layer]))
        except BaseException:
            self._unlink(worker)
            raise
        finally:
            with self._lock:
                worker.moving = None
        return Unit(unit.header, kv, (begun, self._clock()))

    def _fail(self, transfer: _Transfer, why: str) -> None:
        with transfer.lock:
            if self._end(transfer.key, TransferState.FAILED) is None:
                _log.debug("transfer %d had ended when a unit of it failed: %s", transfer.key, why)
                return
            try:
                transfer.failed(why)
            except Exception:  # the thread serves other transfers too
                _log.exception("the failure of transfer %d could not be told: %s", transfer.key, why)

    def _unlink(self, worker: _Worker) -> None:
        with self._lock:
            link, worker.link = worker.link, None
        if link is not None:
            try:
                link.close()
            except Exception:
                _log.exception("the link of instances %d -> %d could not be closed", *worker.pair)

    # --- the watchdog -----------------------------------------------------------------------------------------------

    def _due(self, worker: _Worker, deadline: float) -> None:
        """The move must be over by then. Under the lock. Wakes the watchdog only if it would sleep longer."""
        worker.deadline = deadline
        if self._asleep_until is None or deadline < self._asleep_until:
            self._changed.notify()

    def _watch(self) -> None:
        while (late := self._late()) is not None:
            for worker, transfer in late:
                _log.warning("transfer-%d-%d hangs in a unit of transfer %d: left behind", *worker.pair, transfer.key)
                self._fail(transfer, f"TimeoutError: a unit did not move within {self._timeout_s:g} s")
                self._unlink(worker)

    def _late(self) -> list[tuple[_Worker, _Transfer]] | None:
        """Waits for moves that are late, and puts others in the place of their threads; None: the transport closes."""
        with self._lock:
            while not self._closed:
                now = time.monotonic()
                moves = [(worker, worker.moving) for worker in self._workers.values() if worker.moving]
                late = [(worker, transfer) for worker, transfer in moves if worker.deadline <= now]
                for worker, _ in late:
                    worker.left = True
                    self._employ(worker.pair, worker.items)
                if late:
                    return late
                self._asleep_until = min((worker.deadline for worker, _ in moves), default=None)
                self._changed.wait(None if self._asleep_until is None else self._asleep_until - now)
            return None


def _check(transfer: _Transfer, unit: Unit) -> None:
    """Compares a header with its array and with what came before it; ValueError says what is wrong."""
    header, kv = unit.header, unit.kv
    if kv.shape != header.shape or str(kv.dtype) != header.dtype:
        raise ValueError(f"the header says {header.dtype}{header.shape}, the array is {kv.dtype}{kv.shape}")
    if len(kv.shape) != 5 or kv.shape[:2] != (header.layers, 2) or not 0 < header.tokens <= kv.shape[2]:
        raise ValueError(
            f"shape is {kv.shape}; allowed: ({header.layers} layers, 2, at least {header.tokens} tokens, K, H)"
        )
    source = transfer.src[header.layer]
    if not kv.sharding.is_equivalent_to(source, kv.ndim):
        raise ValueError(f"the array is sharded as {kv.sharding}; allowed: that of its source, {source}")
    for layer in range(header.layer, header.layer + header.layers):
        # Each layer's tokens come in order from 0: one rule against gaps, overlaps and repeats.
        expected = transfer.filled.get(layer, 0)
        if header.start != expected:
            raise ValueError(f"start is {header.start} in layer {layer}; allowed: {expected}, where the last one ended")
        transfer.filled[layer] = header.start + header.tokens
