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
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags as absl_flags
from rich.console import Console

from pdjax import metrics, profile, provenance, report, workload
from pdjax.config import EngineConfig
from pdjax.experiments import compare_tables, flags, launcher, measured
from pdjax.experiments.compare_tables import AWARE, COLOCATED
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

COMPARED = (*COLOCATED, "disaggregated", "dynamic")
WORKLOAD = "uniform:256-768,16-64"
QUICK_WORKLOAD = "uniform:128-384,8-32"  # half of all lengths: a run takes half of the time
SHORT_PROMPTS = "uniform:32-96,128-256"  # and long answers: one instance that decodes is too few
SCALES = (0.5, 0.75, 1.0, 1.5, 2.0)

SIMULATED = Effort(seeds=3, window_s=600, least=100, most=300, max_runs=12, tolerance=0.05)
# What is to say where to measure.
PREDICTED = Effort(seeds=1, window_s=400, least=50, most=120, max_runs=8, tolerance=0.1)
# A search begins at the predicted goodput: most find it between two neighbouring rates.
MEASURED = Effort(seeds=2, window_s=60, least=20, most=60, max_runs=3, factor=1.25, tolerance=0.3)
QUICK = Effort(seeds=1, window_s=22, least=12, most=24, max_runs=2, factor=1.35, tolerance=0.4, budget_s=130)

SIMULATE = absl_flags.DEFINE_bool("simulate", False, "In virtual time, by the latency model; without engines.")
QUICK_FLAG = absl_flags.DEFINE_bool(
    "quick", False, "Few and short runs, with half the lengths unless --workload is given: under 10 minutes."
)
PROFILE_ONLY = absl_flags.DEFINE_bool("profile_only", False, "Print the limits and the predicted goodputs, and stop.")
SEEDS = absl_flags.DEFINE_integer("seeds", 0, "How many; 0: chosen.", lower_bound=0)


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
    return Virtual(config, model, lambda spec: known.latency(spec, "" if spec.role is Role.MIXED else config.transfer))


def make_of(virtual: Virtual, kind: str) -> Make:
    """Makes the workloads of a kind for these instances."""

    def make(rate: float, seed: int, count: int, slo: SLO) -> Workload:
        return workload.parse(
            kind,
            num_requests=count,
            vocab_size=virtual.model.vocab_size,
            max_model_len=virtual.max_model_len,
            rate=rate,
            seed=seed,
            slo=slo,
        )

    return make


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
    return rounded(sweep.goodput(sweep.best(names, point), point).value)


def in_virtual_time(virtual: Virtual, scheduler: str) -> Play:
    return lambda _, asked: judged(virtual.play(scheduler, asked))


def judged(run: Report) -> Played:
    """Of a run in this process."""
    return Played(functools.cache(lambda slo: tuple(metrics.met(one, slo) for one in run.records)), run.summary())


def on_bench(bench: measured.Bench, points: list[measured.Point], folder: str = "") -> Play:
    """Plays on an engine; judges by what is in the files. `points` gets what was played."""

    def play(name: str, asked: Workload) -> Played:
        point = bench.play(folder + name, asked)
        points.append(point)
        records = measured.read_requests(point.path)
        return Played(
            functools.cache(lambda slo: tuple(metrics.met(one, slo) for one in records)), point.report.summary()
        )

    return play


@dataclasses.dataclass(slots=True)
class Found:
    """The sweeps of a comparison, by workload: measured ones, if there are, and predicted ones."""

    virtual: Virtual
    kind: str
    predicted: dict[str, Sweep]
    measured: dict[str, Sweep] = dataclasses.field(default_factory=dict)

    @property
    def main(self) -> Sweep:
        return (self.measured or self.predicted)[self.kind]

    @property
    def scales(self) -> Sweep:
        """The one with the attainment at other scales."""
        played = self.measured.get(self.kind)
        return (
            played if played is not None and any(run.scale != 1 for run in played.runs) else self.predicted[self.kind]
        )

    def summary(self) -> dict[str, Any]:
        sweeps = self.measured or self.predicted
        by_kind = {
            kind: compare_tables.results(sweep, kind, limits(self.virtual, kind)[1]) for kind, sweep in sweeps.items()
        }
        scales = [
            {
                "slo": point,
                "rate": scale_rate(self.predicted[self.kind], point),
                "scale": scale,
                "simulated": self.scales is self.predicted[self.kind],
                "attainment": {who: share for who in self.scales.schedulers if (share := self._at(who, point, scale))
                               is not None},
            }
            for point in self.scales.points
            for scale in SCALES
        ]  # fmt: skip
        return {
            "simulated": not self.measured,
            **by_kind.pop(self.kind),
            "scales": [entry for entry in scales if entry["attainment"]],
            "other_workloads": by_kind,
            "predicted": {
                kind: {
                    point: {who: sweep.goodput(who, point).value for who in sweep.schedulers} for point in sweep.points
                }
                for kind, sweep in self.predicted.items()
            },
        }

    def _at(self, scheduler: str, point: str, scale: float) -> float | None:
        return self.scales.attainment(scheduler, point, scale_rate(self.predicted[self.kind], point), scale)


def predictions(virtual: Virtual, kind: str, schedulers: Sequence[str], effort: Effort) -> Found:
    """Of the workload, and of the counter-example with those that do not choose."""
    fixed = [name for name in schedulers if name in ("colocated", "disaggregated")]
    found = Found(virtual, kind, {kind: predict(virtual, kind, schedulers, effort)})
    if len(fixed) == 2:
        found.predicted[SHORT_PROMPTS] = predict(virtual, SHORT_PROMPTS, fixed, effort, only=["balanced"], scales=())
    return found


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
                found = predictions(_as_measured(bench, configs[name], model), kind, list(configs), PREDICTED)
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
                guesses = {point: rounded(predicted.goodput(name, point).value) for point in predicted.points}
                play = on_bench(bench, points, "short-prompts/" if counter else "")
                sweep.find(name, play, guesses)
                if not counter and not quick:
                    sweep.scale(name, play, "balanced", scale_rate(predicted, "balanced"), SCALES)
    measured.check(points)
    return found


def _as_measured(bench: measured.Bench, config: EngineConfig, model: ModelConfig) -> Virtual:
    """Instances in virtual time that take what those of an engine take: as its profile or its warm-up says."""
    if config.profile:
        return profiled(config, model)
    spec, latency = bench.engine.specs[0], bench.engine.latency[0]

    def model_of(other: InstanceSpec) -> LatencyModel:
        return latency

    return Virtual(dataclasses.replace(config, max_model_len=spec.max_model_len), model, model_of)


def _worse(sweep: Sweep) -> list[str]:
    """The colocated schedulers but the best, by the mean of the logarithms of their goodputs."""
    colocated = [name for name in sweep.schedulers if name in COLOCATED]

    def mean(name: str) -> float:
        return sum(math.log(sweep.goodput(name, point).value) for point in sweep.points)

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
    effort = dataclasses.replace(effort, seeds=SEEDS.value or effort.seeds)
    console = Console()
    first = configs[names[0]]
    if SIMULATE.value:
        virtual = profiled(first, source.resolve(first.model).config)
        simulated = dataclasses.replace(PREDICTED if quick else SIMULATED, seeds=effort.seeds)
        found = predictions(virtual, kind, names, simulated)
        told(found, console)
        finish(found, console, lambda: provenance.collect(flags.given()))
        return
    if not flags.OUT.value:
        raise ValueError("out is empty; allowed: a folder, for the requests of every run")
    report.out_folder(flags.OUT.value)

    def on_head() -> None:
        result = measure(configs, kind, effort, flags.OUT.value, console, quick=quick)
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
