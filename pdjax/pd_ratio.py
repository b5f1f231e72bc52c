"""How many prefill instances a decode instance needs. Enter: times of prefill passes and decode steps. Leave: ratios
N_p / N_d and the batches at which they lie in a range. Called by `pdjax.experiments.ratio`; pure arithmetic.

Both sides are balanced when as many prompts per second are computed as answers are finished:

    N_p * B_p / T_p = N_d * B_d / (T_d(B_d) * (L - 1))

The first of L tokens comes from the prefill, so a row makes L - 1 steps. A step of many rows takes little longer than
one of a single row: it is the batch of the decode side that brings 1:125 down to 1:8 and 1:3.
"""

import dataclasses
from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """The prefill side and the answers.

    Attributes:
        prefill_s: seconds of a pass over `prompts` prompts.
        output_tokens: of an answer, at least 2.
    """

    prefill_s: float
    prompts: int
    output_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A decode batch: its rows, seconds of a step, and decode instances that one prefill instance feeds, N_d / N_p."""

    rows: int
    decode_s: float
    decodes_per_prefill: float

    @property
    def text(self) -> str:
        """N_p : N_d, as 1:125, or 2.5:1 where prefill needs more."""
        ratio = self.decodes_per_prefill
        return f"1:{ratio:.3g}" if ratio >= 1 else f"{1 / ratio:.3g}:1"


def point(side: Side, decode_s: float, rows: int) -> Point:
    """The balance at one decode batch."""
    per_prompt_s = side.prefill_s / side.prompts
    per_answer_s = decode_s * (side.output_tokens - 1) / rows
    return Point(rows, decode_s, per_answer_s / per_prompt_s)


def curve(side: Side, step_s: Callable[[int], float], rows: Iterable[int]) -> list[Point]:
    """The balance at each of several decode batches; `step_s` tells the seconds of a step of so many rows."""
    return [point(side, step_s(count), count) for count in rows]


def between(points: Iterable[Point], least: float, most: float) -> tuple[int, int] | None:
    """The smallest and the largest batch whose N_d / N_p lies in a range; None if none does."""
    rows = [one.rows for one in points if least <= one.decodes_per_prefill <= most]
    return (min(rows), max(rows)) if rows else None
