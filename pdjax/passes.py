"""Passes on their way through a simulated instance: its decode batch, its pipeline of stages, its run of steps. Enters:
iterations, and what they take. Leaves: what they compute, and when each ends. Called by `pdjax.simulated`.
"""

import dataclasses

import numpy as np

from pdjax.latency import Load, attended
from pdjax.messages import Iteration


@dataclasses.dataclass(slots=True)
class Batch:
    """Sizes of one instance's decode batch; its rows are in the order of joining. Steps count when they start: what
    starts behind them, before they are done, changes a batch that has made them."""

    steps: int = 0
    context_tokens: int = 0
    offsets: dict[int, int] = dataclasses.field(default_factory=dict)  # slot -> context minus steps
    _attended: int | None = None  # of the offsets

    def change(self, iteration: Iteration) -> None:
        for slot in iteration.leaves:
            self.context_tokens -= self.offsets.pop(slot) + self.steps
        for join in iteration.joins:
            self.offsets[join.slot] = join.position + 1 - self.steps
            self.context_tokens += join.position + 1
        if iteration.leaves or iteration.joins:
            self._attended = None

    def load(self, iteration: Iteration, block: int) -> Load:
        chunks = tuple((len(chunk.tokens), chunk.start) for chunk in iteration.chunks)
        if not iteration.decode:
            return Load(chunks)
        if self._attended is None:
            self._attended = attended(tuple(self.offsets.values()), block)
        rows = len(self.offsets)
        return Load(chunks, rows, self.context_tokens, self._attended + self.steps * rows)

    def step(self, count: int) -> None:
        self.steps += count
        self.context_tokens += count * len(self.offsets)


@dataclasses.dataclass(slots=True)
class Stages:
    """The pipeline of one instance.

    Attributes:
        free_s: by stage, when it has done what was started.
        step_s: when the last decode step that was started ends: the next one needs its tokens.
        started: iterations of the queue that are on their way.
    """

    free_s: list[float]
    step_s: float = 0.0
    started: int = 0

    def start_s(self, now: float, *, decode: bool) -> float:
        """When an iteration can start."""
        return max(now, self.free_s[0], self.step_s if decode else 0.0)

    def run(self, start_s: float, seconds: float) -> float:
        """A pass goes through all stages, each takes its part; returns when it is through."""
        part = seconds / len(self.free_s)
        for stage, free_s in enumerate(self.free_s):
            start_s = self.free_s[stage] = max(start_s, free_s) + part
        return start_s


@dataclasses.dataclass(slots=True)
class Run:
    """A run on its way: it ends after `steps` steps, of which `reported` are."""

    iteration: Iteration
    started_s: float
    seconds: np.ndarray  # of each step
    before_s: list[float]  # `Stages.free_s` when it started
    steps: int
    ends: list[float] = dataclasses.field(init=False)
    reported: int = 0
    version: int = 0  # of its next report: a cut makes a new one

    def __post_init__(self) -> None:
        stages, end_s, self.ends = Stages(list(self.before_s)), self.started_s, []
        if len(self.before_s) == 1:  # to the last bit as below, and quicker
            self.ends = np.cumsum(np.concatenate([[self.started_s], self.seconds]))[1:].tolist()
            return
        for seconds in self.seconds.tolist():
            end_s = stages.run(end_s, seconds)
            self.ends.append(end_s)

    def after(self) -> tuple[list[float], float]:
        """When the stages have done its last step, each of them and all."""
        first = self.steps == 1  # only this one can have met others there
        start_s = self.started_s if first else self.ends[self.steps - 2]
        stages = Stages(list(self.before_s) if first else [start_s] * len(self.before_s))
        end_s = stages.run(start_s, float(self.seconds[self.steps - 1]))
        return stages.free_s, end_s
