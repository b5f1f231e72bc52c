"""Iterations on their way, and the clock of the decode steps that are done. Used by `pdjax.lane` only.

A *run* is an iteration of several decode steps in which nothing changes. A cluster that computes no tokens says when
each of its steps will end as soon as it starts; what is done at a moment then follows from the time, and neither side
looks at a single step. The steps of a run that count as issued are those that are done, and as many more as may be in
flight: just those that would have been issued by then, were every step an iteration of its own.

Steps of a batch are numbered by its lane from 0; a row's tokens are the steps from its first.
"""

import bisect
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from pdjax.latency import Load
from pdjax.live import Live
from pdjax.messages import Iteration, IterationDone, RunStarted

Row = tuple[Live, int]  # with its attempt: a row may leave, start over and join again
_KEPT_STEPS = 4096  # of a clock; more are kept only while a row needs them


@dataclasses.dataclass(slots=True)
class Flight:
    """An issued iteration.

    Attributes:
        rows: slot -> request of the batch that it moves.
        ending: rows for which it is the last step.
        steps: how many it has; a cut makes it fewer.
        load: of its first step.
        predicted_s: how long that was expected to take when it was issued.
        done: how many of them have been reported; `clocked`: are on the lane's clock.
        started_s, ends: when it began and when its steps end, once the cluster has said so.
    """

    iteration: Iteration
    rows: Mapping[int, Live]
    ending: Sequence[Row]
    steps: int
    load: Load
    predicted_s: float
    done: int = 0
    clocked: int = 0
    started_s: float = 0.0
    ends: Sequence[float] = ()

    @property
    def left(self) -> int:
        return self.steps - self.done

    def ended(self, now: float) -> int:
        """Steps that have ended by now."""
        return max(self.done, bisect.bisect_right(self.ends, now, hi=min(self.steps, len(self.ends))))

    def load_of(self, step: int) -> Load:
        """Of one of its steps: every row grows by a token a step."""
        load, grown = self.load, step * self.load.rows
        return Load(load.chunks, load.rows, load.context_tokens + grown, load.attended_tokens + grown)


class Flights:
    """The iterations of one instance that are not done, at most `most` steps at a time.

    Attributes:
        number: of the last iteration that counts as issued.
        clock: the decode steps that are done, where the cluster only counts them.
        quiet_s: until then `newly_issued` is 0, if nothing is changed here.
    """

    def __init__(self, most: int) -> None:
        self.number = 0
        self.quiet_s = math.inf
        self.clock = StepClock()
        self._most = most
        self._flights: deque[Flight] = deque()
        self._run: Flight | None = None  # the last one, while more of its steps can still count as issued
        self._issued = 0  # of these
        self._left = 0  # steps that are not reported
        self._began_s = 0.0  # when the first of them could start
        self._vacant = 0  # places before the run that this event made, and no decision has filled yet

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    def add(self, flight: Flight, now: float) -> None:
        if not self._flights:
            self._began_s = now
        self._flights.append(flight)
        self._left += flight.steps
        self.quiet_s = -math.inf
        if flight.steps > 1:
            self._run, self._issued = flight, 0
        else:
            self.number += 1

    def busy_s(self, now: float, seconds_of: Callable[[Load], float]) -> float:
        """Seconds until all that counts as issued is done, as predicted; one that takes longer is about to end.

        Args:
            now: the time.
            seconds_of: predicts the later steps of a run; everything else is taken by what was predicted at its issue.
        """
        began_s, steps = self._began_s, []
        for flight in self._flights:
            if flight.steps == 1:  # nearly always, and asked for often
                steps.append(flight.predicted_s)
                continue
            done = flight.ended(now)
            if done and not steps:
                began_s = flight.ends[done - 1]
            for step in range(done, self._issued if flight is self._run else flight.steps):
                steps.append(seconds_of(flight.load_of(step)) if step else flight.predicted_s)
        if not steps:
            return 0.0
        total = max(0.0, began_s + steps[0] - now)
        for seconds in steps[1:]:
            total += seconds
        return total

    @property
    def oldest(self) -> int:
        """The number of the first iteration that is not done, or of the next one."""
        return self._flights[0].iteration.number + self._flights[0].done if self._flights else self.number + 1

    @property
    def room(self) -> bool:
        """For one more."""
        return self._run is None and self._left < self._most

    @property
    def unissued(self) -> int:
        """Steps of an open run that do not count as issued yet."""
        return 0 if self._run is None else self._run.steps - self._issued

    def decided(self) -> None:
        """What an event has vacated may be filled now."""
        self._vacant = 0
        self.quiet_s = -math.inf

    def newly_issued(self, now: float) -> int:
        """Steps of an open run that count as issued by now and were not told before."""
        run = self._run
        self.quiet_s = math.inf
        if run is None:
            return 0
        ended = run.ended(now)
        if ended < len(run.ends):
            self.quiet_s = run.ends[ended]
        ahead = self._left - run.left + self._vacant
        new = min(run.steps, ended + self._most - ahead) - self._issued
        if new <= 0:
            return 0
        self._issued += new
        self.number += new
        if self._issued == run.steps:
            self._run = None
        return new

    def cut(self) -> bool:
        """Ends an open run after what is issued; False if there is none."""
        run, self._run = self._run, None
        if run is None:
            return False
        self._left -= run.steps - self._issued
        run.steps = self._issued
        return True

    def started(self, event: RunStarted, now: float) -> None:
        # In a pipeline of stages it may begin before what was issued before it is done.
        run = next(flight for flight in self._flights if flight.iteration.number == event.number)
        run.started_s, run.ends = now, event.ends
        self.quiet_s = -math.inf

    def reported(self, event: IterationDone, now: float) -> Flight:
        """Takes the iteration, or the steps of a run, that an event reports out of flight."""
        flight = self._flights[0]
        self.quiet_s = -math.inf
        self._began_s = event.finished_s  # of the next: it was issued already
        expected = flight.iteration.number + flight.done + event.steps - 1
        if event.number != expected or event.steps > flight.left:
            raise RuntimeError(f"instance {event.instance} reports iteration {event.number} instead of {expected}")
        if event.rows is None and flight.iteration.decode:
            if flight.ends:
                self._tick(flight, flight.done + event.steps)
            else:  # a single step
                self.clock.add(event.started_s, (now,))
        flight.done += event.steps
        self._left -= event.steps
        if self._run is not None and flight is not self._run:
            self._vacant = event.steps
        if not flight.left:
            self._flights.popleft()
        return flight

    def tick(self, now: float) -> None:
        """Writes the steps of a run that are done by now on the clock."""
        if self._flights and self._flights[0].ends:
            self._tick(self._flights[0], self._flights[0].ended(now))

    def forget(self) -> None:
        """The instance is gone."""
        self._flights.clear()
        self._left = 0
        self._run = None

    def _tick(self, run: Flight, done: int) -> None:
        at = run.clocked
        if done > at:
            self.clock.add(run.ends[at - 1] if at else run.started_s, run.ends[at:done])
            run.clocked = done


class StepClock:
    """When the done steps of a lane began and ended; steps that no row needs any more are forgotten."""

    def __init__(self) -> None:
        self._first = 0  # number of the first step that is kept
        self._most = _KEPT_STEPS
        self._starts: list[float] = []
        self._ends: list[float] = []

    @property
    def done(self) -> int:
        return self._first + len(self._ends)

    def add(self, started_s: float, ends: Sequence[float]) -> None:
        """Steps back to back."""
        self._starts.append(started_s)
        self._starts.extend(ends[:-1])
        self._ends.extend(ends)

    def start(self, step: int) -> float:
        return self._starts[step - self._first]

    def ends(self, step: int) -> list[float]:
        """Of all steps from this one on."""
        return self._ends[step - self._first :]

    @property
    def long(self) -> bool:
        """Whether it is time to forget."""
        return len(self._ends) > self._most

    def forget(self, before: int) -> None:
        """Steps below `before`."""
        count = max(0, before - self._first)
        del self._starts[:count], self._ends[:count]
        self._first += count
        self._most = 2 * len(self._ends) + _KEPT_STEPS
