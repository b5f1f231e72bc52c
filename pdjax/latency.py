"""Predicts how long an iteration or a transfer takes on one instance. Used by policies and by the simulator.

An iteration is linear in five features of what the programs really do (padded sizes, the page loop's trip count):

    chunk tokens (padded), pairs of a chunk token and a token that it attends to (in whole blocks and pages), rows
    (padded), sum of contexts, rows' contexts again, each counted as long as the longest of its block of rows

The published forms a + b*sum(L) + c*sum(L^2) (DistServe, prefill) and a + b*sum(ctx) + c*B (decode) are special cases.
There are few padded sizes, and what a program costs is not quite linear in them: where passes of a size were measured,
their own constant stands for those of tokens and rows. Times are seconds.
"""

import bisect
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from pdjax.messages import InstanceSpec
from pdjax.models.buckets import Buckets

KINDS = ("prefill", "decode", "mixed")  # of passes
SATURATED = 0.95  # of the best throughput counts as all of it: longer passes gain little and delay who waits


class Load(NamedTuple):  # quickly made: every decision and every pass needs some
    """What one iteration computes.

    Attributes:
        chunks: (tokens, prior context) of each prompt part.
        rows: decode rows.
        context_tokens: sum of their contexts, the token of this step included.
        attended_tokens: the same where each row counts as long as the longest of its block (`attended`).
    """

    chunks: tuple[tuple[int, int], ...] = ()
    rows: int = 0
    context_tokens: int = 0
    attended_tokens: int = 0

    def plus_row(self, context_tokens: int) -> "Load":
        """With one more decode row, which in doubt attends in a block of average length."""
        width = max(context_tokens, self.attended_tokens // self.rows if self.rows else 0)
        return Load(self.chunks, self.rows + 1, self.context_tokens + context_tokens, self.attended_tokens + width)

    def beside(self, *chunks: tuple[int, int]) -> "Load":
        """With prompt parts, each (tokens, prior context)."""
        return Load((*self.chunks, *chunks), self.rows, self.context_tokens, self.attended_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """A pass to measure.

    Attributes:
        chunks: (tokens, prior context) of each prompt part.
        contexts: of each decode row, in batch order, the token of the step included.
    """

    chunks: tuple[tuple[int, int], ...] = ()
    contexts: tuple[int, ...] = ()

    def load(self, spec: InstanceSpec) -> Load:
        """What it computes on such an instance."""
        rows = len(self.contexts)
        return Load(self.chunks, rows, sum(self.contexts), attended(self.contexts, spec.row_block))


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A measured pass."""

    probe: Probe
    seconds: float


def kind(load: Load) -> int:
    """Which of KINDS a pass is."""
    return (2 if load.rows else 0) if load.chunks else 1


class Latency(Protocol):
    """What the work of an instance takes, in seconds. `LatencyModel` is fitted to measured passes; `pdjax.curves` has
    the forms that papers publish. Implementations are hashable: what they say is looked up by them."""

    def __hash__(self) -> int: ...
    def iteration_s(self, spec: InstanceSpec, load: Load) -> float:
        """Of one iteration; 0 for an empty one."""
        ...

    def steps_s(self, spec: InstanceSpec, load: Load, steps: int) -> np.ndarray:
        """Of each of several decode steps, [steps]: the rows of `load` grow by a token a step. To the last bit what
        `iteration_s` says of each."""
        ...

    def transfer_s(self, nbytes: float) -> float:
        """To move KV to another instance, alone."""
        ...

    def streaming_s(self, parts: int, tokens: int) -> float:
        """By how much a pass takes longer in which the KV of so many prompt parts, with so many tokens in all, leaves
        while it is computed. Policies do not count on it, as little as on what else serving costs (`Correction`)."""
        return 0.0

    def report_s(self) -> float:
        """How long after its end the controller hears of a pass behind which another one follows at once. Policies do
        not count on it."""
        return 0.0

    def prefill_s(self, spec: InstanceSpec, tokens: int, prior: int = 0) -> float:
        """To prefill `tokens` tokens after `prior`, alone, in chunks of spec.max_chunk."""
        total = 0.0
        while tokens > 0:
            take = min(tokens, spec.max_chunk)
            total += self.iteration_s(spec, Load(((take, prior),)))
            tokens, prior = tokens - take, prior + take
        return total

    def decode_s(self, spec: InstanceSpec, rows: int, context_tokens: int, attended_tokens: int) -> float:
        """Of one decode step."""
        return self.iteration_s(spec, Load((), rows, context_tokens, attended_tokens))


@dataclasses.dataclass(frozen=True, slots=True)
class LatencyModel(Latency):
    """What was measured of an instance.

    Attributes:
        iteration: coefficients: a constant and the five features, seconds each.
        transfer_alpha_s, transfer_bytes_per_s: a transfer costs alpha + bytes / beta.
        scale: multiplies the passes of each kind, in the order of KINDS (`pdjax.correction`).
        shapes: (padded tokens, padded rows, seconds) of measured programs, ascending: constants that stand for the
            constant, the tokens' and the rows' part of `iteration` where they are known.
        streaming: of `streaming_s`: seconds of a part, and of a token.
        reporting: of `report_s`.
    """

    iteration: tuple[float, float, float, float, float, float] = (5e-3, 1e-3, 1e-7, 2e-3, 1e-6, 0.0)
    transfer_alpha_s: float = 1e-3
    transfer_bytes_per_s: float = 1e9
    scale: tuple[float, float, float] = (1.0, 1.0, 1.0)
    shapes: tuple[tuple[int, int, float], ...] = ()
    streaming: tuple[float, float] = (0.0, 0.0)
    reporting: float = 0.0

    def __hash__(self) -> int:
        return hash((self.iteration, self.scale))  # results are looked up by it with every decision: not all shapes

    def iteration_s(self, spec: InstanceSpec, load: Load) -> float:
        """Seconds of one iteration; 0 for an empty one."""
        if not load.chunks and not load.rows:
            return 0.0
        return self.scale[kind(load)] * cast(float, self._predict(*features(spec, load)))

    def steps_s(self, spec: InstanceSpec, load: Load, steps: int) -> np.ndarray:
        """Seconds of each of several decode steps, [steps]: the rows of `load` grow by a token a step. To the last bit
        what `iteration_s` says of each."""
        grown = np.arange(steps)
        tokens, pairs, rows, *_ = features(spec, load)
        contexts, widen = load.context_tokens + grown * load.rows, _widened(spec, rows, load.rows)
        seconds = self._predict(tokens, pairs, rows, contexts, (load.attended_tokens + grown * load.rows) * widen)
        return self.scale[kind(load)] * cast(np.ndarray, seconds)

    def _predict(self, tokens: float, pairs: float, rows: float, contexts: Any, attended: Any) -> Any:
        """Of contexts that are numbers or arrays alike. Written out: from Python 3.12 on, `sum` of numbers rounds
        in a way of its own."""
        _, _, b, _, d, e = self.iteration
        return self._constant(tokens, rows) + (b * pairs + d * contexts + e * attended)

    def _constant(self, tokens: float, rows: float) -> float:
        """Seconds of a pass of this padded size, before anything attends to anything."""
        at = bisect.bisect_left(self.shapes, (tokens, rows))
        if at < len(self.shapes):
            T, B, seconds = self.shapes[at]
            if tokens == T and rows == B:
                return seconds
        base, a, _, c, _, _ = self.iteration
        return base + a * tokens + c * rows

    def transfer_s(self, nbytes: float) -> float:
        return self.transfer_alpha_s + nbytes / self.transfer_bytes_per_s

    def streaming_s(self, parts: int, tokens: int) -> float:
        of_part, of_token = self.streaming
        return of_part * parts + of_token * tokens

    def report_s(self) -> float:
        return self.reporting


def features(spec: InstanceSpec, load: Load) -> tuple[float, float, float, float, float]:
    """The five features of a load on an instance with these buckets."""
    tokens, pairs, rows = 0, 0.0, load.rows
    if load.chunks:  # asked for very often: a decode step looks at nothing else
        for size, _ in load.chunks:
            tokens += size
        tokens = bucket(chunk_sizes(spec, beside_rows=rows > 0), tokens)
        pairs = _pairs(spec, load.chunks, tokens)
    if not rows:
        return tokens, pairs, 0.0, 0.0, 0.0
    padded = bucket(spec.row_buckets[-1:] if load.chunks else spec.row_buckets, rows)  # beside a chunk: one size
    return tokens, pairs, padded, load.context_tokens, load.attended_tokens * _widened(spec, padded, rows)


def _pairs(spec: InstanceSpec, chunks: tuple[tuple[int, int], ...], padded: int) -> float:
    """Pairs of a prompt token and a token that it attends to, as the programs compute them: a block of queries, full or
    not, attends to whole pages up to its last token (`pdjax.models.attention.plain.attend_blocks`)."""
    block, page = min(spec.query_block, padded), spec.page_size
    if not block:
        return sum(size * (prior + size / 2) for size, prior in chunks)
    pages = 0
    for size, prior in chunks:
        for end in range(prior + block, prior + size, block):
            pages += (end + page - 1) // page
        pages += (prior + size + page - 1) // page  # of the last block, which may not be full
    return pages * page * block


def _widened(spec: InstanceSpec, padded: float, rows: int) -> float:
    """How many rows attend for each of `rows`: those that fill the last block do as well."""
    block = spec.row_block or padded
    return min(padded, -(-rows // block) * block) / rows if rows else 0.0


@functools.lru_cache(maxsize=1024)
def saturating_tokens(model: Latency, spec: InstanceSpec, *, beside_rows: bool = False) -> int:
    """Prompt tokens of the shortest pass that uses the instance well: DistServe's L_m (section 4.3).

    The smallest padded size of a pass whose predicted prompt tokens per second reach SATURATED of the best size's. With
    more tokens a pass takes longer and computes hardly more per second.

    Args:
        model: predicts this instance's passes.
        spec: the instance; without sizes of its own, powers of two and `max_chunk` are looked at.
        beside_rows: choose among the sizes that decode rows can ride with, by passes in which rows do: what these cost
            comes with every pass, so that longer ones pay. False: by passes of prompts alone.

    Returns:
        Tokens, at most `max_chunk`; 0 for an instance that takes no prompts.
    """
    if not spec.max_chunk:
        return 0
    sizes = pass_sizes(spec, beside_rows=beside_rows)
    rows = int(beside_rows)  # beside a chunk one row is padded like all
    rates = {size: size / max(model.iteration_s(spec, Load(((size, 0),), rows)), 1e-12) for size in sizes}
    return min(size for size, rate in rates.items() if rate >= SATURATED * max(rates.values()))


def chunk_sizes(spec: InstanceSpec, *, beside_rows: bool) -> tuple[int, ...]:
    """Padded sizes of prompt passes; beside rows there are fewer. Empty: passes are not padded."""
    return _mixed(spec.chunk_buckets, spec.row_buckets) if beside_rows else spec.chunk_buckets


def pass_sizes(spec: InstanceSpec, *, beside_rows: bool) -> tuple[int, ...]:
    """Sizes among which to choose that of a prompt pass, ascending: `chunk_sizes`, or where passes are not padded,
    powers of two and `max_chunk`."""
    return chunk_sizes(spec, beside_rows=beside_rows) or _powers(spec.max_chunk)


@functools.lru_cache(maxsize=64)  # asked for with every pass
def _powers(most: int) -> tuple[int, ...]:
    return (*(1 << power for power in range(most.bit_length()) if 1 << power < most), most)


@functools.lru_cache(maxsize=1024)  # asked for with every mixed pass
def _mixed(chunks: tuple[int, ...], rows: tuple[int, ...]) -> tuple[int, ...]:
    return Buckets(chunks, rows).mixed


def fit(spec: InstanceSpec, samples: Iterable[tuple[Load, float]], base: LatencyModel | None = None) -> LatencyModel:
    """Least squares on relative error, no negative coefficient; transfer constants are those of `base`.

    Where passes are padded, every size that is among the samples gets a constant of its own (`shapes`), and those of
    `iteration` are fitted to these, for sizes that were not measured.
    """
    measured = [(features(spec, load), seconds) for load, seconds in samples]
    if not measured:
        raise ValueError("samples is empty; allowed: at least one measured iteration")
    padded = bool(spec.chunk_buckets or spec.row_buckets)
    sizes = sorted({(int(T), int(B)) for (T, _, B, _, _), _ in measured}) if padded else []
    columns = [
        [*([size == (T, B) for size in sizes] or (1.0, T, B)), pairs, contexts, attended]
        for (T, pairs, B, contexts, attended), _ in measured
    ]
    *constants, b, d, e = solve(columns, [seconds for _, seconds in measured])
    shapes: tuple[tuple[int, int, float], ...] = ()
    if sizes:
        shapes = tuple((T, B, seconds) for (T, B), seconds in zip(sizes, constants, strict=True))
        known = [shape for shape in shapes if shape[2] > 0]
        constants = [0.0] * 3  # where what attends explains all that was measured, as with few and disturbed samples
        if known:
            constants = solve([[1.0, T, B] for T, B, _ in known], [seconds for *_, seconds in known])
    constant, a, c = constants
    return dataclasses.replace(base or LatencyModel(), iteration=(constant, a, b, c, d, e), shapes=shapes)


def fitted(spec: InstanceSpec, samples: Iterable[Sample]) -> LatencyModel:
    """`fit` to measured passes of such an instance."""
    return fit(spec, [(sample.probe.load(spec), sample.seconds) for sample in samples])


def solve(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients >= 0 with the least sum of squared relative errors."""
    from scipy.optimize import nnls  # slow to import, and only fitting needs it

    matrix = np.asarray(columns, float) / np.asarray(seconds)[:, None]
    scale = np.maximum(matrix.max(axis=0), 1e-30)  # features differ by 1e6: scale columns for the solver
    solution, _ = nnls(matrix / scale, np.ones(len(seconds)))
    return [float(value) for value in solution / scale]


def attended(contexts: Sequence[int], block: int) -> int:
    """Sum of the contexts of rows in batch order, each as long as the longest of its block; block 0: of all."""
    size = block or max(len(contexts), 1)
    parts = (contexts[at : at + size] for at in range(0, len(contexts), size))
    return sum(len(part) * max(part) for part in parts)


def bucket(buckets: Sequence[int], size: int) -> int:
    """The smallest of the ascending buckets that holds `size`; `size` itself where there are none, or it is 0."""
    at = bisect.bisect_left(buckets, size)
    return buckets[at] if size and at < len(buckets) else size
