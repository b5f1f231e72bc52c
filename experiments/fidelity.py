"""Compares simulated runs with real ones: attainment of the same requests on engines and in virtual time, at several
rates and under several schedulers. Flags enter; a table, summary.json, the requests of every real run and fidelity.png
leave. Run as `python -m pdjax.experiments.fidelity [--profile=profile/profile.json]`.

The simulator has the engine's instances, limits and policies, and what passes and transfers take by the profile;
without one it is measured first (with --quick, by the warm-up). That is of passes alone; how much longer they take
while this policy serves, on a shared machine that is soon another, is told by requests in front of those that are
judged: with that the judged ones are predicted. Simulated as well is what comes of the profile alone, of passes as they
took in front and behind, and of passes as they were, so that errors of the simulator can be told from those of what it
is given. Nothing is fitted to what is compared, and latency models are not corrected while serving (--correct).
Rates are those at which the simulated attainment is TARGETS; where the real one is out of `fidelity_tables.BAND`, up to
EXTRA more are played. With --simulate=1.05 there is no engine: its place is taken by instances in virtual time that are
so many times as slow as the profile says.
"""

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags
from rich.console import Console

from pdjax import profile, provenance, report, workload
from pdjax.config import EngineConfig
from pdjax.experiments import fidelity_tables, flags, launcher, measured, predictions, profile_tables
from pdjax.experiments import profile as profiling
from pdjax.experiments.compare_tables import COMPARED
from pdjax.experiments.fidelity_runs import (
    ATTEMPTS,
    EXTRA,
    QUICK_REQUESTS,
    QUICK_WORKLOAD,
    REQUESTS,
    SLOWNESS,
    TARGETS,
    WORKLOAD,
    Course,
    compare,
    course,
    in_virtual_time,
    measure,
    slowed,
    told,
)
from pdjax.experiments.fidelity_tables import Point
from pdjax.experiments.virtual import Virtual
from pdjax.models import source
from pdjax.schedulers import SCHEDULERS

SIMULATE = absl_flags.DEFINE_float(
    "simulate",
    None,
    "No engines: in their place instances in virtual time whose passes take so many times as long.",
    lower_bound=0.1,
    upper_bound=10.0,
)
QUICK = absl_flags.DEFINE_bool(
    "quick", False, "Fewer requests of half the lengths, each rate once and no others: under 10 minutes."
)


def profiled(config: EngineConfig, out: str, console: Console) -> str:
    """Measures a profile; its file."""
    policy = profiling.Apart()
    chunk = config.prefill_chunk or profiling.CHUNK
    own = dataclasses.replace(
        config, scheduler=policy, prefill_chunk=chunk, decode_chunk=chunk, warmup=False, correct=False
    )
    known = profiling.measure(own, policy, console)
    console.print(profile_tables.errors(known))
    path = Path(out) / "profile.json"
    profile.save(known, path)
    return str(path)


def finish(points: Sequence[Point], plan: Course, out: str, origin: dict[str, Any], console: Console) -> None:
    """Shows and writes what was found."""
    console.print(fidelity_tables.table(points, SLOWNESS))
    found = fidelity_tables.summary(points, len(TARGETS))
    console.print(fidelity_tables.verdict(found), highlight=False, soft_wrap=True)
    if not out:
        return
    asked = {
        "workload": plan.kind,
        "num_requests": plan.count,
        "slo": {"ttft_ms": plan.slo.ttft_ms, "tpot_ms": plan.slo.tpot_ms},
        "targets": TARGETS,
        "slowness": SLOWNESS,
        "simulate": SIMULATE.value,
    }
    folder = report.write_summary(out, {"provenance": origin, **asked, **found})
    drawn = importlib.util.find_spec("matplotlib") is not None
    if drawn:
        fidelity_tables.scatter(points, folder / "fidelity.png")
    console.print(f"{out}/ has summary.json{' and fidelity.png' if drawn else ''}", highlight=False)


def main(argv: list[str]) -> None:
    del argv
    names = flags.SCHEDULER.value.split(",")
    if any(name not in SCHEDULERS or names.count(name) > 1 for name in names):
        raise ValueError(
            f"scheduler is {flags.SCHEDULER.value!r}; allowed: some of {', '.join(SCHEDULERS)} with commas"
        )
    configs = {name: flags.build_config(scheduler=name) for name in names}
    first, quick, out = configs[names[0]], QUICK.value, flags.OUT.value or ""
    kind = flags.WORKLOAD.value or (QUICK_WORKLOAD if quick else WORKLOAD)
    workload.mean_lengths(kind)  # or there are no limits
    count = flags.NUM_REQUESTS.value or (QUICK_REQUESTS if quick else REQUESTS)
    console = launcher.console()

    def plan_of(virtual: Virtual) -> Course:
        extra, attempts = (0, 1) if quick else (EXTRA, ATTEMPTS)
        return course(virtual, kind, count, flags.SEED.value, extra, attempts)

    if SIMULATE.value is not None:
        plan = plan_of(predictions.profiled(first, source.resolve(first.model).config))
        at = told(plan, configs, lambda line: console.print(line, highlight=False, soft_wrap=True))
        slow, points = slowed(plan.virtual, SIMULATE.value), list[Point]()
        for name, config in configs.items():
            points += compare(plan, config, at[name], in_virtual_time(slow, config))
        finish(points, plan, out, provenance.collect(flags.given()), console)
        return
    if not out:
        raise ValueError("out is empty; allowed: a folder, for the requests of every run")
    measures = not first.profile and not quick
    if measures and not first.stream_layers:
        raise ValueError("stream_layers is 0; allowed without a profile: at least 1, to measure one")
    report.out_folder(out)

    def on_head() -> None:
        own = configs
        if measures:
            path = profiled(first, out, console)
            own = {name: dataclasses.replace(config, profile=path) for name, config in configs.items()}
        points, plan = measure(own, plan_of, out)
        origin = provenance.collect(flags.given(), ranks=launcher.ranks_for(first))
        finish(points, plan, out, origin, console)

    measured.on_ranks(on_head, first)


absl_flags.adopt_module_key_flags(flags)  # --help shows them
if __name__ == "__main__":
    # Without correction policies predict by the profile on both sides, and `bias` shows how fast the machine was.
    measured.set_defaults(max_model_len=1024, decode_max_batch=16, correct=False)
    for _flag, _value in (
        (flags.SCHEDULER, ",".join(COMPARED)),
        (flags.WORKLOAD, ""),
        (flags.NUM_REQUESTS, 0),
        (flags.OUT, "out/fidelity"),
    ):
        absl_flags.set_default(_flag, _value)
    launcher.run(main)
