"""DistServe's figure 8, the goodput per GPU that it shows, and table 2: attainment against rate and limits. The folder
of published data enters, rows and curves leave. Called by `pdjax.experiments.papers.distserve`.

Attainment is joint: TTFT and TPOT of the same request. A point is the mean of several runs with different requests,
each as long as one of the evaluation's, which played each point once.
"""

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pdjax.experiments.papers import distserve_bench as bench
from pdjax.experiments.papers.outcome import Row, Setup
from pdjax.goodput import Estimate, estimate
from pdjax.request import SLO

SEEDS, QUICK_SEEDS = 10, 4
COLUMNS = ("model", "system", "x_kind", "x", "per_gpu_rate_rps", "slo_attainment_pct")
TARGET_POINTS = 6.0  # of mean absolute error

# Table 2: attainment of the real systems in percent, OPT-66B, ShareGPT, by requests per second in all.
TABLE_2_RATES = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
TABLE_2 = {
    "vllm": (97.0, 65.5, 52.8, 44.9, 36.7, 27.8, 23.6),
    "distserve": (100.0, 100.0, 99.3, 87.3, 83.0, 77.3, 70.0),
}
ABLATION_SLO = SLO(ttft_ms=400.0, tpot_ms=100.0)  # of the scripts of figure 11


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A published point: `x` is the rate per GPU (`kind` "rate") or the scale of both limits ("slo_scale")."""

    model: str
    system: str
    kind: str
    x: float
    rate: float
    attainment: float

    @property
    def scale(self) -> float:
        return self.x if self.kind == "slo_scale" else 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """A published point beside ours, percent. `spread`: the standard deviation of one run like the evaluation's."""

    point: Point
    ours: float
    spread: float

    @property
    def error(self) -> float:
        return self.ours - self.point.attainment


Runs = Mapping[float, Sequence[bench.Played]]  # by rate per GPU, one of each seed


def read_points(folder: Path) -> list[Point]:
    """The points of figure 8 that have a value, of the models and systems that are simulated here.

    Raises:
        ValueError: the file is not there, or lacks a column or a number.
    """
    path = folder / "distserve" / "fig8_digitised.csv"
    if not path.is_file():
        raise ValueError(f"data is {str(folder)!r}, which has no {path.relative_to(folder)}; allowed: a folder with it")
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        if missing := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
            raise ValueError(f"{path} lacks the columns {', '.join(missing)}; allowed: all of {', '.join(COLUMNS)}")
        known = [model.name for model in bench.MODELS]
        points = []
        for line in reader:
            if line["model"] not in known or line["system"] not in bench.SYSTEMS or not line["slo_attainment_pct"]:
                continue  # another series, or hidden behind one in the figure
            try:
                x, rate, attainment = (float(line[name]) for name in COLUMNS[3:])
            except ValueError as error:
                raise ValueError(f"{path}:{reader.line_num}: {error}; allowed: numbers") from None
            points.append(Point(line["model"], line["system"], line["x_kind"], x, rate, attainment))
    return points


def play_all(
    model: bench.Model,
    system: str,
    rates: Sequence[float],
    lengths: bench.Lengths,
    seeds: Sequence[int],
    **options: bool,
) -> Runs:
    """Runs of the evaluation's length at rates per GPU; `options` as for `bench.evaluated`."""
    fleet = bench.evaluated(model, system, **options)
    count = model.per_gpu * fleet.devices
    return {
        rate: [bench.play(fleet, bench.policy(system), lengths, rate * fleet.devices, count, seed) for seed in seeds]
        for rate in rates
    }


def compare(points: Sequence[Point], runs: Runs, slo: SLO) -> list[Compared]:
    """Points of one series beside its runs."""
    compared = []
    for point in points:
        values = [run.attainment(slo, point.scale) for run in runs[point.rate]]
        compared.append(Compared(point, float(np.mean(values)), float(np.std(values, ddof=min(1, len(values) - 1)))))
    return compared


def mean_abs_error(compared: Sequence[Compared]) -> float:
    """In points."""
    return float(np.mean([abs(one.error) for one in compared]))


# --- figure 8 and goodput -------------------------------------------------------------------------------------------


def figure_8(setup: Setup) -> tuple[list[Row], dict[str, Any]]:
    """Rows for the series and their goodput; for summary.json and the picture, every point."""
    folder = setup.folder()
    points, lengths = read_points(folder), bench.sharegpt(folder)
    seeds = range(setup.seed, setup.seed + (QUICK_SEEDS if setup.quick else SEEDS))
    goodputs = read_goodputs(folder)
    compared: list[Compared] = []
    rows, goodput_rows = [], []
    without_swap: list[Compared] = []
    by_series: dict[str, Any] = {}
    for model in bench.MODELS:
        for system in bench.SYSTEMS:
            series = [point for point in points if point.model == model.name and point.system == system]
            rates = sorted({point.rate for point in series})
            runs = play_all(model, system, rates, lengths, seeds)
            found = compare(series, runs, model.slo)
            compared += found
            if system == "distserve":
                bare = play_all(model, system, rates, lengths, seeds, swap=False)
                plain = compare(series, bare, model.slo)
                without_swap += plain
            else:
                bare, plain = runs, found
                without_swap += found
            rows.append(_series_row(model, system, found, plain, bare))
            late = late_alone(model, model.slo, lengths)
            goodput_rows.append(_goodput_row(model, system, runs, bare, goodputs[model.name, system], late))
            by_series[f"{model.name} {system}"] = _errors(found)
            setup.say(f"figure 8, {model.name}, {system}: {mean_abs_error(found):.1f} points off in the mean")
    rows.append(
        Row(
            "Figure 8, mean absolute error of all points",
            0.0,
            mean_abs_error(compared),
            "points",
            TARGET_POINTS,
            "absolute",
            f"of {len(compared)} points; {_within(compared)} of them within 2 standard deviations of a single run; "
            f"DistServe without swap space: {mean_abs_error(without_swap):.1f}",
        )
    )
    rows.append(_long_row(setup, points, lengths))
    summary = {
        "fig8_mean_abs_error_points": mean_abs_error(compared),
        "fig8_without_swap_mean_abs_error_points": mean_abs_error(without_swap),
        "fig8_by_series": by_series,
        "fig8_points": [dataclasses.asdict(one.point) | {"ours": one.ours, "spread": one.spread} for one in compared],
        "fig8_runs_per_point": len(seeds),
    }
    return rows + goodput_rows, summary


def _errors(compared: Sequence[Compared]) -> dict[str, float]:
    errors = [one.error for one in compared]
    return {
        "mean_abs_error_points": mean_abs_error(compared),
        "bias_points": float(np.mean(errors)),
        "max_abs_error_points": max(map(abs, errors)),
        "spread_of_a_run_points": float(np.mean([one.spread for one in compared])),
    }


def _within(compared: Sequence[Compared]) -> int:
    """Points that a single run of ours could well have given; a share cannot be nearer than one request in 100."""
    return sum(abs(one.error) <= max(2 * one.spread, 1.0) for one in compared)


def _series_row(
    model: bench.Model, system: str, found: Sequence[Compared], plain: Sequence[Compared], bare: Runs
) -> Row:
    errors = _errors(found)
    note = (
        f"bias {errors['bias_points']:+.1f}, largest {errors['max_abs_error_points']:.1f}; one run of "
        f"{model.per_gpu} requests per GPU varies by {errors['spread_of_a_run_points']:.1f}"
    )
    if system == "distserve":
        rate = max(bare)
        preempted = np.mean([run.preempted for run in bare[rate]])
        note += (
            f"; without swap space {mean_abs_error(plain):.1f}: at {rate:g} req/s per GPU rows are preempted "
            f"{preempted:.0f} times a run, and pdjax computes their KV again on the prefill instance"
        )
    words = f"Figure 8, {model.name}, {system}: mean absolute error of {len(found)} points"
    return Row(words, 0.0, errors["mean_abs_error_points"], "points", TARGET_POINTS, "absolute", note)


def _long_row(setup: Setup, points: Sequence[Point], lengths: bench.Lengths) -> Row:
    """What the length of a run does, at a point of vLLM's beyond its goodput."""
    model, rate, times = bench.MODELS[1], 0.75, 4
    published = [point.attainment for point in points if (point.model, point.system) == (model.name, "vllm")
                 and point.kind == "rate" and point.rate == rate]  # fmt: skip
    fleet = bench.evaluated(model, "vllm")
    count = times * model.per_gpu * fleet.devices
    run = bench.play(fleet, bench.policy("vllm"), lengths, rate * fleet.devices, count, setup.seed)
    return Row(
        f"{model.name}, vllm, {rate} req/s per GPU, in a run {times} times as long",
        published[0] if published else None,
        run.attainment(model.slo),
        "%",
        note="beyond the goodput the queue grows while a run lasts: a curve is one of runs of its length",
    )


def read_goodputs(folder: Path) -> dict[tuple[str, str], float]:
    """Published requests per second per GPU at 90 % attainment, ShareGPT, by model and system. Errors as
    `read_points`."""
    path = folder / "distserve" / "goodput90_notebook.csv"
    if not path.is_file():
        raise ValueError(f"data is {str(folder)!r}, which has no {path.relative_to(folder)}; allowed: a folder with it")
    with path.open(encoding="utf-8-sig", newline="") as file:
        return {(row["model"], row["system"]): float(row["goodput90_rps_per_gpu"]) for row in csv.DictReader(file)}


def _goodput_row(model: bench.Model, system: str, runs: Runs, bare: Runs, published: float, late: float) -> Row:
    found = _goodput(model, system, runs)
    note = f"{found.low:.2f} to {found.high:.2f} by {found.how}"
    if found.bound:
        note = f"{found.bound} this in some runs; {note}"
    if system == "distserve":
        note += f"; without swap space {_goodput(model, system, bare).value:.2f}"
    else:
        note += (
            f"; its curve is flat around 90 %, so few points of attainment are much rate: {late:.0%} of the prompts "
            "miss the TTFT limit even alone, and which are drawn counts for points"
        )
    tolerance = 0.15 if system == "distserve" else None
    return Row(f"Goodput per GPU, {model.name}, {system}", published, found.value, "req/s", tolerance, note=note)


def _goodput(model: bench.Model, system: str, runs: Runs) -> Estimate:
    """Per GPU, over seeds."""
    devices = bench.evaluated(model, system).devices
    return estimate(
        [[run.trial(model.slo, devices) for run in one_seed] for one_seed in zip(*runs.values(), strict=True)]
    )


# --- table 2 --------------------------------------------------------------------------------------------------------


def table_2(setup: Setup) -> tuple[list[Row], dict[str, Any]]:
    """Attainment of the real systems beside ours. The paper names neither the limits nor the requests of a run."""
    model, lengths = bench.MODELS[1], bench.sharegpt(setup.folder())
    seeds = range(setup.seed, setup.seed + (QUICK_SEEDS if setup.quick else SEEDS))
    rows, errors = [], {}
    for system in bench.SYSTEMS:
        fleet = bench.evaluated(model, system)
        runs = play_all(model, system, [rate / fleet.devices for rate in TABLE_2_RATES], lengths, seeds)
        ours = {
            name: [float(np.mean([run.attainment(slo) for run in of_rate])) for of_rate in runs.values()]
            for name, slo in (("ablation", ABLATION_SLO), ("table_1", model.slo))
        }
        for name, values in ours.items():
            errors[f"{system} {name}"] = float(np.mean(np.abs(np.subtract(values, TABLE_2[system]))))
        for rate, real, value, other in zip(
            TABLE_2_RATES, TABLE_2[system], ours["ablation"], ours["table_1"], strict=True
        ):
            note = f"with table 1's limits {other:.1f}"
            rows.append(Row(f"Table 2, {system}, {rate} req/s, real", real, value, "%", 5.0, "absolute", note))
        setup.say(f"table 2, {system}: {errors[f'{system} ablation']:.1f} points off in the mean")
    late = late_alone(model, ABLATION_SLO, lengths)
    rows.append(
        Row(
            "Table 2, mean absolute error, limits of the ablation (0.4 s, 0.1 s)",
            0.0,
            float(np.mean([errors[f"{system} ablation"] for system in bench.SYSTEMS])),
            "points",
            5.0,
            "absolute",
            "the paper names no limits here, and with table 1's it contradicts figure 8 (vLLM at 1.5 req/s: 65.5 and "
            f"88 %). With vLLM's constants {late:.0%} of these prompts alone take longer than 0.4 s, so that its 97 % "
            "at 1 req/s cannot come out: their sample must have been shorter",
        )
    )
    return rows, {"table_2_mean_abs_error_points": errors}


def late_alone(model: bench.Model, slo: SLO, lengths: bench.Lengths) -> float:
    """The share of prompts that miss the TTFT limit even where they have vLLM's instance for themselves."""
    spec = bench.evaluated(model, "vllm").specs[0]
    latency = bench.named(model.name, "vllm", model.vllm).latency
    late = [1e3 * latency.prefill_s(spec, prompt) > (slo.ttft_ms or np.inf) for prompt, _ in lengths]
    return float(np.mean(late))
