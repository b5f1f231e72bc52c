"""What engines would do, in virtual time, and the limits that they are judged by: policies, a workload and latencies
enter, reports and sweeps leave. Called by `compare`, `switch` and by scripts that look at a policy; knows no flags.

    virtual = predictions.default_virtual()  # or profiled(config, model)
    points, idle = predictions.limits(virtual, predictions.WORKLOAD)
    run = predictions.simulate("dynamic", points["balanced"], rate=0.4)
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from pdjax import metrics, profile, workload
from pdjax.config import EngineConfig
from pdjax.experiments import compare_tables
from pdjax.experiments.compare_tables import AWARE
from pdjax.experiments.measured import Bench
from pdjax.experiments.sweep import Effort, Make, Play, Played, Sweep
from pdjax.experiments.virtual import POINTS, ROWS, Virtual, slo_points
from pdjax.goodput import rounded
from pdjax.latency import LatencyModel, Load
from pdjax.messages import InstanceSpec, Role
from pdjax.models import source
from pdjax.models.config import ModelConfig
from pdjax.report import Report
from pdjax.request import SLO
from pdjax.schedulers import SCHEDULERS
from pdjax.schedulers.base import Scheduler
from pdjax.workload import Workload

WORKLOAD = "uniform:256-768,16-64"
SHORT_PROMPTS = "uniform:32-96,128-256"  # and long answers: one instance that decodes is too few
SCALES = (0.5, 0.75, 1.0, 1.5, 2.0)


def simulate(
    scheduler: str | Scheduler,
    slo: SLO,
    rate: float,
    seed: int = 0,
    *,
    num_requests: int = 200,
    kind: str = WORKLOAD,
    virtual: Virtual | None = None,
) -> Report:
    """Serves a workload in virtual time.

    Args:
        scheduler: a name, or a fresh policy.
        slo: what the requests ask for.
        rate: requests per second.
        seed: of the requests.
        num_requests, kind: of the workload, as for `pdjax.workload.parse`.
        virtual: instances and latencies; None: SmolLM2-135M on two instances of one core.
    """
    virtual = virtual or default_virtual()
    return virtual.play(scheduler, make_of(virtual, kind)(rate, seed, num_requests, slo))


@functools.cache
def default_virtual() -> Virtual:
    config = EngineConfig(max_model_len=1024, decode_max_batch=16)
    return Virtual(config, source.resolve(config.model).config)


def profiled(config: EngineConfig, model: ModelConfig) -> Virtual:
    """By the profile that the configuration names, or by the usual latencies where it names none."""
    if not config.profile:
        return Virtual(config, model)
    known = profile.load(config.profile)

    def model_of(spec: InstanceSpec) -> LatencyModel:
        return known.latency(spec, "" if spec.role is Role.MIXED else config.transfer)

    return Virtual(config, model, model_of, known.estimate.platform if known.estimate else "cpu")


def requests(virtual: Virtual, kind: str, rate: float, seed: int, slo: SLO, count: int | None = None) -> Workload:
    """A workload of a kind for these instances; without a count, all that it has."""
    return workload.parse(
        kind,
        num_requests=count,
        vocab_size=virtual.model.vocab_size,
        max_model_len=virtual.max_model_len,
        rate=rate,
        seed=seed,
        slo=slo,
    )


def make_of(virtual: Virtual, kind: str) -> Make:
    """Makes the workloads of a kind for these instances."""
    return lambda rate, seed, count, slo: requests(virtual, kind, rate, seed, slo, count)


def limits(virtual: Virtual, kind: str) -> tuple[dict[str, SLO], dict[str, float]]:
    """(the SLO points of a workload, what they are multiples of: prefill_s of the mean prompt alone, step_s of `ROWS`
    rows in the middle of a mean answer)."""
    prompt, answer = workload.mean_lengths(kind)
    tokens, context = round(prompt), round(prompt + answer / 2)
    spec = virtual.specs(SCHEDULERS["colocated"](None))[0]
    model = virtual.model_of(spec)
    prefill_s = model.prefill_s(spec, tokens)
    step_s = model.iteration_s(spec, Load((), ROWS, ROWS * context, ROWS * context))
    idle = {"prompt_tokens": tokens, "context_tokens": context, "prefill_s": prefill_s, "step_s": step_s}
    return slo_points(prefill_s, step_s), idle


def predict(
    virtual: Virtual,
    kind: str,
    schedulers: Sequence[str],
    effort: Effort,
    *,
    only: Sequence[str] = tuple(POINTS),
    scales: Sequence[float] = SCALES,
) -> Sweep:
    """The comparison in virtual time at some of the points, and the attainment at other scales of the limits at
    `scale_rate`."""
    points, idle = limits(virtual, kind)
    points = {name: points[name] for name in only}
    sweep = Sweep(points, make_of(virtual, kind), effort, AWARE)
    guesses = dict.fromkeys(points, rounded(1 / idle["prefill_s"]))  # what one instance prefills
    plays = {name: in_virtual_time(virtual, name) for name in schedulers}
    for name, play in plays.items():
        sweep.find(name, play, guesses)
    for point in points:
        rate = scale_rate(sweep, point)
        for name, play in plays.items():
            sweep.scale(name, play, point, rate, scales)
    return sweep


def scale_rate(sweep: Sweep, point: str) -> float:
    """Where schedulers differ: the highest goodput of those that do not choose."""
    names = compare_tables.static(sweep) or sweep.schedulers
    return rounded(sweep.mean(sweep.best(names, point), point))


def in_virtual_time(virtual: Virtual, scheduler: str) -> Play:
    return lambda _, asked: judged(virtual.play(scheduler, asked))


def judged(run: Report) -> Played:
    """Of a run in this process."""
    return Played(functools.cache(lambda slo: tuple(metrics.met(one, slo) for one in run.records)), run.summary())


def as_measured(bench: Bench, config: EngineConfig, model: ModelConfig) -> Virtual:
    """Instances in virtual time that take what those of an engine take: as its profile or its warm-up says."""
    if config.profile:
        return profiled(config, model)
    spec, latency = bench.engine.specs[0], bench.engine.latency[0]

    def model_of(other: InstanceSpec) -> LatencyModel:
        return latency

    return Virtual(dataclasses.replace(config, max_model_len=spec.max_model_len), model, model_of)


@dataclasses.dataclass(slots=True)
class Found:
    """The sweeps of a comparison, by workload: measured ones, if there are, and predicted ones."""

    virtual: Virtual
    kind: str
    predicted: dict[str, Sweep]
    measured: dict[str, Sweep] = dataclasses.field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """summary.json but for where it comes from. What was not measured is the prediction, and says so."""
        by_kind = {
            kind: {
                "simulated": kind not in self.measured,
                **compare_tables.results(self.measured.get(kind, sweep), kind, limits(self.virtual, kind)[1]),
            }
            for kind, sweep in self.predicted.items()
        }
        return {
            **by_kind.pop(self.kind),
            "scales": self._scales(),
            "other_workloads": by_kind,
            "predicted": {
                kind: {point: {who: sweep.mean(who, point) for who in sweep.schedulers} for point in sweep.points}
                for kind, sweep in self.predicted.items()
            },
        }

    def _scales(self) -> list[dict[str, Any]]:
        """Attainment at other scales of the limits: as measured, where it was."""
        measured = self.measured.get(self.kind)
        sweep = measured if measured is not None and measured.rates else self.predicted[self.kind]
        entries = []
        for point, rate in sweep.rates.items():
            for scale in SCALES:
                shares = {who: sweep.attainment(who, point, scale) for who in sweep.schedulers}
                entries.append(
                    {
                        "slo": point,
                        "rate": rate,
                        "scale": scale,
                        "simulated": sweep is not measured,
                        "attainment": {who: share for who, share in shares.items() if share is not None},
                    }
                )
        return entries


def predictions(virtual: Virtual, kind: str, schedulers: Sequence[str], effort: Effort) -> Found:
    """Of the workload, and of the counter-example with those that do not choose."""
    fixed = [name for name in schedulers if name in ("colocated", "disaggregated")]
    found = Found(virtual, kind, {kind: predict(virtual, kind, schedulers, effort)})
    if len(fixed) == 2:
        found.predicted[SHORT_PROMPTS] = predict(virtual, SHORT_PROMPTS, fixed, effort, only=["balanced"], scales=())
    return found
