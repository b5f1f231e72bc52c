"""The modes that TaiChi compares, each with its sliders, and what they do at a rate. Enter: a mode, limits and a rate.
Leaves: a `Report`. Called by `taichi`.

Two modes know no limits, so that one run is judged by all of them: *aggregated* (chunked prefill; slider: tokens of a
pass) and *disaggregated* (slider: how many instances prefill). *dynamic* is between them (sliders: how many instances
are P-heavy, prompt tokens in a pass of a D-heavy one).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from pdjax import fleet, metrics, network, simulation
from pdjax.experiments.papers import llama70b
from pdjax.goodput import Trial, crossing, rounded, search
from pdjax.messages import Role
from pdjax.report import Report
from pdjax.request import SLO, State
from pdjax.schedulers import ChunkedColocated, Disaggregated, Dynamic
from pdjax.schedulers.base import Ask, ClusterView, Flip, Place, Revision, Scheduler, able
from pdjax.schedulers.disaggregated import shortest_queue

INSTANCES = 8  # TP4: four nodes of eight A100 (Table 2)
PROMPT, ANSWER = 7317, 201  # mean tokens of ArXiv summarisation (Table 3)
SPREAD = 0.5  # assumed: standard deviation over mean, of log-normal lengths
OPEN = frozenset({1})  # a stop id, so that no policy takes the end of an answer for known; every token is 0

Mode = Literal["aggregated", "disaggregated", "dynamic"]


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """A mode with its sliders.

    Attributes:
        prefill: instances that prefill, or are P-heavy; 0: all are equal.
        chunk: tokens of a pass (aggregated), or most prompt tokens in one of a D-heavy instance (dynamic); 0: any.
        aware: of lengths, when prompts are placed (dynamic).
    """

    mode: Mode
    prefill: int = 0
    chunk: int = 0
    aware: bool = True

    @property
    def text(self) -> str:
        if self.mode == "aggregated":
            return f"CP{self.chunk}"
        split = f"{self.prefill}P:{INSTANCES - self.prefill}D"
        return split if self.mode == "disaggregated" else f"{split}, S_D {self.chunk or 'any'}"

    def policy(self) -> Scheduler:
        if self.mode == "aggregated":
            return ChunkedColocated(self.chunk)
        if self.mode == "disaggregated":
            return Disaggregated()
        return (Hybrid if self.aware else Unaware)(decode_chunk=self.chunk or None)

    def fleet(self) -> fleet.Fleet:
        roles = {Role.PREFILL: self.prefill, Role.DECODE: INSTANCES - self.prefill} if self.prefill else {}
        pools = [llama70b.pool(role, count) for role, count in (roles or {Role.MIXED: INSTANCES}).items()]
        return fleet.build(pools, network.switched(llama70b.NIC, INSTANCES))


class Hybrid(Dynamic):
    """`Dynamic` whose number of P-heavy instances stays: TaiChi's sliders are found offline (section 3.1)."""

    def revise(self, cluster: ClusterView) -> list[Revision]:
        return [revision for revision in super().revise(cluster) if not isinstance(revision, Flip)]


class Unaware(Hybrid):
    """For the ablation: prompts go to the shortest queue, whatever they and the instance are like."""

    def place(self, ask: Ask, cluster: ClusterView) -> Place:
        source = shortest_queue(able(cluster.instances, Role.PREFILL, Role.DECODE))
        index = source.spec.index
        return Place(index, index if source.role is Role.DECODE else None, "whole", "shortest queue")


AGGREGATED = tuple(System("aggregated", chunk=chunk) for chunk in (256, 512, 1024, 2048))
DISAGGREGATED = tuple(System("disaggregated", prefill=prefill) for prefill in (4, 5, 6))
DYNAMIC = tuple(System("dynamic", prefill, chunk) for prefill, chunk in ((3, 256), (4, 256), (5, 256), (5, 512)))


@functools.lru_cache(maxsize=4)
def lengths(count: int, seed: int) -> tuple[tuple[int, int], ...]:
    """(prompt, answer) tokens, log-normal with the published means."""
    rng = np.random.default_rng(seed)
    sigma = math.sqrt(math.log(1 + SPREAD**2))
    prompts = llama70b.lognormal(rng, PROMPT * math.exp(-(sigma**2) / 2), sigma, (256, 16000), count)
    answers = llama70b.lognormal(rng, ANSWER * math.exp(-(sigma**2) / 2), sigma, (8, 1024), count)
    return tuple(zip(prompts, answers, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class Played:
    """What came of each request, [n] in milliseconds: inf for TTFT where it did not finish, 0 for TPOT where there is
    none. `transfer_share`: of all requests' time, what their KV moved."""

    ttft_ms: np.ndarray
    tpot_ms: np.ndarray
    transfer_share: float

    def met(self, slo: SLO) -> tuple[bool, ...]:
        kept = (self.ttft_ms <= (slo.ttft_ms or math.inf)) & (self.tpot_ms <= (slo.tpot_ms or math.inf))
        return tuple(kept.tolist())


def play(system: System, rate: float, slo: SLO, count: int, seed: int) -> Report:
    """Serves `count` requests with Poisson arrivals, all with the same limits."""
    asked = simulation.asks(lengths(count, seed), simulation.poisson(rate, count, seed + 1), slo)
    requests = (dataclasses.replace(request, stop_ids=OPEN) for request in asked)
    return simulation.simulate(system.fleet(), requests, system.policy())


def played(report: Report) -> Played:
    """The sum of a run."""
    done = [record.state is State.FINISHED for record in report.records]
    ttft = [metrics.ttft_ms(record) for record in report.records]
    tpot = [metrics.tpot_ms(record) for record in report.records]
    busy_s = sum(record.timeline.transfer_busy_s for record in report.records)
    e2e_ms = sum(metrics.e2e_ms(record) or 0.0 for record in report.records)
    return Played(
        np.array([math.inf if value is None or not ok else value for value, ok in zip(ttft, done, strict=True)]),
        np.array([value or 0.0 for value in tpot]),
        1e3 * busy_s / e2e_ms,
    )


class Bench:
    """Plays systems, each with `count` requests and once at a rate: what ignores limits is judged by many."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self.runs: dict[tuple[System, float, SLO | None], Played] = {}

    def play(self, system: System, rate: float, slo: SLO) -> Played:
        key = (system, rate, slo if system.mode == "dynamic" else None)
        if key not in self.runs:
            self.runs[key] = played(play(system, rate, slo, self.count, self.seed))
        return self.runs[key]

    def trial(self, system: System, rate: float, slo: SLO) -> Trial:
        return Trial(rate, self.play(system, rate, slo).met(slo))

    def best(self, systems: Sequence[System], slo: SLO, guess: float) -> tuple[System, float]:
        """The system with the highest goodput, and that, requests per second. It is looked for among those that do
        best at the goodput of the last one that was searched; the first of them, at the guess."""
        found: dict[System, float] = {}
        rate = rounded(guess)
        while True:
            system = max(systems, key=lambda one: self.trial(one, rate, slo).attainment)
            if system in found:
                return max(found.items(), key=lambda item: item[1])
            run = functools.partial(self.trial, system, slo=slo)
            trials = search(run, rate, factor=1.2, tolerance=0.06, max_runs=12)
            found[system] = crossing(trials).rate
            rate = rounded(found[system])
