"""Latency of an instance from tables of its operators. Enter: seconds of each operator at the sizes it was measured at
(`pdjax.operator_tables` reads them). Leaves: a `Latency` for the simulator, the planner and policies.

    pass = operators of T tokens + operators of S sequences + attention of the pass

The sums over layers are in the tables. Attention of rows beside a prompt part has a table of its own, since a kernel
that takes both in one call may need much longer than one call for each.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from pdjax.latency import Latency, Load
from pdjax.messages import InstanceSpec


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Table:
    """Seconds over a grid of sizes: straight between them, below the smallest as there, above the largest in
    proportion.

    Attributes:
        axes: ascending sizes, at least two of each.
        seconds: [sizes of each axis].
    """

    axes: tuple[tuple[float, ...], ...]
    seconds: np.ndarray

    def __post_init__(self) -> None:
        for number, axis in enumerate(self.axes):
            if len(axis) < 2 or any(low >= high for low, high in itertools.pairwise(axis)):
                raise ValueError(f"axes[{number}] is {axis}; allowed: at least two sizes that ascend")
        if self.seconds.shape != tuple(map(len, self.axes)):
            raise ValueError(f"seconds has shape {self.seconds.shape}; allowed: {tuple(map(len, self.axes))}")
        if not (np.isfinite(self.seconds).all() and (self.seconds >= 0).all()):
            raise ValueError("seconds has negative or endless values; allowed: numbers >= 0")

    def at(self, *sizes: float) -> float:
        """Seconds at one size of each axis."""
        return float(_at(self.axes[-1], self.line(*sizes[:-1]), sizes[-1]))

    def line(self, *sizes: float) -> np.ndarray:
        """Seconds over the last axis, at one size of each other."""
        seconds = self.seconds
        for axis, size in zip(self.axes[:-1], sizes, strict=True):
            seconds = _at(axis, seconds, size)
        return seconds


def _at(axis: Sequence[float], seconds: Any, size: float) -> Any:
    """At one size of the first axis of numbers or arrays."""
    if size >= axis[-1]:
        return seconds[-1] * (size / axis[-1])
    low = max(bisect.bisect_right(axis, size) - 1, 0)
    part = max((size - axis[low]) / (axis[low + 1] - axis[low]), 0.0)
    return seconds[low] + part * (seconds[low + 1] - seconds[low])


def _along(axis: Sequence[float], line: Sequence[float], sizes: np.ndarray) -> np.ndarray:
    """At many sizes, [n]: to the last bit what `_at` says of each."""
    known, seconds = np.asarray(axis, float), np.asarray(line)
    low = np.clip(np.searchsorted(known, sizes, side="right") - 1, 0, len(known) - 2)
    part = np.maximum((sizes - known[low]) / (known[low + 1] - known[low]), 0.0)
    inside = seconds[low] + part * (seconds[low + 1] - seconds[low])
    return np.where(sizes >= known[-1], seconds[-1] * (sizes / known[-1]), inside)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Operators(Latency):
    """An instance by its operators' tables, of all layers and in seconds. Equal only to itself.

    A pass goes through the `pp` stages of its instance one after the other. Decode rows of a pipeline make their steps
    in `pp` groups of equal size, as in `pdjax.curves`.

    Attributes:
        tokens: operators that work on every token of a pass, by tokens.
        sequences: head and sampler, by prompts and rows of a pass.
        prefill: attention of a prompt part, by (its tokens, tokens before it).
        decode: attention of rows of equal contexts, by (rows, context).
        mixed: attention of a prompt part and rows in one call, by (its tokens, tokens before it, rows, context). None:
            the sum of both.
        skew: what unequal contexts cost: of the way from rows of mean context to as many of the longest.
        graph_tokens: passes of at most so many tokens are replayed from a captured graph, which saves
            `graph_decode_s` in a pass of rows alone and `graph_mixed_s` in one with prompts.
        alpha_s, bytes_per_s: of a transfer alone.
    """

    tokens: Table
    sequences: Table
    prefill: Table
    decode: Table
    mixed: Table | None = None
    skew: float = 0.0
    graph_tokens: int = 0
    graph_decode_s: float = 0.0
    graph_mixed_s: float = 0.0
    alpha_s: float = 0.0
    bytes_per_s: float = float("inf")

    __hash__ = object.__hash__

    def iteration_s(self, spec: InstanceSpec, load: Load) -> float:
        if not load.chunks and not load.rows:
            return 0.0
        seconds, axis, line = _pass(self, load.chunks, load.rows, spec.pp)
        if not load.rows:
            return seconds
        mean = load.context_tokens / load.rows
        longest = max(load.attended_tokens / load.rows, mean)
        of_mean: float = _at(axis, line, mean)
        return seconds + (of_mean + self.skew * (_at(axis, line, longest) - of_mean))

    def steps_s(self, spec: InstanceSpec, load: Load, steps: int) -> np.ndarray:
        seconds, axis, line = _pass(self, load.chunks, load.rows, spec.pp)
        grown = np.arange(steps) * load.rows
        mean = (load.context_tokens + grown) / load.rows
        longest = np.maximum((load.attended_tokens + grown) / load.rows, mean)
        of_mean = _along(axis, line, mean)
        return seconds + (of_mean + self.skew * (_along(axis, line, longest) - of_mean))

    def transfer_s(self, nbytes: float) -> float:
        return self.alpha_s + nbytes / self.bytes_per_s


@functools.lru_cache(maxsize=4096)  # asked for twice with every pass, and decode steps are alike
def _pass(
    operators: Operators, chunks: tuple[tuple[int, int], ...], rows: int, pp: int
) -> tuple[float, Sequence[float], list[float]]:
    """What a pass takes without the attention of its rows; contexts, and what these rows take at each of them. Where
    prompt parts and rows are in one table, the one part is in it that attends to most."""
    group = rows / pp
    tokens = group + sum(size for size, _ in chunks)
    seconds = operators.tokens.at(tokens) + operators.sequences.at(group + len(chunks))
    if tokens <= operators.graph_tokens:
        seconds -= operators.graph_mixed_s if chunks else operators.graph_decode_s
    table, sizes = operators.decode, [group]
    once = float(operators.prefill.seconds[0, 0])  # the call itself, which several prompts share
    alone = sorted(chunks, key=lambda chunk: chunk[0] * (chunk[0] + 2 * chunk[1]))
    if chunks and rows and operators.mixed is not None:
        table, sizes = operators.mixed, [*alone.pop(), group]
    elif chunks:
        seconds += once
    for chunk in alone:
        seconds += max(operators.prefill.at(*chunk) - once, 0.0)
    return seconds, table.axes[-1], table.line(*sizes).tolist() if rows else []
