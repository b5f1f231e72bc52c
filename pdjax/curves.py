"""Latency models of the form that papers publish. Enter: constants, seconds and tokens. Leaves: a `Latency` for the
simulator, the planner and policies. Made by `pdjax.published` and by users who have fitted their own.

    prefill of a batch of prompts   a + b * sum(L) + c * sum(L^2)      (DistServe, appendix A)
    decode step of B rows           a + b * sum(context) + c * B       with constants by batch size

or tables between whose points it goes straight (Splitwise's simulator).
"""

import bisect
import dataclasses

import numpy as np

from pdjax.latency import Latency, Load
from pdjax.messages import InstanceSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Decode:
    """Constants of decode steps with at least `rows` rows, seconds: of a step, of a context token, of a row."""

    rows: int
    step_s: float
    context_s: float
    row_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Curves(Latency):
    """An instance by published constants, all in seconds.

    A pass goes through the `pp` stages of its instance one after the other, each with its share of the layers. Decode
    rows of a pipeline are taken to make their steps in `pp` groups of equal size that follow each other, so that no
    stage stands still: a step then takes what a group takes in all stages. In a pass with prompts and rows, rows cost
    what they add to a step: the weights are read once, and few prompt tokens beside rows cost no less than a step.

    Attributes:
        prefill: (constant, of a token, of a token times a token) of a pass of prompts.
        decode: by rows, ascending, the first from 0 on.
        pass_s, token_s: what the engine adds to every pass, and for each of its tokens.
        stage_s: what every further stage adds.
        alpha_s, bytes_per_s: of a transfer alone.
    """

    prefill: tuple[float, float, float]
    decode: tuple[Decode, ...]
    pass_s: float = 0.0
    token_s: float = 0.0
    stage_s: float = 0.0
    alpha_s: float = 0.0
    bytes_per_s: float = float("inf")

    def __hash__(self) -> int:
        return hash(self.prefill)  # results are looked up by it with every decision: not all constants

    def iteration_s(self, spec: InstanceSpec, load: Load) -> float:
        if not load.chunks and not load.rows:
            return 0.0
        seconds = self._fixed(spec, load)
        if load.rows:
            part = self._part(load.rows)
            seconds += part.context_s / spec.pp * load.context_tokens
        return seconds

    def steps_s(self, spec: InstanceSpec, load: Load, steps: int) -> np.ndarray:
        part = self._part(load.rows)
        contexts = load.context_tokens + np.arange(steps) * load.rows
        seconds: np.ndarray = self._fixed(spec, load) + part.context_s / spec.pp * contexts
        return seconds

    def transfer_s(self, nbytes: float) -> float:
        return self.alpha_s + nbytes / self.bytes_per_s

    def _part(self, rows: int) -> Decode:
        return self.decode[bisect.bisect_right(self.decode, rows, key=lambda part: part.rows) - 1]

    def _fixed(self, spec: InstanceSpec, load: Load) -> float:
        """All of a pass but what its rows' contexts cost."""
        tokens, square = 0, 0
        for size, prior in load.chunks:
            tokens += size
            square += size * (size + 2 * prior)  # of the whole prompt, less that of what was there
        seconds = self.pass_s + self.token_s * (tokens + load.rows) + self.stage_s * (spec.pp - 1)
        weights = 0.0  # what is computed with them, or what they take to read
        if tokens:
            constant, of_token, of_square = self.prefill
            weights = constant + of_token * tokens + of_square * square
        if load.rows:
            part = self._part(load.rows)
            seconds += part.row_s / spec.pp * load.rows
            weights = max(weights, part.step_s)
        return seconds + weights


@dataclasses.dataclass(frozen=True, slots=True)
class Interpolated(Latency):
    """An instance by tables of measured passes, as Splitwise's simulator has it: the end parts of a table go on as they
    are, what tokens attend to costs nothing of its own, and pipelines make their steps as with `Curves`.

    Attributes:
        prefill: (prompt tokens, seconds) of passes of prompts, ascending.
        decode: (rows, seconds) of decode steps, ascending.
        mixed: what a pass with prompts and rows takes, in passes of as many prompt tokens as it has tokens.
        alpha_s, bytes_per_s: of a transfer alone.
    """

    prefill: tuple[tuple[int, float], ...]
    decode: tuple[tuple[int, float], ...]
    mixed: float = 1.1
    alpha_s: float = 0.0
    bytes_per_s: float = float("inf")

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            at = [number for number, _ in getattr(self, name)]
            if len(at) < 2 or sorted(set(at)) != at:
                raise ValueError(f"{name} has points at {at}; allowed: two or more, ascending")

    def __hash__(self) -> int:
        return hash(self.prefill[-1])  # as that of `Curves`

    def iteration_s(self, spec: InstanceSpec, load: Load) -> float:
        tokens = 0
        for size, _ in load.chunks:
            tokens += size
        if not tokens:
            return _between(self.decode, load.rows / spec.pp) if load.rows else 0.0
        seconds = _between(self.prefill, tokens + load.rows)
        return self.mixed * seconds if load.rows else seconds

    def steps_s(self, spec: InstanceSpec, load: Load, steps: int) -> np.ndarray:
        return np.full(steps, self.iteration_s(spec, load))

    def transfer_s(self, nbytes: float) -> float:
        return self.alpha_s + nbytes / self.bytes_per_s


def _between(points: tuple[tuple[int, float], ...], at: float) -> float:
    """On the straight line through the two points around it, or the two nearest."""
    right = min(max(bisect.bisect_right(points, at, key=lambda point: point[0]), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1 : right + 1]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
