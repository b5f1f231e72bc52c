"""Compares simulated runs with real ones: attainment of the same requests on engines and in virtual time, at several
rates and under several schedulers. Flags enter; a table, summary.json, the requests of every real run and fidelity.png
leave. Run as `python -m pdjax.experiments.fidelity [--profile=profile/profile.json]`.

The simulator has the engine's instances, limits and policies, and what passes and transfers take by the profile;
without one it is measured first (with --quick, by the warm-up). Nothing is fitted to what is compared, and latency
models are not corrected while serving (--correct). Rates are those at which the simulated attainment is TARGETS; where
the real one is out of `fidelity_tables.BAND`, up to EXTRA more are played. With --simulate=1.05 there is no engine: its
place is taken by instances in virtual time that are so many times as slow as the simulator believes.
"""

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags
from rich.console import Console

from pdjax import build, goodput, metrics, profile, provenance, report, workload
from pdjax.config import EngineConfig
from pdjax.experiments import compare_tables, fidelity_tables, flags, launcher, measured, predictions
from pdjax.experiments import profile as profiling
from pdjax.experiments.fidelity_tables import Point, Side, side_of
from pdjax.experiments.virtual import Limits, Virtual
from pdjax.goodput import Trial
from pdjax.latency import KINDS, LatencyModel
from pdjax.messages import InstanceSpec
from pdjax.models import source
from pdjax.record import RequestRecord
from pdjax.request import SLO
from pdjax.schedulers import SCHEDULERS
from pdjax.workload import Workload

COMPARED = (*compare_tables.COLOCATED, "disaggregated", "dynamic")
WORKLOAD = "uniform:32-224,4-44"
QUICK_WORKLOAD = "uniform:16-112,2-22"  # half of all lengths: twice the rates
REQUESTS, QUICK_REQUESTS = 200, 40
LIMITS = Limits(2.5, 1.6)  # tight: attainment falls over a wide range of rates, not only where queues have no end
TARGETS = (0.9, 0.7, 0.5)
MIDDLE = 0.6  # attainment to aim at where real ones were out of the band
EXTRA = 2  # runs per scheduler, besides those of the targets
STEP = 1.25  # from one rate to the next where all real attainments lie on one side
WIDE = 130  # characters of a line where there is no terminal
SLOWNESS = 1.03  # the table says what passes that take so much longer would do

SIMULATE = absl_flags.DEFINE_float(
    "simulate",
    None,
    "No engines: in their place instances in virtual time whose passes take so many times as long.",
    lower_bound=0.1,
    upper_bound=10.0,
)
QUICK = absl_flags.DEFINE_bool(
    "quick", False, "Fewer requests of half the lengths, and no run besides those of the targets: under 10 minutes."
)

# Serves it, under a name; records in the order of requests, and `pdjax.metrics.prediction` of the run.
Real = Callable[[str, Workload], tuple[Sequence[RequestRecord], Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Course:
    """What is compared.

    Attributes:
        virtual: instances and what their passes take.
        kind: of the workload.
        slo: of every request.
        count, seed: of the requests of each run.
        extra: runs of a scheduler besides those of the targets.
        guess: requests per second that one instance prefills.
    """

    virtual: Virtual
    kind: str
    slo: SLO
    count: int
    seed: int
    extra: int
    guess: float

    def workload(self, rate: float) -> Workload:
        return predictions.requests(self.virtual, self.kind, rate, self.seed, self.slo, self.count)


def course(virtual: Virtual, kind: str, count: int, seed: int, extra: int) -> Course:
    """With limits in multiples of what an idle instance takes."""
    idle = predictions.limits(virtual, kind)[1]
    slo = SLO(ttft_ms=1e3 * LIMITS.ttft * idle["prefill_s"], tpot_ms=1e3 * LIMITS.tpot * idle["step_s"])
    return Course(virtual, kind, slo, count, seed, extra, goodput.rounded(1 / idle["prefill_s"]))


def slowed(virtual: Virtual, times: float) -> Virtual:
    """Instances whose passes take so many times as long."""

    def model_of(spec: InstanceSpec) -> LatencyModel:
        return dataclasses.replace(virtual.model_of(spec), scale=(times, times, times))

    return Virtual(virtual.config, virtual.model, model_of)


def in_virtual_time(virtual: Virtual, config: EngineConfig) -> Real:
    """Plays under the policy of a configuration."""

    def play(_: str, asked: Workload) -> tuple[Sequence[RequestRecord], Mapping[str, Any]]:
        run = virtual.play(build.scheduler_of(config), asked)
        return run.records, metrics.prediction(run.records, run.iterations, run.transfers)

    return play


def on_bench(bench: measured.Bench, points: list[measured.Point]) -> Real:
    """Plays on an engine; what counts is in the files. `points` gets what was played."""

    def play(name: str, asked: Workload) -> tuple[Sequence[RequestRecord], Mapping[str, Any]]:
        points.append(bench.play(name, asked))
        return measured.read_requests(points[-1].path), points[-1].report.summary()["prediction"]

    return play


def rates(plan: Course, config: EngineConfig) -> tuple[list[float], float]:
    """(the rates at which simulated attainment is TARGETS, how long runs at these take in all: seconds)."""
    play = in_virtual_time(plan.virtual, config)
    trials: list[Trial] = []

    def run(rate: float) -> Trial:
        return Trial(rate, tuple(metrics.met(record) for record in play("", plan.workload(rate))[0]))

    found = []
    for target in TARGETS:
        trials = goodput.search(run, plan.guess, known=trials, target=target, tolerance=0.03, max_runs=12)
        found.append(goodput.rounded(goodput.crossing(trials, target).rate))
    last_s = [plan.workload(rate).items[-1].arrival_s for rate in found]
    return list(dict.fromkeys(found)), sum(last_s)


def compare(plan: Course, config: EngineConfig, first: Sequence[float], real: Real) -> list[Point]:
    """Plays one scheduler at some rates on both sides; at more, while too few real attainments lie in the band."""
    simulated = in_virtual_time(plan.virtual, config)
    slower = in_virtual_time(slowed(plan.virtual, SLOWNESS), config)
    coming, points = list(first), list[Point]()
    while coming:
        rate = coming.pop(0)
        asked = plan.workload(rate)
        name = f"{config.scheduler}-rate{rate:g}"
        records, predicted = real(name, asked)
        virtual = side_of(simulated(name, asked)[0])
        attained = side_of(slower(name, asked)[0]).attainment
        bias = {kind: predicted[kind]["bias"] for kind in KINDS}
        points.append(Point(config.scheduler, rate, side_of(records), virtual, attained, bias))
        inside = sum(fidelity_tables.within(point.real) for point in points)
        if not coming and inside < len(TARGETS) and len(points) < len(first) + plan.extra:
            rate = another([(point.rate, point.real) for point in points])
            coming += [rate] if all(point.rate != rate for point in points) else []
    return points


def another(played: Sequence[tuple[float, Side]]) -> float:
    """A rate at which real attainment should lie in the band, by the rates that were played."""
    found = goodput.crossing([Trial(rate, side.met) for rate, side in played], MIDDLE)
    factor = {"at least": STEP, "at most": 1 / STEP}.get(found.bound, 1.0)
    return goodput.rounded(found.rate * factor)


def same_instances(mine: Sequence[InstanceSpec], engine: Sequence[InstanceSpec]) -> None:
    """RuntimeError unless the engine's instances are those that are simulated."""
    plain = [dataclasses.replace(spec, ranks=()) for spec in engine]
    if list(mine) != plain:
        raise RuntimeError(f"the engine has other instances, {plain}, than were simulated: {list(mine)}")


def measure(
    configs: Mapping[str, EngineConfig], plan_of: Callable[[Virtual], Course], out: str
) -> tuple[list[Point], Course]:
    """On engines, one after the other; `plan_of` is called when the first one is warm."""
    pace = measured.Pace(len(configs) * len(TARGETS))
    model = source.resolve(next(iter(configs.values())).model).config
    points: list[Point] = []
    played: list[measured.Point] = []
    plan: Course | None = None
    at: dict[str, list[float]] = {}
    for name, config in configs.items():
        with measured.Bench(config, out, pace) as bench:
            if plan is None:
                plan = plan_of(predictions.as_measured(bench, config, model))
                at = told(plan, configs, pace.say)
                pace.points = sum(len(each) for each in at.values())
            same_instances(plan.virtual.specs(build.scheduler_of(config)), bench.engine.specs)
            points += compare(plan, config, at[name], on_bench(bench, played))
    measured.check(played)
    assert plan is not None  # of the first configuration
    return points, plan


def told(plan: Course, configs: Mapping[str, EngineConfig], say: Callable[[str], None]) -> dict[str, list[float]]:
    """The rates of every scheduler; says what will be played, and for how long."""
    found = {name: rates(plan, config) for name, config in configs.items()}
    for name, (chosen, _) in found.items():
        say(f"{name}: {', '.join(f'{rate:g}' for rate in chosen)} requests/s")
    say(
        f"{plan.count} requests of {plan.kind}, TTFT {plan.slo.ttft_ms:.0f} ms, TPOT {plan.slo.tpot_ms:.0f} ms; "
        f"arrivals last {sum(seconds for _, seconds in found.values()) / 60:.0f} min in all"
    )
    return {name: chosen for name, (chosen, _) in found.items()}


def profiled(config: EngineConfig, out: str, console: Console) -> str:
    """Measures a profile; its file."""
    policy = profiling.Apart()
    chunk = config.prefill_chunk or profiling.CHUNK
    own = dataclasses.replace(
        config, scheduler=policy, prefill_chunk=chunk, decode_chunk=chunk, warmup=False, correct=False
    )
    known = profiling.measure(own, policy, console)
    console.print(profiling.errors(known))
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
    console = Console(width=None if sys.stdout.isatty() else WIDE)

    def plan_of(virtual: Virtual) -> Course:
        return course(virtual, kind, count, flags.SEED.value, 0 if quick else EXTRA)

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
