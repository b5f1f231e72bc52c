"""The threads of one instance: an ordered lane of work, the only thread that touches the instance, and a reader.

Enters: work, in the order in which it is to be done; iterations and inserts are special cases of it. Leaves: events,
through the cluster that owns the lane. The lane dispatches what it is given at once and never waits for the device; the
reader waits for the tokens. With one thread for both, an iteration that comes while another is waited for would be
dispatched only after that one's end, and the device would stand still meanwhile.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np

from pdjax.extracts import Extracts
from pdjax.messages import Event, InstanceSpec, Iteration, IterationDone, Sampled, StartTransfer
from pdjax.pacing import Pacing
from pdjax.transfer.base import Unit


class Pending(Protocol):
    """Tokens on their way to the host."""

    def wait(self) -> Sampled:
        """Blocks until they are there."""
        ...


class Executor(Protocol):
    """What a lane needs of an instance; `pdjax.instance.Instance` is the real one."""

    @property
    def spec(self) -> InstanceSpec: ...
    def run(self, iteration: Iteration, emit: Callable[[Unit], None]) -> Pending: ...
    def extract(self, transfer: StartTransfer) -> Iterator[Unit]: ...
    def insert(self, unit: Unit, pages: tuple[int, ...]) -> None: ...
    def insert_s(self, unit: Unit) -> float:
        """Predicted seconds of an insert; inf if its program was never measured."""
        ...

    def held_kv(self, pages: tuple[int, ...], tokens: int) -> Iterable[tuple[int, int, np.ndarray]]:
        """(layer, head, KV [2, tokens, H]) of a block table, as far as this process holds it; blocks. For `verify_kv`
        and tests."""
        ...


class Owner(Protocol):
    """What a lane needs of its cluster. Thread-safe."""

    def now(self) -> float: ...
    def post(self, event: Event) -> None: ...
    def send(self, unit: Unit) -> None:
        """Takes a unit that streams."""
        ...

    def prefilled(self, iteration: Iteration) -> None:
        """The prompts that end in it are computed."""
        ...

    def fault(self, error: BaseException) -> None:
        """The thread dies of it."""
        ...


class LaneThread(threading.Thread):
    """Work is done in order, but for inserts, which `Pacing` may hold back; None ends it, and its reader with it."""

    def __init__(self, instance: Executor, owner: Owner) -> None:
        super().__init__(name=f"instance-{instance.spec.index}", daemon=True)
        self.instance = instance
        self._owner = owner
        self._work: queue.SimpleQueue[Callable[[LaneThread], None] | None] = queue.SimpleQueue()
        self._reader = _Reader(self, owner)
        self._pacing = Pacing()
        self._extracts = Extracts(instance.spec, instance.extract)

    def put(self, work: "Callable[[LaneThread], None] | None") -> None:
        self._work.put(work)

    def run(self) -> None:
        self._reader.start()
        try:
            while (work := self._work.get()) is not None:
                work(self)
                del work  # or what it holds would stay in memory until the next comes
        except BaseException as error:
            self._owner.fault(error)
        self._reader.pending.put(None)
        self._reader.join()

    def dispatch(self, iteration: Iteration) -> None:
        dispatched_s = self._owner.now()
        self._reader.pending.put((iteration, self.instance.run(iteration, self._owner.send), dispatched_s))
        self._extracts.dispatched(iteration)
        if iteration.decode:
            self._pacing.dispatched()

    def extract(self, transfer: StartTransfer) -> Iterator[Unit]:
        """The units of a whole transfer from here."""
        return self._extracts.units(transfer)

    def insert(self, unit: Unit, insert: Callable[[], bool]) -> None:
        """Inserts a unit, now or between later iterations; `insert` does it, or returns False if it came too late."""
        self._pacing.add(self.instance.insert_s(unit), insert)

    def decoded(self, seconds: float, alone: bool) -> None:
        """A pass that moves rows has ended; see `Pacing.done`."""
        self._pacing.done(seconds, alone)


class _Reader(threading.Thread):
    """Waits for the tokens of a lane's iterations, in order; None ends it."""

    def __init__(self, lane: LaneThread, owner: Owner) -> None:
        super().__init__(name=f"{lane.name}-reader", daemon=True)
        self.pending: queue.SimpleQueue[tuple[Iteration, Pending, float] | None] = queue.SimpleQueue()
        self._lane, self._owner = lane, owner
        self._finished_s = 0.0
        self._decoded = False  # the iteration before this one moved rows

    def run(self) -> None:
        try:
            while (item := self.pending.get()) is not None:
                self._read(*item)
                del item
        except BaseException as error:
            self._owner.fault(error)

    def _read(self, iteration: Iteration, pending: Pending, dispatched_s: float) -> None:
        sampled = pending.wait()
        previous_s, self._finished_s = self._finished_s, self._owner.now()
        started_s = max(dispatched_s, previous_s)
        gap_s = max(0.0, dispatched_s - previous_s) if self._decoded and iteration.decode else 0.0
        self._decoded = iteration.decode
        if iteration.decode:
            seconds, alone = self._finished_s - started_s, not iteration.chunks
            self._lane.put(lambda lane: lane.decoded(seconds, alone))
        self._owner.prefilled(iteration)
        self._owner.post(
            IterationDone(
                instance=iteration.instance,
                number=iteration.number,
                rows=sampled.rows,
                firsts=sampled.firsts,
                started_s=started_s,
                finished_s=self._finished_s,
                host_gap_s=gap_s,
                logprobs=sampled.logprobs,
            )
        )
