"""What is asked of an engine and when: a description like "fixed:512,64" enters, a `Workload` leaves.

Called by the launchers and by users; `Engine.replay` and the simulator play it. The same arguments give the same
workload, on every machine: all randomness comes from `seed`, and a request's tokens from (seed, its number) alone.

Kinds:
    chat                  the prompts in pdjax/data/chat.jsonl, in order, over and over
    prompts:FILE.jsonl    the same with a file of one's own (`pdjax.traces.read_prompts`)
    fixed:IN,OUT          random prompts of IN tokens, answers of OUT
    uniform:LO-HI,LO-HI   lengths drawn evenly from both ranges, ends included
    lengths:FILE.csv      pairs of lengths drawn from the rows of the file
    azure:FILE.csv        rows of a trace in order of time; Azure's columns or BurstGPT's
    mooncake:FILE.jsonl   the same for a Mooncake trace; prompts share prefixes as its block ids say
    phases:KIND@N;KIND@N  N requests of one kind, then N of another: a mix that moves (`pdjax.phases`)

All but chat and prompts are driven by lengths: prompts are random tokens, and EOS is ignored so that an answer has the
length that was asked for.

Arrivals (the first comes at 0):
    poisson     exponential gaps of mean 1 / rate
    gamma:CV    gamma gaps with coefficient of variation CV, 0.001 to 1000: burstier than Poisson above 1
    uniform     equal gaps of 1 / rate
    trace       the gaps of the trace; with a rate, all stretched by one factor to that mean rate
    closed:N    N clients, each asks again when it has its answer

No request arrives later than MAX_ARRIVAL_S.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from pdjax import arrivals, phases, traces
from pdjax.checks import check_whole, is_number
from pdjax.request import SLO, SamplingParams, SLOClass

KINDS = (
    "chat, fixed:IN,OUT, uniform:LO-HI,LO-HI, lengths:FILE, azure:FILE, mooncake:FILE, prompts:FILE, phases:KIND@N;..."
)
ARRIVALS = arrivals.KINDS
MAX_ARRIVAL_S = 1e6  # more than that no thread can wait for everywhere


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One request: what `Engine.submit` takes, and the seconds after the start at which it arrives. With a `slo_class`,
    a class of the engine by its name, `slo` has the limits of that class.

    Raises:
        ValueError: it arrives before the start, later than MAX_ARRIVAL_S, or at no number of seconds.
    """

    arrival_s: float
    prompt: str | list[dict[str, str]] | list[int]
    sampling: SamplingParams
    slo: SLO
    user_id: str
    slo_class: str = ""

    def __post_init__(self) -> None:
        if not is_number(self.arrival_s) or not 0 <= self.arrival_s <= MAX_ARRIVAL_S:
            raise ValueError(f"arrival_s is {self.arrival_s!r}; allowed: seconds from 0 to {MAX_ARRIVAL_S:.0f}")


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Items in order of arrival.

    Attributes:
        note: what a reader of the results must know, one line.
        clients: of a closed loop: this many requests are in flight, arrival_s is 0 for all; None: arrival_s counts.

    Raises:
        ValueError: `clients` is no whole number of at least 1.
    """

    items: tuple[Item, ...]
    note: str
    clients: int | None = None

    def __post_init__(self) -> None:
        if self.clients is not None:
            check_whole("clients", self.clients, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Draft:
    """A request before it has an arrival and a number."""

    prompt: str | list[dict[str, str]] | list[int]
    max_tokens: int
    id: str | None = None
    pace: float = 1.0  # by how much faster than the rate it comes


def parse(
    kind: str,
    *,
    num_requests: int | None,
    vocab_size: int,
    max_model_len: int,
    rate: float | None = None,
    arrival: str = "poisson",
    seed: int = 0,
    max_tokens: int = 128,
    temperature: float = 0.0,
    slo: SLO | None = None,
    slo_classes: Sequence[SLOClass] = (),
    trace_start_s: float = 0.0,
    trace_end_s: float = math.inf,
) -> Workload:
    """Makes the workload that a description names; see the module for the words.

    Args:
        kind: the workload.
        num_requests: how many; None: every row or prompt that there is (not for fixed, uniform and lengths).
        vocab_size: random prompts draw their ids below it.
        max_model_len: most tokens of a request, prompt and answer. Rows of files above it are dropped and counted.
        rate: requests per second, inf for all at once. None: as the trace says; not for poisson, gamma and uniform.
        arrival: when they come.
        seed: of all that is random, answers at a temperature included.
        max_tokens: of an answer, for chat and for prompts that do not say.
        temperature: of all requests.
        slo: of all requests; None: no limit.
        slo_classes: requests are of these in turn, with their limits in place of `slo`.
        trace_start_s, trace_end_s: the part of a trace to take, in its own seconds after its first row.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    name, _, detail = kind.partition(":")
    source = _Source(detail, num_requests, vocab_size, max_model_len, seed, max_tokens, trace_start_s, trace_end_s)
    if name not in _READERS or (name == "chat") != (detail == ""):
        raise ValueError(f"workload is {kind!r}; allowed: {KINDS}")
    if num_requests is not None and num_requests < 1:
        raise ValueError(f"num_requests is {num_requests!r}; allowed: a whole number >= 1")
    for field, seconds in (("trace_start_s", trace_start_s), ("trace_end_s", trace_end_s)):
        if not is_number(seconds):
            raise ValueError(f"{field} is {seconds!r}; allowed: seconds after the first row of a trace")
    drafts, times, notes = _READERS[name](source)
    arrivals_s, clients, how = arrivals.draw(
        arrival, rate, [draft.pace for draft in drafts], times, np.random.default_rng((seed, _ARRIVALS))
    )
    if not arrivals_s[-1] <= MAX_ARRIVAL_S:  # NaN is no time either
        raise ValueError(
            f"rate is {rate!r} with arrival {arrival!r}: the last of {len(drafts)} requests comes after "
            f"{arrivals_s[-1]:g} s; allowed: rates at which it comes within {MAX_ARRIVAL_S:.0f} s"
        )
    seeds = np.random.default_rng((seed, _SAMPLING)).integers(2**31, size=len(drafts)).tolist()
    items = []
    for number, (draft, arrival_s) in enumerate(zip(drafts, arrivals_s, strict=True)):
        sampling = SamplingParams(
            max_tokens=draft.max_tokens,
            temperature=temperature,
            seed=seeds[number],
            ignore_eos=name not in ("chat", "prompts"),
        )
        label = f"{number}" if draft.id is None else f"{number}-{draft.id}"
        limits, slo_class = slo or SLO(), ""
        if slo_classes:
            kind_of = slo_classes[number % len(slo_classes)]
            limits, slo_class = kind_of.slo, kind_of.name
        items.append(Item(arrival_s, draft.prompt, sampling, limits, label, slo_class))
    if name not in ("chat", "prompts"):
        notes = [*notes, "EOS is ignored: every answer has the length asked for"]
    return Workload(tuple(items), "; ".join([f"{kind}: {len(items)} requests, {how}", *notes]), clients)


# One stream of random numbers for each purpose, so that none disturbs another.
_ARRIVALS, _SAMPLING, _LENGTHS, _PROMPTS, _BLOCKS, _PHASES = range(6)


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """The arguments of `parse` that readers need; `detail` is what follows the colon."""

    detail: str
    num_requests: int | None
    vocab_size: int
    max_model_len: int
    seed: int
    max_tokens: int
    trace_start_s: float
    trace_end_s: float

    @property
    def count(self) -> int:
        if self.num_requests is None:
            raise ValueError("num_requests is None; allowed with this workload: a whole number >= 1")
        return self.num_requests

    def random_prompt(self, number: int, length: int) -> list[int]:
        rng = np.random.default_rng((self.seed, _PROMPTS, number))
        return rng.integers(self.vocab_size, size=length).tolist()


_Read = tuple[list[_Draft], list[float] | None, list[str]]  # requests, their times where known, notes


def _read_prompts(source: _Source) -> _Read:
    if source.detail:
        prompts = traces.read_prompts(Path(source.detail))
    else:
        with resources.as_file(resources.files("pdjax") / "data" / "chat.jsonl") as path:
            prompts = traces.read_prompts(path)
    drafts = [
        _Draft(line.prompt, source.max_tokens if line.max_tokens is None else line.max_tokens, line.id)
        for line in prompts
    ]
    count = source.num_requests or len(drafts)
    return [drafts[number % len(drafts)] for number in range(count)], None, []


def _read_ranges(source: _Source) -> _Read:
    try:
        inputs, outputs = (_range(text) for text in source.detail.split(","))
    except ValueError:
        raise ValueError(
            f"workload has lengths {source.detail!r}; allowed: IN,OUT or LO-HI,LO-HI, whole numbers >= 1"
        ) from None
    if inputs[1] + outputs[1] > source.max_model_len:
        raise ValueError(
            f"workload has lengths {source.detail!r}; allowed: at most {source.max_model_len} tokens together"
        )
    # One pair after the other, so that a request does not depend on how many follow.
    (low_in, high_in), (low_out, high_out) = inputs, outputs
    rng = np.random.default_rng((source.seed, _LENGTHS))
    pairs = rng.integers((low_in, low_out), (high_in + 1, high_out + 1), (source.count, 2)).tolist()
    return [_Draft(source.random_prompt(number, i), o) for number, (i, o) in enumerate(pairs)], None, []


def _read_phases(source: _Source) -> _Read:
    drafts: list[_Draft] = []
    notes: list[str] = []
    for index, phase in enumerate(phases.parse(source.detail)):
        name, _, detail = phase.kind.partition(":")
        # A seed of its own: two phases of one kind do not have the same prompts.
        seed = int(np.random.default_rng((source.seed, _PHASES, index)).integers(2**31))
        part = dataclasses.replace(source, detail=detail, num_requests=phase.count, seed=seed)
        more, _, said = _READERS[name](part)
        drafts += [dataclasses.replace(draft, pace=phase.pace) for draft in more]
        notes += said
    count = source.num_requests or len(drafts)
    if count > len(drafts):
        raise ValueError(f"num_requests is {count}; allowed: at most the {len(drafts)} of all phases")
    return drafts[:count], None, notes


def _read_lengths(source: _Source) -> _Read:
    rows, notes = _usable(source, traces.read_csv(Path(source.detail), timed=False))
    picks = np.random.default_rng((source.seed, _LENGTHS)).integers(len(rows), size=source.count)
    drawn = [rows[pick] for pick in picks.tolist()]
    drafts = [_Draft(source.random_prompt(n, row.input_tokens), row.output_tokens) for n, row in enumerate(drawn)]
    return drafts, None, notes


def _read_azure(source: _Source) -> _Read:
    return _trace(source, traces.read_csv(Path(source.detail), timed=True))


def _read_mooncake(source: _Source) -> _Read:
    return _trace(source, traces.read_mooncake(Path(source.detail)))


_READERS: dict[str, Callable[[_Source], _Read]] = {
    "chat": _read_prompts,
    "prompts": _read_prompts,
    "fixed": _read_ranges,
    "uniform": _read_ranges,
    "lengths": _read_lengths,
    "azure": _read_azure,
    "mooncake": _read_mooncake,
    "phases": _read_phases,
}


def _trace(source: _Source, rows: Sequence[traces.Row]) -> _Read:
    """Rows in order of time, cut to the window and to the number of requests asked for."""
    notes = []
    timed = [(row.time_s or 0.0, row) for row in rows]
    if any(late[0] < early[0] for early, late in itertools.pairwise(timed)):
        timed.sort(key=lambda pair: pair[0])
        notes.append("rows were not in order of time and have been sorted")
    first_s = timed[0][0] if timed else 0.0
    inside = [row for time_s, row in timed if source.trace_start_s <= time_s - first_s < source.trace_end_s]
    if rows and not inside:
        window = f"{source.trace_start_s:g} to {source.trace_end_s:g}"
        raise ValueError(f"trace_start_s to trace_end_s is {window}; allowed: seconds in which the trace has rows")
    usable, dropped = _usable(source, inside)
    count = source.num_requests or len(usable)
    if count > len(usable):
        raise ValueError(f"num_requests is {count}; allowed: at most the {len(usable)} usable rows of {source.detail}")
    chosen = usable[:count]
    blocks: dict[int, list[int]] = {}
    drafts = [_Draft(_trace_prompt(source, n, row, blocks), row.output_tokens) for n, row in enumerate(chosen)]
    times = [(row.time_s or 0.0) - (chosen[0].time_s or 0.0) for row in chosen]
    notes += [f"{count} of {len(rows)} rows", *dropped]
    if times[-1] > 0:
        notes.append(f"{(count - 1) / times[-1]:.3g} requests/s in the trace")
    return drafts, times, notes


def _usable(source: _Source, rows: Sequence[traces.Row]) -> tuple[list[traces.Row], list[str]]:
    """The rows that can be served, and notes with a count of the others."""
    whole = [row for row in rows if row.input_tokens and row.output_tokens]
    fitting = [row for row in whole if row.input_tokens + row.output_tokens <= source.max_model_len]
    notes = []
    if len(whole) < len(rows):
        notes.append(f"{len(rows) - len(whole)} rows without prompt or answer skipped")
    if len(fitting) < len(whole):
        notes.append(f"{len(whole) - len(fitting)} rows above {source.max_model_len} tokens dropped")
    if not fitting:
        raise ValueError(
            f"workload: no usable row in {source.detail} ({'; '.join(notes) or 'it has none'}); allowed: rows of a "
            f"prompt and an answer, at least one token each and at most {source.max_model_len} together"
        )
    return fitting, notes


def _trace_prompt(source: _Source, number: int, row: traces.Row, blocks: dict[int, list[int]]) -> list[int]:
    if not row.blocks:
        return source.random_prompt(number, row.input_tokens)
    tokens: list[int] = []
    for block in row.blocks:
        if block not in blocks:
            rng = np.random.default_rng((source.seed, _BLOCKS, block))
            blocks[block] = rng.integers(source.vocab_size, size=traces.MOONCAKE_BLOCK).tolist()
        tokens += blocks[block]
    return tokens[: row.input_tokens]


def mean_lengths(kind: str) -> tuple[float, float]:
    """Mean tokens of a prompt and of an answer of a kind that says them: fixed, uniform, or phases of these.

    Raises:
        ValueError: another kind.
    """
    name, _, detail = kind.partition(":")
    if name == "phases":
        parts = phases.parse(detail)
        means = np.asarray([mean_lengths(phase.kind) for phase in parts])
        prompt, answer = np.average(means, axis=0, weights=[phase.count for phase in parts]).tolist()
        return prompt, answer
    try:
        if _READERS.get(name) is not _read_ranges:
            raise ValueError
        (low_in, high_in), (low_out, high_out) = (_range(text) for text in detail.split(","))
    except ValueError:
        raise ValueError(
            f"workload is {kind!r}; allowed where mean lengths are needed: fixed:IN,OUT, uniform:LO-HI,LO-HI, or "
            "phases of these"
        ) from None
    return (low_in + high_in) / 2, (low_out + high_out) / 2


def _range(text: str) -> tuple[int, int]:
    """(low, high) of "LO-HI" or "N"; ValueError for anything else."""
    low, _, high = text.partition("-")
    ends = int(low), int(high or low)
    if not 1 <= ends[0] <= ends[1]:
        raise ValueError
    return ends
