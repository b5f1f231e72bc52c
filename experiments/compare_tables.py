"""What `compare` found, for people and for summary.json: a sweep enters, dicts and tables leave."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from pdjax.experiments.sweep import Sweep

COLOCATED = ("colocated", "colocated_chunked")
COMPARED = (*COLOCATED, "disaggregated", "dynamic")
AWARE = ("dynamic",)  # of limits on TTFT and TPOT: the others are played once and judged by all
RATIOS = ("disaggregated_over_colocated", "dynamic_over_best")


def static(sweep: Sweep) -> list[str]:
    """The schedulers that do not choose between colocation and disaggregation."""
    return [scheduler for scheduler in sweep.schedulers if scheduler != "dynamic"]


def ratios(sweep: Sweep) -> dict[str, dict[str, Any]]:
    """`goodput_ratio` of summary.json: for every point, ratios with their intervals, and of whom; those that there are
    runs for."""
    found: dict[str, dict[str, Any]] = {}
    for name in sweep.points:
        found[name] = {}
        colocated = [scheduler for scheduler in sweep.schedulers if scheduler in COLOCATED]
        for key, over, under in (
            ("disaggregated_over_colocated", "disaggregated", colocated),
            ("dynamic_over_best", "dynamic", static(sweep)),
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


def results(sweep: Sweep, kind: str, idle: Mapping[str, float]) -> dict[str, Any]:
    """Of one workload, for summary.json. `idle`: what the limits are multiples of."""
    return {
        "workload": kind,
        "idle": dict(idle),
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
    for key in RATIOS:
        cells = []
        for found_ratio in found_ratios.values():
            if key in found_ratio:
                low, high = found_ratio[f"{key}_interval"]
                cells.append(f"{_SIGNS[found_ratio[f'{key}_bound']]}{found_ratio[key]:.2f} ({low:.2f} to {high:.2f})")
        if cells:
            table.add_row(key.replace("_", " "), *cells)
    return table


_SIGNS = {"": "", "at least": ">= ", "at most": "<= ", "unknown": "? "}
