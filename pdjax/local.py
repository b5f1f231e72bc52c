"""A cluster in this process: one thread and one ordered lane of work per instance, and a transport between them.

Enters: the controller's commands. Leaves: events. Iterations go to the lane of their instance; KV that is to move is
read by the source's lane, carried by the transport, and inserted by the destination's lane between two iterations:
only a lane touches its instance (`pdjax.lane_thread`).
"""

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from pdjax.lane_thread import Executor, LaneThread
from pdjax.messages import (
    AbortTransfer,
    Command,
    Cut,
    Event,
    Iteration,
    StartTransfer,
    TransferAborted,
    TransferDone,
    TransferFailed,
)
from pdjax.transfer.base import Transport, Unit
from pdjax.transfer.verify import difference, digests

CLOSE_S = 5.0
T = TypeVar("T")
_log = logging.getLogger("pdjax")


class ClusterFault(RuntimeError):
    """A thread of the cluster died; its exception is the cause."""


@dataclasses.dataclass(slots=True)
class _Move:
    """An open transfer. `closed`: aborted or failed, its late units are dropped."""

    command: StartTransfer
    inserted: int = 0  # tokens times layers
    nbytes: int = 0
    closed: bool = False
    moved_s: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    prefill_end_s: float | None = None


class LocalCluster:
    """Implements `Cluster` on instances of this process.

    Args:
        instances: instance i has index i.
        transport: moves units between them; its instances are numbered alike, its clock is `time.perf_counter`.
        num_layers: L; a transfer is complete when every token of every layer is inserted.
        verify_kv: then the pages of both sides are read back and compared before it counts as done.
    """

    def __init__(
        self, instances: Sequence[Executor], transport: Transport, num_layers: int, verify_kv: bool = False
    ) -> None:
        self.specs = tuple(instance.spec for instance in instances)
        self._transport = transport
        self._num_layers = num_layers
        self._verify_kv = verify_kv
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None: look at `_fault`
        self._fault: BaseException | None = None
        self._closed = False
        self._moves: dict[int, _Move] = {}  # touched under `_lock`
        self._lock = threading.Lock()
        self._lanes = [LaneThread(instance, self) for instance in instances]
        for lane in self._lanes:
            lane.start()

    def now(self) -> float:
        return time.perf_counter()

    def post(self, event: Event) -> None:
        self._events.put(event)

    def submit(self, command: Command) -> None:
        if self._fault is not None:
            raise self._cluster_fault()
        if self._closed:
            raise RuntimeError("the cluster is closed")
        match command:
            case Iteration():
                self._lanes[command.instance].put(lambda lane: lane.dispatch(command))
            case Cut():
                raise RuntimeError("instances that compute tokens take no runs")
            case StartTransfer():
                self._start_transfer(command)
            case AbortTransfer(key):
                with self._lock:  # against `_insert`: only one of abort and finish gets the transfer
                    move = self._moves.get(key)
                    if move is None or not self._transport.abort(key):
                        return
                    self._close_move(move)
                self._answer(move, TransferAborted(key))

    def on_lane(self, index: int, work: Callable[[Any], T]) -> "Future[T]":
        """Calls `work` with an instance in the thread that owns it, after what was submitted before. Its exception is
        the caller's, not a fault of the cluster."""
        future: Future[T] = Future()

        def call(lane: LaneThread) -> None:
            try:
                future.set_result(work(lane.instance))
            except BaseException as error:
                future.set_exception(error)

        self._lanes[index].put(call)
        return future

    def next_event(self, timeout_s: float | None) -> Event | None:
        """Raises ClusterFault when a thread died, once the events before that are taken."""
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if event is None:
            self._events.put(None)  # whoever asks again is told again
            raise self._cluster_fault()
        return event

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + CLOSE_S
        for lane in self._lanes:
            lane.put(None)
        self._transport.close()
        for lane in self._lanes:
            lane.join(max(0.0, deadline - time.monotonic()))
            if lane.is_alive():
                _log.warning("%s still waits for its device and was left behind", lane.name)
        # Whoever still holds a closed engine holds no weights and no pages.
        self._lanes = [lane for lane in self._lanes if lane.is_alive()]

    def fault(self, error: BaseException) -> None:
        """Called by a thread that dies: whoever waits for an event gets the error."""
        self._fault = error
        self._events.put(None)

    def _cluster_fault(self) -> "ClusterFault":
        fault = ClusterFault(f"{type(self._fault).__name__}: {self._fault}")
        fault.__cause__ = self._fault
        return fault

    # --- transfers --------------------------------------------------------------------------------------------------

    def _start_transfer(self, command: StartTransfer) -> None:
        move = _Move(command)
        with self._lock:
            self._moves[command.key] = move
        source, target = self._lanes[command.src], self._lanes[command.dst]
        self._transport.start(
            command.key,
            command.src,
            command.dst,
            deliver=lambda unit: target.put(lambda lane: lane.insert(unit, lambda: self._insert(lane, move, unit))),
            failed=lambda error: self._failed(move, error),
        )
        if command.mode == "whole":
            move.prefill_end_s = self.now()
            source.put(lambda lane: self._extract(lane, move))

    def _extract(self, lane: LaneThread, move: _Move) -> None:
        if move.closed:
            return
        for unit in lane.extract(move.command):
            if move.closed:  # what failed in one slice stops the next
                return
            self._transport.send(unit)

    def _insert(self, lane: LaneThread, move: _Move, unit: Unit) -> bool:
        """False if nobody wants the unit any more."""
        if move.closed:
            return False
        command = move.command
        lane.instance.insert(unit, command.dst_pages)
        move.moved_s.append(unit.moved_s)
        move.nbytes += unit.header.nbytes
        move.inserted += unit.header.tokens * unit.header.layers
        if move.inserted == command.tokens * self._num_layers:
            if self._verify_kv:
                self._lanes[command.src].put(lambda source: self._verify(source, lane, move))
            else:
                self._commit(move)
        return True

    def _verify(self, source: LaneThread, target: LaneThread, move: _Move) -> None:
        """Reads the pages of the source, then on the other lane those of the destination, and compares. The controller
        holds both until the transfer has ended."""
        command = move.command
        if move.closed:
            return
        sent = digests(source.instance.held_kv(command.src_pages, command.tokens))

        def compare(lane: LaneThread) -> None:
            if move.closed:
                return
            wrong = difference(sent, digests(lane.instance.held_kv(command.dst_pages, command.tokens)))
            if wrong is None:
                self._commit(move)
                return
            error = f"verify_kv: request {command.request}, instance {command.src} to {command.dst}: {wrong}"
            _log.error("transfer %d: %s", command.key, error)
            self._transport.abort(command.key)
            self._failed(move, error)

        target.put(compare)

    def _commit(self, move: _Move) -> None:
        command = move.command
        with self._lock:
            if move.closed:
                return
            self._close_move(move)
            self._transport.finish(command.key)
        end = move.prefill_end_s if move.prefill_end_s is not None else self.now()
        self.post(
            TransferDone(
                key=command.key,
                nbytes=move.nbytes,
                started_s=move.moved_s[0][0],
                finished_s=self.now(),
                busy_s=sum(stop - start for start, stop in move.moved_s),
                hidden_s=sum(max(0.0, min(stop, end) - start) for start, stop in move.moved_s),
            )
        )

    def _failed(self, move: _Move, error: str) -> None:
        with self._lock:
            if move.closed:
                return
            self._close_move(move)
        self._answer(move, TransferFailed(move.command.key, error))

    def _close_move(self, move: _Move) -> None:
        """No unit of it is inserted from now on. Under `_lock`."""
        move.closed = True
        del self._moves[move.command.key]

    def _answer(self, move: _Move, answer: Event) -> None:
        """The answer comes when both lanes have done what was under way: then no page of it is touched any more."""
        target = self._lanes[move.command.dst]
        self._lanes[move.command.src].put(lambda _: target.put(lambda _: self.post(answer)))

    def prefilled(self, iteration: Iteration) -> None:
        """A lane has the tokens of an iteration: the prompts that end in it are computed."""
        for chunk in iteration.chunks:
            if chunk.last and chunk.stream is not None:
                with self._lock:
                    move = self._moves.get(chunk.stream)
                if move is not None:
                    move.prefill_end_s = self.now()

    def send(self, unit: Unit) -> None:
        self._transport.send(unit)
