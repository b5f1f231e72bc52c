"""The cluster whose instances are ranks of an `mpirun` job. Runs on rank 0, which has no device: the controller's
commands become words to the ranks of an instance, and what these say becomes events. The other end is `pdjax.mpi.part`.

Every rank of an instance is told the same words in the same order, point to point; its leader reports iterations. An
instance is lost when one of its ranks is: the others are told to leave, and nothing is expected of them.
"""

import logging
import queue
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pdjax.build import Progress, Warmup
from pdjax.latency import Probe
from pdjax.messages import (
    AbortTransfer,
    Command,
    Cut,
    Event,
    InstanceLost,
    InstanceSpec,
    Iteration,
    IterationDone,
    StartTransfer,
)
from pdjax.mpi import words
from pdjax.mpi.line import Line
from pdjax.mpi.moves import Moves

CLOSE_S = 5.0
_POLL_S = 0.2  # how often a start looks whether it is still wanted
_log = logging.getLogger("pdjax")


class MpiCluster:
    """Implements `Cluster`; made once for each engine of the job, after the last one was closed.

    Args:
        line: of rank 0.
        build: what the ranks are to build; its specs have their ranks.
    """

    def __init__(self, line: Line, build: words.Build) -> None:
        self._build = build
        self.specs: tuple[InstanceSpec, ...] = build.specs
        self._line = line
        self._instance_of = {rank: spec.index for spec in self.specs for rank in spec.ranks}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards all below; told when an answer of the start or end has come
        self._moves = Moves(self.specs, self._line.tell_all, self.post, self.now, build.verify_kv)
        self._in_flight: Counter[int] = Counter()  # instance -> iterations
        self._lost: dict[int, str] = {}  # instance -> why
        self._closed = False
        self.roads: dict[int, str] = {}  # by rank: how KV crosses, and why so
        self.late: list[int] = []  # ranks that did not end their part within CLOSE_S
        self._answers: dict[int, Any] = {}  # rank -> Built, Warmed or Ended
        self._progress: dict[int, words.Progress] = {}
        self._echo: int | None = None
        self._compiled: dict[int, int] = {}
        self._on_progress: Progress | None = None
        line.epoch = build.engine
        line.listen(self._heard)

    def build(self, check: Callable[[], None]) -> None:
        """Lets the ranks load the weights and make the pages. `check` is called now and then; what it raises ends it.

        Raises:
            ValueError: a rank cannot build its part; the message says which and why.
            RuntimeError: a rank was lost.
        """
        for rank, answer in self._ask(self._build, check).items():
            if answer.error is not None:
                raise ValueError(f"rank {rank}: {answer.error}")
            self.roads[rank] = answer.road

    def now(self) -> float:
        return self._line.now()

    def post(self, event: Event) -> None:
        self._events.put(event)

    def submit(self, command: Command) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError("the cluster is closed")
            match command:
                case Iteration(instance):
                    if instance in self._lost:
                        return  # the event that says so is on its way to the controller
                    self._in_flight[instance] += 1
                    self._line.expect(1)
                    self._moves.issued(command)
                    self._line.tell_all(self.specs[instance].ranks, command)
                case Cut():
                    raise RuntimeError("instances that compute tokens take no runs")
                case StartTransfer():
                    self._moves.start(command)
                case AbortTransfer():
                    self._moves.abort(command)

    def next_event(self, timeout_s: float | None) -> Event | None:
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def warm(self, probes: Sequence[Probe] | None, progress: Progress | None, check: Callable[[], None]) -> Warmup:
        """As `pdjax.build.warm`, on all ranks at the same time: each has devices of its own."""
        started = time.perf_counter()
        self._on_progress = progress
        answers = self._ask(words.Warm(None if probes is None else tuple(probes)), check)
        leaders = [answers[spec.ranks[0]] for spec in self.specs]
        programs = tuple(name for answer in leaders for name in answer.programs)
        compile_s = sum(answer.compile_s for answer in answers.values())
        samples = tuple(answer.samples for answer in leaders)
        return Warmup(programs, time.perf_counter() - started, compile_s, samples)

    def latency(self, count: int = 20) -> dict[int, float]:
        """Seconds that a word takes to each rank and back, while nothing else is said: the median of `count`."""
        out = {}
        for rank in self._alive():
            times = []
            for number in range(count):
                with self._changed:
                    self._echo, began = None, time.perf_counter()
                    self._line.expect(1)
                    self._line.tell(rank, words.Echo(number))
                    self._changed.wait_for(lambda: self._echo is not None or self._lost, CLOSE_S)
                    self._line.expect(-1)
                times.append(time.perf_counter() - began)
            out[rank] = statistics.median(times)
        return out

    def compiled(self) -> int:
        """Programs compiled on all ranks since their warm-up."""
        return sum(self._compiled.values())

    def lose(self, rank: int, why: str) -> None:
        """A rank is dead, or does not answer: its instance is lost."""
        with self._changed:
            index = self._instance_of[rank]
            if index in self._lost:
                return
            _log.warning("instance %d is lost: %s", index, why)
            self._lost[index] = why
            ranks = self.specs[index].ranks
            self._line.give_up(index)
            for other in ranks:  # the rank itself too: it may only have been silent
                self._line.last_word(other, words.Leave(f"instance {index} is lost: {why}"))
            self._line.tell_all(self._instance_of, words.Gone(index))
            self._line.expect(-self._in_flight.pop(index, 0))
            self._moves.lost(index)
            self.post(InstanceLost(index, why))
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            alive = self._alive()
            self._answers.clear()
            self._line.expect(-sum(self._in_flight.values()))
            self._line.tell_all(alive, words.EndEngine())
            self._changed.wait_for(lambda: self._answers.keys() >= set(self._alive()), CLOSE_S)
            self.late = sorted(set(self._alive()) - self._answers.keys())
            if self.late:
                _log.warning("ranks %s do not answer at the end of their engine", self.late)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _alive(self) -> Sequence[int]:
        return [rank for rank, index in self._instance_of.items() if index not in self._lost]

    def _ask(self, word: words.Word, check: Callable[[], None]) -> dict[int, Any]:
        """Says a word to all ranks and waits for all answers."""
        with self._changed:
            self._answers.clear()
            self._line.tell_all(self._instance_of, word)
            while not self._changed.wait_for(
                lambda: self._lost or len(self._answers) == len(self._instance_of), _POLL_S
            ):
                check()
            if self._lost:
                raise RuntimeError(f"{'; '.join(self._lost.values())}: an engine needs all of its ranks to start")
            return dict(self._answers)

    def _heard(self, rank: int, word: Any) -> None:
        """In the post's thread."""
        with self._changed:
            match word:
                case IterationDone():
                    self._in_flight[word.instance] -= 1
                    self._line.expect(-1)
                    self._moves.done(word)
                    self.post(word)
                case words.Inserted():
                    self._moves.inserted(rank, word)
                case words.Stopped():
                    self._moves.stopped(rank, word)
                case words.Failed():
                    self._moves.failed(word)
                case words.Digests():
                    self._moves.compared(rank, word)
                case words.Compiled(count):
                    self._compiled[rank] = count
                case words.Progress():
                    self._progress[rank] = word
                    if self._on_progress is not None:
                        done, total = (sum(getattr(p, n) for p in self._progress.values()) for n in ("done", "total"))
                        self._on_progress(done, total, f"rank {rank}: {word.what}")
                case words.Echo(number):
                    self._echo = number
                    self._changed.notify_all()
                case words.Built() | words.Warmed() | words.Ended():
                    self._answers[rank] = word
                    self._changed.notify_all()
                case _:
                    raise RuntimeError(f"rank {rank} says {word}, which nobody asked for")
