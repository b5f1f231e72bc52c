"""Compares schedulers on equal devices: goodput, attainment and throughput against rate and against the scale of the
SLO. Flags enter; tables, summary.json and a picture leave. Run as `python -m pdjax.experiments.compare`.

Goodput is the highest rate at which 90 % of the requests keep both limits. The limits are three points, in multiples of
what an idle instance takes for the mean prompt and for a decode step (`pdjax.experiments.virtual.POINTS`).

With --simulate everything runs in virtual time, in seconds.
"""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags
from rich.console import Console
from rich.table import Table

from pdjax import metrics, provenance, report, workload
from pdjax.config import EngineConfig
from pdjax.experiments import flags, launcher
from pdjax.experiments.sweep import Effort, Make, Played, Sweep
from pdjax.experiments.virtual import ROWS, Virtual, slo_points
from pdjax.latency import Load
from pdjax.models import source
from pdjax.report import Report
from pdjax.request import SLO
from pdjax.schedulers import SCHEDULERS
from pdjax.schedulers.base import Scheduler
from pdjax.workload import Workload

COLOCATED = ("colocated", "colocated_chunked")
COMPARED = (*COLOCATED, "disaggregated", "dynamic")
AWARE = ("dynamic",)  # of the SLO: the others are played once and judged by all
DEFAULT_WORKLOAD = "uniform:256-768,16-64"
SHORT_PROMPTS = "uniform:32-96,128-256"  # and long answers: one instance that decodes is too few
SCALES = (0.5, 0.75, 1.0, 1.5, 2.0)

SIMULATED = Effort(seeds=5, window_s=600, least=100, most=400, max_runs=12, tolerance=0.05)

SIMULATE = absl_flags.DEFINE_bool("simulate", False, "In virtual time, by the latency model.")
PROFILE_ONLY = absl_flags.DEFINE_bool("profile_only", False, "Print the limits and the predicted goodputs, and stop.")
SEEDS = absl_flags.DEFINE_integer("seeds", 0, "How many; 0: chosen.", lower_bound=0)


def simulate(
    scheduler: str | Scheduler,
    slo: SLO,
    rate: float,
    seed: int = 0,
    *,
    num_requests: int = 200,
    kind: str = DEFAULT_WORKLOAD,
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
    return virtual.play(scheduler, make_workload(virtual, kind, rate, seed, num_requests, slo))


@functools.cache
def default_virtual() -> Virtual:
    config = EngineConfig(max_model_len=1024, decode_max_batch=16)
    return Virtual(config, source.resolve(config.model).config)


def make_workload(virtual: Virtual, kind: str, rate: float, seed: int, count: int, slo: SLO) -> Workload:
    """As `pdjax.workload.parse` makes it, for these instances."""
    return workload.parse(
        kind,
        num_requests=count,
        vocab_size=virtual.model.vocab_size,
        max_model_len=virtual.max_model_len,
        rate=rate,
        seed=seed,
        slo=slo,
    )


def limits(virtual: Virtual, kind: str, scale: float = 1.0) -> tuple[dict[str, SLO], dict[str, float]]:
    """(the SLO points of a workload, what they are multiples of: prefill_s of the mean prompt alone, step_s of `ROWS`
    rows in the middle of a mean answer)."""
    prompt, answer = workload.mean_lengths(kind)
    prompt, context = round(prompt), round(prompt + answer / 2)
    spec = virtual.specs(SCHEDULERS["colocated"](None))[0]
    model = virtual.model_of(spec)
    prefill_s = model.prefill_s(spec, prompt)
    step_s = model.iteration_s(spec, Load((), ROWS, ROWS * context, ROWS * context))
    base = {"prompt_tokens": prompt, "context_tokens": context, "prefill_s": prefill_s, "step_s": step_s}
    return slo_points(prefill_s, step_s, scale), base


def predict(
    virtual: Virtual,
    kind: str,
    points: Mapping[str, SLO],
    schedulers: Sequence[str],
    effort: Effort = SIMULATED,
    *,
    scales: Sequence[float] = (),
) -> Sweep:
    """The comparison in virtual time. `scales`: of the limits, at the rate of `scale_rate`."""
    sweep = Sweep(points, make_of(virtual, kind), effort, AWARE)
    guess = dict.fromkeys(points, 1 / limits(virtual, kind)[1]["prefill_s"])  # what one instance prefills
    for scheduler in schedulers:
        sweep.find(scheduler, lambda name, played, who=scheduler: judged(virtual.play(who, played)), guess)  # type: ignore[misc]
    for name in points if scales else ():
        for scheduler in schedulers:
            sweep.scale(
                scheduler,
                lambda label, played, who=scheduler: judged(virtual.play(who, played)),  # type: ignore[misc]
                name,
                scale_rate(sweep, name),
                scales,
            )
    return sweep


def scale_rate(sweep: Sweep, name: str) -> float:
    """Where schedulers differ: the highest goodput of those that look at no SLO."""
    static = [scheduler for scheduler in sweep.schedulers if scheduler not in AWARE]
    rate = sweep.goodput(sweep.best(static, name), name).value
    # The nearest rate that was played: a scheduler that looks at no SLO need not be played again.
    return min((run.rate for run in sweep.runs if run.seed == 0), key=lambda played: abs(played - rate))


def make_of(virtual: Virtual, kind: str) -> Make:
    return lambda rate, seed, count, slo: make_workload(virtual, kind, rate, seed, count, slo)


def judged(run: Report) -> Played:
    """Of a run in this process."""
    return Played(functools.cache(lambda slo: tuple(metrics.met(one, slo) for one in run.records)), run.summary())


def ratios(sweep: Sweep) -> dict[str, dict[str, Any]]:
    """`goodput_ratio` of summary.json: for every point, ratios with their intervals, and of whom; those that there are
    runs for."""
    found: dict[str, dict[str, Any]] = {}
    for name in sweep.points:
        found[name] = {}
        colocated = [scheduler for scheduler in sweep.schedulers if scheduler in COLOCATED]
        static = [scheduler for scheduler in sweep.schedulers if scheduler not in AWARE]
        for key, over, under in (
            ("disaggregated_over_colocated", "disaggregated", colocated),
            ("dynamic_over_best", "dynamic", static),
        ):
            if over not in sweep.schedulers or not under:
                continue
            best = sweep.best(under, name)
            ratio = sweep.ratio(over, best, name)
            found[name] |= {
                key: ratio.value,
                f"{key}_interval": [ratio.low, ratio.high],
                f"{key}_bound": ratio.bound,
                f"{key}_under": best,
            }
    return found


def results(sweep: Sweep, kind: str, base: Mapping[str, float]) -> dict[str, Any]:
    """Of one workload, for summary.json."""
    return {
        "workload": kind,
        "idle": dict(base),
        "slo": {name: {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms} for name, slo in sweep.points.items()},
        "goodput": {
            name: {who: dataclasses.asdict(sweep.goodput(who, name)) for who in sweep.schedulers}
            for name in sweep.points
        },
        "goodput_ratio": ratios(sweep),
        "points": [run.line(sweep.points) for run in sweep.runs],
    }


def goodput_table(sweep: Sweep, title: str) -> Table:
    """Goodputs with their intervals, and the two ratios, a row per scheduler and a column per point."""
    table = Table(title=title, title_justify="left")
    table.add_column("goodput, requests/s")
    for name, slo in sweep.points.items():
        table.add_column(f"{name}\nTTFT {slo.ttft_ms:.0f}, TPOT {slo.tpot_ms:.0f} ms", justify="right")
    for who in sweep.schedulers:
        cells = []
        for name in sweep.points:
            found = sweep.goodput(who, name)
            cells.append(f"{_SIGNS[found.bound]}{found.value:.3f} ({found.low:.3f} to {found.high:.3f})")
        table.add_row(who, *cells)
    table.add_section()
    found_ratios = ratios(sweep)
    for key in ("disaggregated_over_colocated", "dynamic_over_best"):
        cells = []
        for found_ratio in found_ratios.values():
            if key in found_ratio:
                low, high = found_ratio[f"{key}_interval"]
                cells.append(f"{_SIGNS[found_ratio[f'{key}_bound']]}{found_ratio[key]:.2f} ({low:.2f} to {high:.2f})")
        if cells:
            table.add_row(key.replace("_", " "), *cells)
    return table


_SIGNS = {"": "", "at least": ">= ", "at most": "<= ", "unknown": "? "}


def main(argv: list[str]) -> None:
    del argv
    console = Console()
    config = flags.build_config(scheduler="colocated")
    virtual = Virtual(config, source.resolve(config.model).config)
    kind = flags.WORKLOAD.value
    names = tuple(flags.SCHEDULER.value.split(","))
    for name in names:
        if name not in SCHEDULERS:
            raise ValueError(f"scheduler is {flags.SCHEDULER.value!r}; allowed: some of {', '.join(SCHEDULERS)}")
    points, base = limits(virtual, kind)
    console.print(
        f"idle: prefill of {base['prompt_tokens']} tokens {base['prefill_s']:.2f} s, decode step of {ROWS} rows at "
        f"context {base['context_tokens']} {1e3 * base['step_s']:.0f} ms",
        highlight=False,
    )
    effort = dataclasses.replace(SIMULATED, seeds=SEEDS.value or SIMULATED.seeds)
    started = time.perf_counter()
    sweep = predict(virtual, kind, points, names, effort, scales=SCALES)
    console.print(goodput_table(sweep, f"{kind}, in virtual time"))
    console.print(f"{len(sweep.runs)} runs in {time.perf_counter() - started:.0f} s", highlight=False)
    if folder := flags.OUT.value:
        summary = {"provenance": provenance.collect(flags.given()), "simulated": True, **results(sweep, kind, base)}
        report.write_summary(Path(folder), summary)


absl_flags.adopt_module_key_flags(flags)  # --help shows them
absl_flags.set_default(flags.SCHEDULER, ",".join(COMPARED))
absl_flags.set_default(flags.WORKLOAD, DEFAULT_WORKLOAD)
for _holder, _value in (("max_model_len", 1024), ("decode_max_batch", 16)):
    absl_flags.FLAGS[_holder].value = _value
    absl_flags.FLAGS[_holder].default = _value

if __name__ == "__main__":
    launcher.run(main)
