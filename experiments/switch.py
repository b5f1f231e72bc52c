"""Serves a workload whose mix moves (long prompts, then long answers, then both) with schedulers that keep their
instances' roles and with one that changes them. Flags enter; a table, summary.json, the requests of every run and
switch.png leave. Run as `python -m pdjax.experiments.switch`.

All get the same requests at the same times on as many devices: colocated, disaggregated in every split of the
instances, dynamic. The limits are the balanced point of `pdjax.experiments.virtual` for the mean request of all
phases; the rate, if none is given, is the highest that any of them is predicted to serve. With --simulate all is played
in virtual time.
"""

import dataclasses
import importlib.util
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags as absl_flags
from rich.console import Console
from rich.table import Table

from pdjax import goodput, metrics, phases, provenance, report, workload
from pdjax.config import EngineConfig
from pdjax.experiments import flags, launcher, measured, predictions
from pdjax.experiments.virtual import Virtual
from pdjax.goodput import Trial
from pdjax.models import source
from pdjax.record import RequestRecord
from pdjax.report import Report
from pdjax.request import SLO
from pdjax.workload import Workload

WORKLOAD = "phases:uniform:512-768,8-16@60;uniform:32-96,96-192@110*2;uniform:256-512,64-128@60"
POINT = "balanced"
WINDOWS = 24  # a point of attainment over time has the requests of a WINDOWS-th of the run
DYNAMIC = "dynamic"

SIMULATE = absl_flags.DEFINE_bool("simulate", False, "In virtual time, by the latency model; without engines.")


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


def requests(virtual: Virtual, kind: str, rate: float, seed: int, slo: SLO) -> Workload:
    """All of them."""
    return workload.parse(
        kind,
        num_requests=None,
        vocab_size=virtual.model.vocab_size,
        max_model_len=virtual.max_model_len,
        rate=rate,
        seed=seed,
        slo=slo,
    )


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


def result(run: Report, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Of one system, for summary.json; attainment is that of `records`."""
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
    """A row per system: attainment of all, and by phase."""
    starts = [phase["start_s"] for phase in summary["phases"]]
    grid = Table(title=f"{summary['rate']:g} requests/s", title_justify="left")
    for title in ("", "kept both limits", *(phase["kind"] for phase in summary["phases"]), "TTFT p50 / p95, s",
                  "TPOT p50 / p95, ms", "flips", "moves"):  # fmt: skip
        grid.add_column(title, justify="right" if title else "left")
    for name, run in summary["runs"].items():
        cells = []
        for start_s, end_s in itertools.pairwise([*starts, float("inf")]):
            inside = [share for time_s, share in run["over_time"] if start_s <= time_s < end_s]
            cells.append(f"{sum(inside) / len(inside):.0%}" if inside else "-")
        ttft, tpot = run["ttft_ms"], run["tpot_ms"]
        grid.add_row(
            name,
            f"{run['attainment']:.1%}",
            *cells,
            "-" if ttft["p50"] is None else f"{ttft['p50'] / 1e3:.1f} / {ttft['p95'] / 1e3:.1f}",
            "-" if tpot["p50"] is None else f"{tpot['p50']:.0f} / {tpot['p95']:.0f}",
            str(len(run["flips"])),
            str(run["moves"]),
        )
    return grid


def finish(summary: Mapping[str, Any], console: Console, origin: Callable[[], dict[str, Any]]) -> None:
    """Tells and writes the results."""
    console.print(table(summary))
    for flip in summary["flips"]:
        console.print(
            f"{flip['start_s']:.1f} s: instance {flip['instance']} from {flip['from']} to {flip['to']} in "
            f"{flip['seconds']:.2f} s: {flip['reason']}",
            highlight=False,
            soft_wrap=True,
        )
    ratio = summary["dynamic_over_best_static"]
    if ratio is not None:
        console.print(f"dynamic keeps {ratio:.2f} x as many as {summary['best_static']}", highlight=False)
    if not (folder := flags.OUT.value):
        return
    path = report.write_summary(folder, {"provenance": origin(), **summary})
    if importlib.util.find_spec("matplotlib") is not None:
        from pdjax import plots_goodput

        plots_goodput.switch(summary, path / "switch.png")
    console.print(f"{folder}/ has summary.json and switch.png", highlight=False)


def simulate(virtuals: Mapping[str, Virtual], kind: str, slo: SLO, rate: float, seed: int) -> dict[str, Any]:
    """Plays all systems in virtual time: summary.json but for where it comes from."""
    asked = requests(next(iter(virtuals.values())), kind, rate, seed, slo)
    played = {name: virtual.play(virtual.config.scheduler, asked) for name, virtual in virtuals.items()}
    runs = {name: result(run, run.records) for name, run in played.items()}
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
            runs[name] = result(point.report, measured.read_requests(point.path))
    measured.check(points)
    assert asked is not None and rate is not None
    return {"simulated": False, **summarize(kind, rate, slo, asked, runs)}


def main(argv: list[str]) -> None:
    del argv
    kind, seed, console = flags.WORKLOAD.value, flags.SEED.value, Console()
    workload.mean_lengths(kind)  # or there are no limits
    configs = systems(flags.build_config(scheduler="colocated"))
    first = configs["colocated"]
    if SIMULATE.value:
        model = source.resolve(first.model).config
        virtuals = {name: predictions.profiled(config, model) for name, config in configs.items()}
        slo = predictions.limits(virtuals["colocated"], kind)[0][POINT]
        rate = flags.RATE.value or sustained(virtuals, kind, slo, seed)
        finish(simulate(virtuals, kind, slo, rate, seed), console, lambda: provenance.collect(flags.given()))
        return
    if not flags.OUT.value:
        raise ValueError("out is empty; allowed: a folder, for the requests of every run")
    report.out_folder(flags.OUT.value)

    def on_head() -> None:
        summary = measure(configs, kind, flags.RATE.value, seed, flags.OUT.value)
        finish(summary, console, lambda: provenance.collect(flags.given(), ranks=launcher.ranks_for(first)))

    measured.on_ranks(on_head, first)


absl_flags.adopt_module_key_flags(flags)  # --help shows them
measured.set_defaults()
absl_flags.set_default(flags.WORKLOAD, WORKLOAD)
absl_flags.set_default(flags.OUT, "out/switch")
absl_flags.FLAGS.set_default("decode_instances", 2)
absl_flags.FLAGS.set_default("max_model_len", 1024)
absl_flags.FLAGS.set_default("decode_max_batch", 16)

if __name__ == "__main__":
    launcher.run(main)
