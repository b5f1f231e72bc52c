"""Compares schedulers on equal devices: goodput, attainment and throughput against rate and against the scale of the
SLO. Flags enter; tables, summary.json, the requests of every run and compare.png leave. Run as
`python -m pdjax.experiments.compare`.

Goodput is the highest rate at which 90 % of the requests keep both limits. The limits are three points, in multiples of
what an idle instance takes for the mean prompt and for a decode step (`pdjax.experiments.virtual.POINTS`). Instances
are ranks of an `mpirun` job, each with cores of its own. Where the goodputs are is predicted first, in virtual time;
then runs around them are measured. With --simulate there are no engines and all is predicted.
"""

import dataclasses
import functools
import importlib.util
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags as absl_flags
from rich.console import Console

from pdjax import metrics, provenance, report, workload
from pdjax.config import EngineConfig
from pdjax.experiments import compare_tables, flags, launcher, measured
from pdjax.experiments.compare_tables import AWARE, COLOCATED, COMPARED
from pdjax.experiments.predictions import (
    SCALES,
    WORKLOAD,
    Found,
    as_measured,
    limits,
    make_of,
    predictions,
    profiled,
)
from pdjax.experiments.sweep import Effort, Play, Played, Sweep
from pdjax.experiments.virtual import ROWS
from pdjax.goodput import rounded
from pdjax.models import source
from pdjax.schedulers import SCHEDULERS
from pdjax.workload import Workload

QUICK_WORKLOAD = "uniform:128-384,8-32"  # half of all lengths: a run takes half of the time

SIMULATED = Effort(seeds=3, window_s=600, least=100, most=300, max_runs=12, tolerance=0.05)
# What is to say where to measure.
PREDICTED = Effort(seeds=1, window_s=400, least=50, most=120, max_runs=8, tolerance=0.1)
# A search begins at the predicted goodput: most find it between two neighbouring rates.
MEASURED = Effort(seeds=2, window_s=75, least=30, most=50, max_runs=3, factor=1.25, tolerance=0.3)
QUICK = Effort(seeds=1, window_s=22, least=12, most=24, max_runs=2, factor=1.35, tolerance=0.4, budget_s=130)

SIMULATE = absl_flags.DEFINE_bool("simulate", False, "In virtual time, by the latency model; without engines.")
QUICK_FLAG = absl_flags.DEFINE_bool(
    "quick", False, "Few and short runs, with half the lengths unless --workload is given: under 10 minutes."
)
PROFILE_ONLY = absl_flags.DEFINE_bool("profile_only", False, "Print the limits and the predicted goodputs, and stop.")
MINUTES = absl_flags.DEFINE_float(
    "minutes",
    0.0,
    "For the searches of each scheduler; then only what has no run yet is played. 0: any.",
    lower_bound=0,
)
RESUME = absl_flags.DEFINE_bool(
    "resume", False, "Take the runs that --out has already, of the same flags, instead of playing them again."
)
SEEDS = absl_flags.DEFINE_integer("seeds", 0, "How many; 0: chosen.", lower_bound=0)


def on_bench(bench: measured.Bench, points: list[measured.Point], out: str, folder: str = "") -> Play:
    """Plays on an engine; judges by what is in the files. `points` gets what was played. With --resume a run that is in
    `out` already is taken from there."""

    def play(name: str, asked: Workload) -> Played:
        if RESUME.value and (found := measured.known(out, folder + name, asked)) is not None:
            path, numbers = found
        else:
            point = bench.play(folder + name, asked)
            points.append(point)
            path, numbers = point.path, point.report.summary()
        records = measured.read_requests(path)
        return Played(functools.cache(lambda slo: tuple(metrics.met(one, slo) for one in records)), numbers)

    return play


def same_flags(out: str) -> None:
    """Writes down what the runs in a folder are played with. ValueError with --resume if that was something else."""
    path = report.out_folder(out) / "flags.json"
    own = {name: value for name, value in flags.given().items() if name not in ("out", "log_level")}
    if RESUME.value:
        try:
            before = json.loads(path.read_text())
        except (OSError, ValueError):
            raise ValueError(f"out is {out!r}; allowed with --resume: a folder with runs") from None
        differing = [name for name, value in json.loads(json.dumps(own)).items() if before.get(name) != value]
        if differing:
            raise ValueError(
                f"{differing[0]} differs from that of the runs in {out!r}; allowed with --resume: the same"
            )
    path.write_text(json.dumps(own, indent=2) + "\n")


def measure(
    configs: Mapping[str, EngineConfig], kind: str, effort: Effort, out: str, console: Console, *, quick: bool
) -> Found | None:
    """Measures on engines, one after the other; None with --profile_only, when the predictions are told."""
    pace = measured.Pace(points=len(configs) * 5 * effort.seeds)
    model = source.resolve(next(iter(configs.values())).model).config
    points: list[measured.Point] = []
    found: Found | None = None
    names = list(configs)
    while names:
        name = names.pop(0)
        with measured.Bench(configs[name], out, pace) as bench:
            if found is None:
                found = predictions(as_measured(bench, configs[name], model), kind, list(configs), PREDICTED)
                told(found, console)
                if PROFILE_ONLY.value:
                    return None
                if quick:  # of the colocated ones, only the better
                    names = [other for other in configs if other not in _worse(found.predicted[kind])]
                    if name not in names:
                        continue
                    names.remove(name)
            for workload_kind, predicted in found.predicted.items():
                counter = workload_kind != kind
                if name not in predicted.schedulers or (counter and quick):
                    continue
                share = dataclasses.replace(effort, seeds=1) if counter else effort
                sweep = found.measured.setdefault(
                    workload_kind, Sweep(predicted.points, make_of(found.virtual, workload_kind), share, AWARE)
                )
                guesses = {point: rounded(predicted.mean(name, point)) for point in predicted.points}
                play = on_bench(bench, points, out, "short-prompts/" if counter else "")
                sweep.find(name, play, guesses)
                if not counter and not quick:
                    sweep.scale(name, play, "balanced", predicted.rates["balanced"], SCALES)
    measured.check(points)
    return found


def _worse(sweep: Sweep) -> list[str]:
    """The colocated schedulers but the best, by the mean of the logarithms of their goodputs."""
    colocated = [name for name in sweep.schedulers if name in COLOCATED]

    def mean(name: str) -> float:
        return sum(math.log(sweep.mean(name, point)) for point in sweep.points)

    return [name for name in colocated if name != max(colocated, key=mean)]


def told(found: Found, console: Console) -> None:
    """Prints what an idle instance takes, and the predicted goodputs."""
    for kind, sweep in found.predicted.items():
        idle = limits(found.virtual, kind)[1]
        console.print(
            f"{kind}: an idle instance takes {idle['prefill_s']:.2f} s for a prompt of {idle['prompt_tokens']} tokens "
            f"and {1e3 * idle['step_s']:.0f} ms for a step of {ROWS} rows at context {idle['context_tokens']}",
            highlight=False,
            soft_wrap=True,
        )
        console.print(compare_tables.goodput_table(sweep, f"{kind}: in virtual time"))


def finish(found: Found, console: Console, origin: Callable[[], dict[str, Any]]) -> None:
    """Tables of what was measured, and the files."""
    for kind, sweep in found.measured.items():
        console.print(compare_tables.goodput_table(sweep, f"{kind}: measured"))
    if not (folder := flags.OUT.value):
        return
    summary = {"provenance": origin(), **found.summary()}
    path = report.write_summary(folder, summary)
    if importlib.util.find_spec("matplotlib") is not None:
        from pdjax import plots_goodput

        plots_goodput.compare(summary, path / "compare.png")
    console.print(f"{folder}/ has summary.json and compare.png", highlight=False)


def main(argv: list[str]) -> None:
    del argv
    flags.refuse_requests("workload")
    names = flags.SCHEDULER.value.split(",")
    if any(name not in SCHEDULERS or names.count(name) > 1 for name in names):
        raise ValueError(
            f"scheduler is {flags.SCHEDULER.value!r}; allowed: some of {', '.join(SCHEDULERS)} with commas"
        )
    configs = {name: flags.build_config(scheduler=name) for name in names}
    quick = QUICK_FLAG.value
    kind = flags.WORKLOAD.value or (QUICK_WORKLOAD if quick else WORKLOAD)
    workload.mean_lengths(kind)  # or there are no limits
    effort = QUICK if quick else SIMULATED if SIMULATE.value else MEASURED
    effort = dataclasses.replace(
        effort, seeds=SEEDS.value or effort.seeds, budget_s=60 * MINUTES.value or effort.budget_s
    )
    console = launcher.console()
    first = configs[names[0]]
    if SIMULATE.value:
        virtual = profiled(first, source.resolve(first.model).config)
        simulated = dataclasses.replace(PREDICTED if quick else SIMULATED, seeds=effort.seeds)
        found = predictions(virtual, kind, names, simulated)
        told(found, console)
        finish(found, console, lambda: provenance.collect(flags.given()))
        return
    if not (out := flags.OUT.value):
        raise ValueError("out is empty; allowed: a folder, for the requests of every run")
    report.out_folder(out)

    def on_head() -> None:
        same_flags(out)
        result = measure(configs, kind, effort, out, console, quick=quick)
        if result is not None:
            finish(result, console, lambda: provenance.collect(flags.given(), ranks=launcher.ranks_for(first)))

    measured.on_ranks(on_head, first)


absl_flags.adopt_module_key_flags(flags)  # --help shows them
measured.set_defaults()
absl_flags.set_default(flags.SCHEDULER, ",".join(COMPARED))
absl_flags.set_default(flags.WORKLOAD, "")
absl_flags.set_default(flags.OUT, "out/compare")
absl_flags.FLAGS.set_default("max_model_len", 1024)
absl_flags.FLAGS.set_default("decode_max_batch", 16)

if __name__ == "__main__":
    launcher.run(main)
