"""What `fidelity` plays: the same requests on engines and in virtual time, at several rates. Configurations and a
workload enter, `pdjax.experiments.fidelity_tables.Point`s leave. Called by `fidelity`; knows no flags.

The profile knows passes alone, of some minutes ago. How long they take while this policy serves, now, is told by
requests in front of those that are judged (`gauge`), per instance and kind of pass: with that, the judged ones are
predicted. The policy believes the profile alone, as that of the engine does.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from pdjax import build, goodput, metrics
from pdjax.config import EngineConfig
from pdjax.experiments import fidelity_tables, gauge, measured, predictions
from pdjax.experiments.fidelity_tables import Point, Side, side_of
from pdjax.experiments.virtual import Limits, Virtual
from pdjax.goodput import Trial
from pdjax.latency import KINDS, LatencyModel
from pdjax.messages import InstanceSpec
from pdjax.models import source
from pdjax.record import RequestRecord
from pdjax.report import Report
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
MARGIN = 0.3  # of the requests that are judged: so many more in front of them, and behind
ATTEMPTS = 3  # at a run

Real = Callable[[str, Workload], Report]  # serves it, under a name


@dataclasses.dataclass(frozen=True, slots=True)
class Course:
    """What is compared.

    Attributes:
        virtual: instances and what their passes take.
        kind: of the workload.
        slo: of every request.
        count, seed: of the requests of each run that are judged.
        extra: runs of a scheduler besides those of the targets.
        attempts: at a run during which the machine changed; the one in which it did least counts.
        guess: requests per second that one instance prefills.
    """

    virtual: Virtual
    kind: str
    slo: SLO
    count: int
    seed: int
    extra: int
    attempts: int
    guess: float

    @property
    def margin(self) -> int:
        return math.ceil(MARGIN * self.count)

    def workload(self, rate: float) -> Workload:
        return predictions.requests(self.virtual, self.kind, rate, self.seed, self.slo, self.count + 2 * self.margin)

    def judged(self, records: Sequence[RequestRecord]) -> Sequence[RequestRecord]:
        """Of all requests of a run, in order."""
        return records[self.margin : self.margin + self.count]


def course(virtual: Virtual, kind: str, count: int, seed: int, extra: int, attempts: int) -> Course:
    """With limits in multiples of what an idle instance takes."""
    idle = predictions.limits(virtual, kind)[1]
    slo = SLO(ttft_ms=1e3 * LIMITS.ttft * idle["prefill_s"], tpot_ms=1e3 * LIMITS.tpot * idle["step_s"])
    return Course(virtual, kind, slo, count, seed, extra, attempts, goodput.rounded(1 / idle["prefill_s"]))


def slowed(virtual: Virtual, times: float) -> Virtual:
    """Instances whose passes take so many times as long; policies do not know."""

    def actual(spec: InstanceSpec) -> LatencyModel:
        model = virtual.actual_of(spec)
        prefill, decode, mixed = model.scale
        return dataclasses.replace(model, scale=(times * prefill, times * decode, times * mixed))

    return dataclasses.replace(virtual, actual=actual)


def in_virtual_time(virtual: Virtual, config: EngineConfig) -> Real:
    """Plays under the policy of a configuration."""
    return lambda _, asked: virtual.play(build.scheduler_of(config), asked)


def on_bench(bench: measured.Bench, points: list[measured.Point]) -> Real:
    """Plays on an engine. `points` gets what was played."""

    def play(name: str, asked: Workload) -> Report:
        points.append(bench.play(name, asked))
        return points[-1].report

    return play


def rates(plan: Course, config: EngineConfig) -> tuple[list[float], float]:
    """(the rates at which simulated attainment is TARGETS, how long runs at these take in all: seconds)."""
    play = in_virtual_time(plan.virtual, config)
    trials: list[Trial] = []

    def run(rate: float) -> Trial:
        records = play("", plan.workload(rate)).records
        return Trial(rate, tuple(metrics.met(record) for record in plan.judged(records)))

    found = []
    for target in TARGETS:
        trials = goodput.search(run, plan.guess, known=trials, target=target, tolerance=0.03, max_runs=12)
        found.append(goodput.rounded(goodput.crossing(trials, target).rate))
    last_s = [plan.workload(rate).items[-1].arrival_s for rate in found]
    return list(dict.fromkeys(found)), sum(last_s)


def compare(plan: Course, config: EngineConfig, first: Sequence[float], real: Real) -> list[Point]:
    """Plays one scheduler at some rates on both sides; at more, while too few real attainments lie in the band."""
    coming, points = list(first), list[Point]()
    while coming:
        points.append(point(plan, config, coming.pop(0), real))
        inside = sum(fidelity_tables.within(point.real) for point in points)
        if not coming and inside < len(TARGETS) and len(points) < len(first) + plan.extra:
            rate = another([(point.rate, point.real) for point in points])
            coming += [rate] if all(point.rate != rate for point in points) else []
    return points


def point(plan: Course, config: EngineConfig, rate: float, real: Real) -> Point:
    """Serves one workload for real, again where the machine changed meanwhile, and in virtual time."""
    asked, name = plan.workload(rate), f"{config.scheduler}-rate{rate:g}"
    played: list[tuple[dict[str, float], Report]] = []
    while len(played) < plan.attempts and all(gauge.unrest(drift) > gauge.DRIFT for drift, _ in played):
        run = real(name, asked)
        played.append((gauge.drift(*gauge.around(run, plan.margin)), run))
    drift, run = min(played, key=lambda each: gauge.unrest(each[0]))
    before, after = gauge.around(run, plan.margin)

    def virtual(known: gauge.Passes) -> Virtual:
        scales = gauge.scales(known, len(run.specs))
        return dataclasses.replace(plan.virtual, actual=gauge.scaled(plan.virtual.model_of, scales))

    def side(played: Virtual) -> Side:
        return side_of(plan.judged(in_virtual_time(played, config)(name, asked).records))

    told = metrics.prediction(run.records, run.iterations, run.transfers)
    return Point(
        config.scheduler,
        rate,
        side_of(plan.judged(run.records)),
        side(virtual(before)),
        slower=side(slowed(virtual(before), SLOWNESS)).attainment,
        by_profile=side(plan.virtual).attainment,
        around=side(virtual([*before, *after])).attainment,
        as_it_was=side(virtual(run.iterations)).attainment,
        bias={kind: told[kind]["bias"] for kind in KINDS},
        drift=drift,
        attempts=len(played),
    )


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
