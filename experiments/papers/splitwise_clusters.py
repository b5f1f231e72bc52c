"""Splitwise's clusters under its traces. Enter: a design (machines of two kinds), lengths of requests, a rate. Leave:
the nine slowdowns that the paper sets limits to, and the highest rate with which all are kept. Called by the other
`splitwise` modules.

Lengths are drawn from the Azure traces, prompts and answers each for themselves, gaps are exponential (the authors'
generate_trace.py). A slowdown compares a request with the same request alone on a DGX-A100 (table VI).
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pdjax import fleet, goodput, metrics, simulation, traces
from pdjax.experiments.papers.splitwise_machines import A100, MAX_CHUNK, MEASURED, Design, machine, spec
from pdjax.fleet import Fleet
from pdjax.goodput import Trial
from pdjax.latency import Load
from pdjax.messages import Role
from pdjax.network import Link, switched
from pdjax.record import FlipRecord, IterationRecord, MoveRecord, RequestRecord, TransferRecord
from pdjax.request import Request, State
from pdjax.schedulers.base import Ask, ClusterView, InstanceView, Place, Plan, Wait, able
from pdjax.schedulers.colocated import Colocated
from pdjax.schedulers.splitwise import Splitwise

Slowdown = dict[tuple[str, int], float]
"""Of a run: by what is slower and the percentile."""

LIMITS: Slowdown = {  # table VI: of a percentile of the slowdowns
    **{("TTFT", percent): limit for percent, limit in ((50, 2.0), (90, 3.0), (99, 6.0))},
    **{("TBT", percent): limit for percent, limit in ((50, 1.25), (90, 1.5), (99, 5.0))},
    **{("E2E", percent): limit for percent, limit in ((50, 1.25), (90, 1.5), (99, 5.0))},
}
BATCH_TOKENS = 2048  # prompt tokens of a pass (section IV-B)
QUEUE_TOKENS = 8192  # of a prompt queue before others are asked (the authors' simulator)
STREAM_FROM = 512  # prompt tokens from which KV is sent layer by layer (section IV-C)
MAX_ROWS = 512  # requests of a batch (the authors' simulator)
LINK_BYTES_PER_S = 200e9  # between two machines (the authors' simulator): eight ports of 200 Gb/s
LAYERS = {"bloom-176b": 70, "llama2-70b": 80}


class MixedBatching(Colocated):
    """The paper's baseline, mixed continuous batching (section III): each request on one machine, the one with the
    shortest queue; prompts and rows share passes as on a mixed machine of Splitwise. A prompt in a pass that is under
    way counts as one that waits, as in the authors' simulator."""

    def __init__(self) -> None:
        self._machine = Splitwise(batch_tokens=BATCH_TOKENS)

    def place(self, ask: Ask, cluster: ClusterView) -> Place | Wait:
        views = able(cluster.instances, Role.MIXED)
        if not views:
            return Wait("no instance is alive")
        index = min(views, key=_queue).spec.index
        return Place(index, index, "whole", "shortest queue")

    def iterate(self, instance: InstanceView, cluster: ClusterView) -> Plan:
        return self._machine.iterate(instance, cluster)


def _queue(view: InstanceView) -> tuple[int, bool, int, int]:
    computing = view.busy_s > view.latency.iteration_s(view.spec, view.load)  # longer than a step of its rows takes
    return view.pending_tokens, computing, view.rows, view.spec.index


# --- requests -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Lengths to draw from: of prompts and of answers, tokens."""

    name: str
    prompts: tuple[int, ...]
    answers: tuple[int, ...]

    def draw(self, count: int, seed: int) -> list[tuple[int, int]]:
        """Lengths of requests; more of a seed begin with the fewer."""
        prompts, answers = (
            np.random.default_rng((seed, part)).choice(lengths, count)
            for part, lengths in enumerate((self.prompts, self.answers))
        )
        return list(zip(prompts.tolist(), answers.tolist(), strict=True))


def azure(folder: Path, name: str) -> Workload:
    """The trace "conv" or "code" of the data folder. Errors as `traces.read_csv`."""
    rows = traces.read_csv(folder / "azure" / f"AzureLLMInferenceTrace_{name}.csv", timed=False)
    used = [row for row in rows if row.input_tokens and row.output_tokens]
    return Workload(name, tuple(row.input_tokens for row in used), tuple(row.output_tokens for row in used))


# --- runs -----------------------------------------------------------------------------------------------------------


class Slowdowns:
    """A sink that keeps the slowdowns of every request; one that did not finish is endlessly slow.

    Args:
        alone: (TTFT, time between tokens) of a prompt of so many tokens that has a machine to itself, ms.
    """

    def __init__(self, alone: Callable[[int], tuple[float, float]]) -> None:
        self._alone = alone
        self.values: dict[str, list[float]] = {"TTFT": [], "TBT": [], "E2E": []}

    def token(self, request: Request, token: int, time_s: float, logprob: float | None) -> bool:
        return False

    def done(self, request: Request, record: RequestRecord) -> None:
        first_ms, between_ms = self._alone(record.prompt_tokens)
        alone_ms = {
            "TTFT": first_ms,
            "TBT": between_ms,
            "E2E": first_ms + between_ms * (request.sampling.max_tokens - 1),
        }
        found = {"TTFT": metrics.ttft_ms(record), "TBT": metrics.tpot_ms(record), "E2E": metrics.e2e_ms(record)}
        for name, value in found.items():
            if record.state is not State.FINISHED:
                self.values[name].append(float("inf"))
            elif value is not None:  # an answer of one token has no time between tokens
                self.values[name].append(value / alone_ms[name])

    def iteration(self, record: IterationRecord) -> None:
        pass

    def transfer(self, record: TransferRecord) -> None:
        pass

    def revised(self, record: FlipRecord | MoveRecord) -> None:
        pass

    def percentiles(self) -> Slowdown:
        """By what `LIMITS` has limits for."""
        return {key: metrics.percentile(self.values[key[0]], key[1]) for key in LIMITS}


def build(design: Design, model: str, engine: str) -> Fleet:
    """The machines, joined by InfiniBand; each has a wire of its own to a switch."""
    parts = [(Role.PREFILL, design.prompt, design.prompts), (Role.DECODE, design.token, design.tokens)]
    if not design.tokens:
        parts = [(Role.MIXED, design.prompt, design.prompts)]
    pools = [
        machine(kind, model, engine).pool(
            role, count, max_rows=MAX_ROWS, max_chunk=MAX_CHUNK, layer_groups=LAYERS[model]
        )
        for role, kind, count in parts
    ]
    there = fleet.build(pools, switched(Link("InfiniBand", LINK_BYTES_PER_S), design.prompts + design.tokens))
    # Their machines decide on a pass when the one before it is done.
    return dataclasses.replace(there, specs=tuple(dataclasses.replace(spec, max_in_flight=1) for spec in there.specs))


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """What clusters have to serve.

    Attributes:
        workload: what requests are drawn from.
        model, engine: of `splitwise_machines`.
        duration_s: of a trace.
        seed: of lengths and arrivals.
    """

    workload: Workload
    model: str
    engine: str
    duration_s: float
    seed: int

    def play(self, design: Design, rate: float) -> Slowdown:
        """The nine slowdowns at a rate, requests per second."""
        count = max(1, round(rate * self.duration_s))
        requests = simulation.asks(self.workload.draw(count, self.seed), simulation.poisson(rate, count, self.seed))
        sink = Slowdowns(self.alone())
        policy = Splitwise(STREAM_FROM, QUEUE_TOKENS, BATCH_TOKENS) if design.tokens else MixedBatching()
        simulation.serve(build(design, self.model, self.engine), requests, policy, sink)
        return sink.percentiles()

    def alone(self) -> Callable[[int], tuple[float, float]]:
        """(TTFT, time between tokens) of a prompt of so many tokens alone on a DGX-A100, as measured, ms."""
        there = machine(A100, self.model, MEASURED)
        step_s = there.latency.iteration_s(spec(there), Load((), 1, 1, 1))
        return functools.cache(lambda prompt: (1e3 * there.latency.prefill_s(spec(there), prompt), 1e3 * step_s))

    def prompt_s(self, kind: str) -> float:
        """The mean time of a prompt that is computed alone, seconds."""
        there = machine(kind, self.model, self.engine)
        seconds = functools.cache(lambda prompt: there.latency.prefill_s(spec(there), prompt))
        return float(np.mean([seconds(prompt) for prompt in self.workload.prompts]))


def failing(slowdowns: Slowdown, relaxed: float = 1.0) -> list[str]:
    """Which limits are not kept. `relaxed`: the limits on the time between tokens and on E2E, so many times."""
    return [
        f"{name} P{percent}"
        for (name, percent), limit in LIMITS.items()
        if slowdowns[name, percent] > (limit if name == "TTFT" else relaxed * limit)
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What a search found.

    Attributes:
        rate: the highest with which all nine limits are kept, requests per second.
        bound: "at least" or "at most" where the search ended at one side.
        why: the limits that the next higher rate breaks.
        runs: (rate, slowdowns), by rate.
    """

    design: Design
    rate: float
    bound: str
    why: tuple[str, ...]
    runs: tuple[tuple[float, Slowdown], ...]


def max_rate(case: Case, design: Design, tolerance: float) -> Found:
    """The highest rate with which a cluster keeps the nine limits, to within `tolerance` of it."""
    runs: dict[float, Slowdown] = {}

    def run(rate: float) -> Trial:
        found = runs[rate] = case.play(design, rate)
        broken = len(failing(found))
        return Trial(rate, (False,) * broken + (True,) * (len(LIMITS) - broken))

    # What keeps the prompt machines busy for that share of the time, were each prompt computed alone.
    share = 0.85 if design.tokens else 0.4
    guess = goodput.rounded(share * design.prompts / case.prompt_s(design.prompt))
    best = goodput.crossing(goodput.search(run, guess, target=1.0, factor=1.25, tolerance=tolerance), 1.0)
    above = min((rate for rate, found in runs.items() if failing(found)), default=None)
    why = () if above is None else tuple(failing(runs[above]))
    return Found(design, best.rate, best.bound, why, tuple(sorted(runs.items())))
