"""What `fidelity` plays: the same requests on engines and in virtual time, at several rates. Configurations and a
workload enter, `pdjax.experiments.fidelity_tables.Point`s leave. Called by `fidelity`; knows no flags.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdjax import build, goodput, metrics
from pdjax.config import EngineConfig
from pdjax.experiments import fidelity_tables, measured, predictions
from pdjax.experiments.fidelity_tables import Point, Side, side_of
from pdjax.experiments.virtual import Limits, Virtual
from pdjax.goodput import Trial
from pdjax.latency import KINDS, LatencyModel
from pdjax.messages import InstanceSpec
from pdjax.models import source
from pdjax.record import RequestRecord
from pdjax.request import SLO
from pdjax.workload import Workload

WORKLOAD = "uniform:32-224,4-44"
QUICK_WORKLOAD = "uniform:16-112,2-22"  # half of all lengths: twice the rates
REQUESTS, QUICK_REQUESTS = 200, 40
LIMITS = Limits(2.5, 1.6)  # tight: attainment falls over a wide range of rates, not only where queues have no end
TARGETS = (0.9, 0.7, 0.5)
MIDDLE = 0.6  # attainment to aim at where real ones were out of the band
EXTRA = 2  # runs per scheduler, besides those of the targets
STEP = 1.25  # from one rate to the next where all real attainments lie on one side
SLOWNESS = 1.03  # the table says what passes that take so much longer would do

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

    return dataclasses.replace(virtual, latency=model_of)


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
