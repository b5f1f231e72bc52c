"""What `switch` plays and how it is summed up: configurations and a workload whose mix moves enter, summary.json's dict
leaves. Called by `switch` and by scripts; knows no flags.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from pdjax import goodput, metrics, phases
from pdjax.config import EngineConfig
from pdjax.experiments import measured, predictions
from pdjax.experiments.predictions import requests
from pdjax.experiments.virtual import Virtual
from pdjax.goodput import Trial
from pdjax.models import source
from pdjax.record import RequestRecord
from pdjax.report import Report
from pdjax.request import SLO
from pdjax.workload import Workload

POINT = "balanced"
WINDOWS = 24  # a point of attainment over time has the requests of a WINDOWS-th of the run, before and after it
DYNAMIC = "dynamic"
CLOSE_S = 0.2  # on a real clock the first request of a phase may seem so early: the very first came late


def systems(config: EngineConfig) -> dict[str, EngineConfig]:
    """What is compared, by name: all have as many instances."""
    count = config.prefill_instances + config.decode_instances
    splits = {
        f"disaggregated {prefill}+{count - prefill}": dataclasses.replace(
            config, scheduler="disaggregated", prefill_instances=prefill, decode_instances=count - prefill
        )
        for prefill in range(1, count)
    }
    alike = {name: dataclasses.replace(config, scheduler=name) for name in ("colocated", DYNAMIC)}
    return {"colocated": alike["colocated"], **splits, DYNAMIC: alike[DYNAMIC]}


def sustained(virtuals: Mapping[str, Virtual], kind: str, slo: SLO, seed: int) -> float:
    """The highest rate that any of the systems serves in virtual time, requests/s in a phase of pace 1."""

    def find(virtual: Virtual) -> float:
        def run(rate: float) -> Trial:
            played = virtual.play(virtual.config.scheduler, requests(virtual, kind, rate, seed, slo))
            return Trial(rate, tuple(metrics.met(record) for record in played.records))

        return goodput.crossing(goodput.search(run, 1.0, max_runs=8)).rate

    return goodput.rounded(max(find(virtual) for virtual in virtuals.values()))


def over_time(records: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    """(seconds after the first arrival, share that kept its limits) of the requests that arrived around then.

    A point every half window; a window without arrivals has none.
    """
    start_s = records[0].timeline.arrival_s
    arrivals = [(record.timeline.arrival_s - start_s, metrics.met(record)) for record in records]
    window_s = arrivals[-1][0] / WINDOWS or 1.0
    points = []
    for half in range(2 * WINDOWS + 1):
        middle_s = half * window_s / 2
        inside = [met for time_s, met in arrivals if abs(time_s - middle_s) <= window_s]
        if inside:
            points.append((round(middle_s, 3), sum(inside) / len(inside)))
    return points


def phase_starts(kind: str, asked: Workload) -> list[dict[str, Any]]:
    """What the phases hold, and the arrival of their first requests, seconds; one, if the workload has no phases."""
    name, _, text = kind.partition(":")
    parts = phases.parse(text) if name == "phases" else ()
    firsts = [0, *itertools.accumulate(part.count for part in parts)]
    kinds = [part.kind for part in parts] or [kind]
    return [{"kind": one, "start_s": asked.items[first].arrival_s} for one, first in zip(kinds, firsts, strict=False)]


def result(run: Report, records: Sequence[RequestRecord], starts: Sequence[float]) -> dict[str, Any]:
    """Of one system, for summary.json; attainment is that of `records`. `starts`: seconds at which phases begin."""
    first_s = records[0].timeline.arrival_s
    by_phase: list[list[bool]] = [[] for _ in starts]
    for record in records:
        since_s = record.timeline.arrival_s - first_s
        late = max((index for index, start_s in enumerate(starts) if start_s <= since_s + CLOSE_S), default=0)
        by_phase[late].append(metrics.met(record))
    flips = [
        {
            "instance": flip.instance,
            "from": flip.before.value,
            "to": flip.after.value,
            "start_s": flip.started_s - run.start_s,
            "seconds": flip.finished_s - flip.started_s,
            "reason": flip.reason,
        }
        for flip in run.flips
    ]
    return {
        "attainment": sum(map(metrics.met, records)) / len(records),
        "by_phase": [sum(met) / len(met) if met else None for met in by_phase],
        "over_time": over_time(records),
        "roles": [spec.role.value for spec in run.specs],
        "flips": flips,
        "moves": len(run.moves),
        "duration_s": run.duration_s,
        "completed": run.summary()["completed"],
        "num_requests": len(records),
        "ttft_ms": metrics.spread(value for record in records if (value := metrics.ttft_ms(record)) is not None),
        "tpot_ms": metrics.spread(value for record in records if (value := metrics.tpot_ms(record)) is not None),
    }


def summarize(kind: str, rate: float, slo: SLO, asked: Workload, runs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """summary.json but for where it comes from."""
    attainment = {name: run["attainment"] for name, run in runs.items()}
    static = {name: share for name, share in attainment.items() if name != DYNAMIC}
    best = max(static, key=lambda name: static[name])
    return {
        "workload": kind,
        "rate": rate,
        "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms},
        "phases": phase_starts(kind, asked),
        "attainment": attainment,
        "best_static": best,
        "dynamic_over_best_static": attainment[DYNAMIC] / static[best] if static[best] else None,
        "flips": runs[DYNAMIC]["flips"],
        "runs": dict(runs),
    }


def table(summary: Mapping[str, Any]) -> Table:
    """A column per system: attainment of all, and of the requests that arrive in each phase."""
    runs = summary["runs"].values()
    grid = Table(title=f"{summary['rate']:g} requests/s", title_justify="left")
    for title in ("", *summary["runs"]):
        grid.add_column(title, justify="right" if title else "left")
    grid.add_row("kept both limits", *(f"{run['attainment']:.1%}" for run in runs))
    for index, phase in enumerate(summary["phases"]):
        shares = (run["by_phase"][index] for run in runs)
        grid.add_row(phase["kind"], *("-" if share is None else f"{share:.0%}" for share in shares))
    for name, words in (("ttft_ms", "TTFT p50 / p95, ms"), ("tpot_ms", "TPOT p50 / p95, ms")):
        spreads = (run[name] for run in runs)
        grid.add_row(words, *("-" if one["p50"] is None else f"{one['p50']:.0f} / {one['p95']:.0f}" for one in spreads))
    grid.add_row("role flips", *(str(len(run["flips"])) for run in runs))
    grid.add_row("rows that moved", *(str(run["moves"]) for run in runs))
    return grid


def simulate(virtuals: Mapping[str, Virtual], kind: str, slo: SLO, rate: float, seed: int) -> dict[str, Any]:
    """Plays all systems in virtual time: summary.json but for where it comes from."""
    asked = requests(next(iter(virtuals.values())), kind, rate, seed, slo)
    played = {name: virtual.play(virtual.config.scheduler, asked) for name, virtual in virtuals.items()}
    starts = [phase["start_s"] for phase in phase_starts(kind, asked)]
    runs = {name: result(run, run.records, starts) for name, run in played.items()}
    return {"simulated": True, **summarize(kind, rate, slo, asked, runs)}


def measure(configs: Mapping[str, EngineConfig], kind: str, rate: float | None, seed: int, out: str) -> dict[str, Any]:
    """Plays all systems on engines, one after the other: summary.json but for where it comes from."""
    pace = measured.Pace(points=len(configs))
    model = source.resolve(next(iter(configs.values())).model).config
    points, runs = [], {}
    slo, asked = SLO(), None
    for name, config in configs.items():
        with measured.Bench(config, out, pace) as bench:
            if asked is None:
                one = predictions.as_measured(bench, config, model)
                virtuals = {other: dataclasses.replace(one, config=changed) for other, changed in configs.items()}
                slo = predictions.limits(one, kind)[0][POINT]
                rate = rate or sustained(virtuals, kind, slo, seed)
                asked = requests(one, kind, rate, seed, slo)
            point = bench.play(name.replace(" ", "-"), asked)
            points.append(point)
            starts = [phase["start_s"] for phase in phase_starts(kind, asked)]
            runs[name] = result(point.report, measured.read_requests(point.path), starts)
    measured.check(points)
    assert asked is not None and rate is not None
    return {"simulated": False, **summarize(kind, rate, slo, asked, runs)}
