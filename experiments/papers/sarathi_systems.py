"""Batching rules that Sarathi-Serve compares, on one instance, and what they do at a rate. Enter: a rule, lengths and a
rate. Leaves: times to first token, gaps between tokens and delays. Called by `sarathi`."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from pdjax import fleet, metrics, simulation
from pdjax.experiments.papers import llama70b
from pdjax.goodput import Trial, crossing, search
from pdjax.messages import Role
from pdjax.report import Report
from pdjax.schedulers import ChunkedColocated, Colocated
from pdjax.schedulers.base import ClusterView, InstanceView, Plan, Scheduler, take_chunks

WHOLE = 16384  # tokens of a pass that takes every prompt of these workloads whole
DELAY_S = 2.0  # half of the requests must start within it, or a load is more than the capacity
Lengths = Sequence[tuple[int, int]]


class ChunkedOnly(Colocated):
    """For the ablation: parts of prompts and decode steps in turn, each in a pass of its own."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def iterate(self, instance: InstanceView, cluster: ClusterView) -> Plan:
        chunks = () if instance.rows and instance.prefill_streak else take_chunks(instance, self._budget)
        return Plan(chunks) if chunks else Plan(decode=instance.rows > 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """How passes are filled. `tokens`: of a pass; 0: prompts are not cut."""

    name: str
    tokens: int = 0

    def policy(self) -> Scheduler:
        if self.name == "prefill-first":
            return Colocated()
        if self.name == "chunked only":
            return ChunkedOnly(self.tokens)
        return ChunkedColocated(self.tokens or WHOLE)


PREFILL_FIRST, HYBRID_ONLY = Rule("prefill-first"), Rule("hybrid only")


def stall_free(tokens: int) -> Rule:
    """Sarathi-Serve with a budget of so many tokens."""
    return Rule("stall-free", tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Log-normal lengths with the published medians (Sarathi-Serve, Table 2). `spread`: assumed standard deviations of
    their logarithms. `most`: tokens of a prompt."""

    name: str
    medians: tuple[int, int]
    spread: tuple[float, float]
    most: int

    def lengths(self, count: int, seed: int) -> Lengths:
        rng = np.random.default_rng(seed)
        (prompt, answer), (wide, narrow) = self.medians, self.spread
        prompts = llama70b.lognormal(rng, prompt, wide, (16, self.most), count)
        return list(zip(prompts, llama70b.lognormal(rng, answer, narrow, (2, 2048), count), strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Percentiles of a run, seconds."""

    ttft_p50_s: float
    tbt_p99_s: float
    delay_p50_s: float

    def keeps(self, tbt_s: float) -> bool:
        return self.tbt_p99_s <= tbt_s and self.delay_p50_s <= DELAY_S


def play(rule: Rule, lengths: Lengths, arrivals_s: Sequence[float]) -> Report:
    """Serves requests on one instance."""
    pools = [llama70b.pool(Role.MIXED, 1, max_chunk=WHOLE)]
    return simulation.simulate(fleet.build(pools), simulation.asks(lengths, arrivals_s), rule.policy())


def times(rule: Rule, lengths: Lengths, rate: float, seed: int) -> Times:
    """Of Poisson arrivals."""
    records = play(rule, lengths, simulation.poisson(rate, len(lengths), seed)).records
    gaps = [gap for record in records for gap in metrics.itl_ms(record)]
    delays = [(record.timeline.prefill_start_s or 0.0) - record.timeline.arrival_s for record in records]
    ttft = [metrics.ttft_ms(record) or 0.0 for record in records]
    return Times(metrics.percentile(ttft, 50) / 1e3, metrics.percentile(gaps, 99) / 1e3, metrics.percentile(delays, 50))


def capacity(rule: Rule, lengths: Lengths, tbt_s: float, guess: float, seed: int) -> float:
    """The highest rate, requests per second, at which P99 of the time between tokens keeps its limit."""

    def run(rate: float) -> Trial:
        return Trial(rate, (times(rule, lengths, rate, seed).keeps(tbt_s),))

    trials = search(run, guess, target=1.0, factor=1.5, tolerance=0.06, max_runs=12)
    kept = [trial.rate for trial in trials if trial.attainment == 1.0]
    return max(kept, default=crossing(trials, 1.0).rate)
