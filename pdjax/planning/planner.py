"""Which cluster serves a workload best: a model, devices, a workload and limits enter, a `Plan` leaves. Called by users
as `pdjax.plan` and by the launcher `pdjax.experiments.plan`.

    found = pdjax.plan("llama2-7b", "a100-80g:16", "fixed:2000,500", pdjax.SLO(ttft_ms=1000, tpot_ms=50))
    print(found.why)
    print(shlex.join(found.command))

Clusters are played with the controller and the policies that serve (`pdjax.simulation`). A script that plans on several
cores does so under `if __name__ == "__main__":`, since processes are started that import it.
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from pdjax.goodput import Bound
from pdjax.metrics import ATTAINMENT
from pdjax.models.presets import PRESETS
from pdjax.planning import bounds, command, reasons, stock
from pdjax.planning.clusters import Cluster, shapes
from pdjax.planning.mix import Mix, sample
from pdjax.planning.search import Outcome, Played, Progress, Workers, search, value
from pdjax.planning.stock import Stock
from pdjax.planning.trial import Reason
from pdjax.request import SLO


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A cluster that was played.

    Attributes:
        policy: by the name of `pdjax.schedulers`.
        cluster: in words.
        instances: of each part, those that prefill first.
        devices: by the name of their hardware.
        goodput: requests per second; `bound` as in `pdjax.goodput`.
        per_device: goodput of each device of the cluster.
        per_dollar: requests for a dollar.
        price_per_hour: dollars.
        bottleneck: what requests miss their limits by when the rate is a little too high.
        estimate: the goodput that was expected of its instances alone.
        judged: requests of each run.
        again: it came out among the best and was played again, for longer.
    """

    policy: str
    cluster: str
    instances: tuple[int, ...]
    devices: Mapping[str, int]
    goodput: float
    bound: Bound
    per_device: float
    per_dollar: float
    price_per_hour: float
    bottleneck: Reason
    estimate: float
    judged: int
    again: bool


@dataclasses.dataclass(frozen=True)
class Split:
    """P:D instances of the same sizes; `goodput` None: it was not played."""

    prefill: int
    decode: int
    estimate: float
    goodput: float | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to build.

    Attributes:
        candidates: best first: those that carry the rate, if one is asked for, by what they cost.
        splits: every P:D split of the best sizes, by its prefill instances.
        instances: goodput of single instances, by what they do and their size.
        disaggregate: "yes", "no", or "either" where the difference is less than such runs can tell.
        why: in sentences.
        command: of a job that serves so, with `mpirun`; empty: there is none.
        caveats: what a reader must know.
    """

    candidates: tuple[Candidate, ...]
    splits: tuple[Split, ...]
    instances: Mapping[str, Mapping[str, float]]
    disaggregate: reasons.Verdict
    why: str
    command: tuple[str, ...]
    caveats: tuple[str, ...]

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None

    def summary(self) -> dict[str, Any]:
        """For summary.json."""
        return dataclasses.asdict(self)


def plan(
    model: str,
    hardware: str | Sequence[Stock],
    workload: str,
    slo: SLO,
    rate: float | None = None,
    *,
    by: str = "device",
    compare: Sequence[tuple[int, int]] = (),
    attainment: float = ATTAINMENT,
    seed: int = 0,
    node_devices: int = stock.NODE,
    node_bytes_per_s: float | None = None,
    profile: str = "",
    workers: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """Ranks colocated clusters (prefill-first and chunked), splits into prefill and decode instances, and dynamic ones.

    Args:
        model, hardware, profile, node_devices, node_bytes_per_s: as for `pdjax.planning.stock.stocks`; `hardware` may
            be stocks of one's own.
        workload: where lengths come from (`pdjax.planning.mix.sample`); requests arrive at random.
        slo: the limits of each request.
        rate: requests per second to be served with as little as possible; None: as many as the devices can.
        by: "device" or "dollar": what the goodput is divided by.
        compare: P:D instances that are played whatever is expected of them.
        attainment: the share of requests that must keep all limits.
        seed: of lengths and arrivals.
        workers: processes; 0: one for each core.
        progress: told (done, total, what) as it goes.

    Raises:
        ValueError: a name that is not known, or limits, a rate or a workload that leave nothing to plan.
    """
    if rate is not None and not 0 < rate < math.inf:
        raise ValueError(f"rate is {rate!r}; allowed: requests per second > 0, or None")
    if by not in ("device", "dollar"):
        raise ValueError(f"by is {by!r}; allowed: device, dollar")
    if workers < 0:
        raise ValueError(f"workers is {workers}; allowed: a number of processes, 0 for one for each core")
    if isinstance(hardware, str):
        hardware = stock.stocks(
            model, hardware, profile_path=profile, node_devices=node_devices, node_bytes_per_s=node_bytes_per_s
        )
    lengths, note = sample(workload, seed=seed)
    mix = Mix(lengths, slo, attainment, seed)
    found = search(hardware, mix, rate, by, Workers(workers or os.cpu_count() or 1, progress), compare)
    made = _plan(found, hardware, mix, rate, by, model, workload, note)
    there = {one.instances for one in made.candidates if one.policy == "disaggregated"}
    missing = tuple(
        f"{p}:{d} is not shown: no instances that the devices allow for it keep the limits"
        for p, d in compare
        if (p, d) not in there
    )
    return dataclasses.replace(made, caveats=made.caveats + missing)


def _plan(
    found: Outcome,
    stocks: Sequence[Stock],
    mix: Mix,
    rate: float | None,
    by: str,
    model: str,
    workload: str,
    note: str,
) -> Plan:
    def order(one: tuple[Candidate, Cluster]) -> tuple[bool, bool, float]:
        candidate, cluster = one
        return candidate.goodput >= (rate or 0.0), candidate.again, value(candidate.goodput, cluster, rate, by)

    pairs = [(_candidate(one), one.cluster) for one in found.played if one.found.rate]
    pairs.sort(key=order, reverse=True)
    candidates = tuple(candidate for candidate, _ in pairs)
    played = {one.cluster: one.found.rate for one in found.played}
    splits = [
        Split(cluster.counts[0], cluster.counts[1], cluster.estimate, played.get(cluster))
        for cluster in sorted(found.splits, key=lambda cluster: cluster.counts)
    ]
    instances = {
        name: {f"{shape.text} {shape.stock.name}": one.rate for shape, one in phase.items()}
        for name, phase in found.phases.items()
    }
    verdict, why = reasons.why(candidates, instances, rate, by, _impossible(stocks, mix))
    argv = command.of(pairs[0][1], model, workload, mix, rate or candidates[0].goodput) if pairs else ()
    caveats = [
        f"{note}; Poisson arrivals",
        *(one.known_by for one in stocks if one.known_by),
        *reasons.caveats(candidates),
    ]
    if pairs and model not in PRESETS:
        caveats.append(f"pdjax serves models of the LLaMA family: the command names {model}, put your own there")
    if pairs and not argv:
        caveats.append("no command: a job serves with two instances or more")
    return Plan(candidates, tuple(splits), instances, verdict, why, argv, tuple(caveats))


def _candidate(played: Played) -> Candidate:
    cluster, found = played.cluster, played.found
    devices = cluster.devices
    return Candidate(
        cluster.policy,
        cluster.text,
        cluster.counts,
        devices,
        found.rate,
        found.bound,
        found.rate / sum(devices.values()),
        3600 * found.rate / cluster.price_per_hour,
        cluster.price_per_hour,
        found.reason,
        cluster.estimate,
        played.judged,
        played.again,
    )


def _impossible(stocks: Sequence[Stock], mix: Mix) -> str:
    """Why no instance keeps the limits, as far as that can be said without a simulation."""
    sizes = shapes(stocks, mix)
    if not sizes:
        return f"no instance holds the weights and the longest request, {mix.longest} tokens"
    first_s = min(bounds.alone_s(shape.pool, mix) for shape in sizes)
    step_s = min(bounds.step_s(shape.pool, 1, mix) for shape in sizes)
    said = []
    if first_s > mix.ttft_s:
        said.append(f"a prompt alone takes {1e3 * first_s:.0f} ms on the fastest instance, more than the TTFT limit")
    if step_s > mix.tpot_s:
        said.append(f"a step of one row takes {1e3 * step_s:.1f} ms on the fastest instance, more than the TPOT limit")
    return "; ".join(said)
