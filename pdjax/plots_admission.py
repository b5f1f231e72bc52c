"""Pictures of admission: a summary as `pdjax.experiments.admission` writes it enters, a PNG file leaves. Called by that
launcher; needs matplotlib."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.ticker import PercentFormatter

from pdjax.metrics import ATTAINMENT
from pdjax.plots import GREY, GRID, bare, canvas

COLOURS = {"without": "#aab0b8", "admission": "#c2306b"}


def overload(summary: Mapping[str, Any], path: Path) -> None:
    """Goodput against the rate, with and without admission; beside it, the shares of all requests and of the admitted
    that keep their limits."""
    figure = canvas(11.0, 4.4)
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        bare(axes)
        axes.grid(axis="y", color=GRID)
        axes.axvline(1, color=GREY, lw=1, ls=":")
        axes.set_xlabel("rate, multiples of the sustainable one", fontsize=10)
    for mode, colour in COLOURS.items():
        points = [point for point in summary["points"] if point["mode"] == mode]
        times = [point["times_sustainable"] for point in points]
        left.plot(times, [point["goodput_rps"] for point in points], color=colour, lw=2.4, marker="o", label=mode)
        right.plot(
            times, [point["slo_attainment"] for point in points], color=colour, lw=1.6, ls="--", label=f"{mode}, of all"
        )
        if mode == "admission":
            admitted = [point["admitted_attainment"] for point in points]
            right.plot(times, admitted, color=colour, lw=2.4, marker="o", label="admission, of the admitted")
    left.set_ylim(bottom=0)
    left.set_ylabel("goodput, requests/s", fontsize=10)
    right.set_ylim(0, 1.03)
    right.axhline(ATTAINMENT, color=GREY, lw=1)
    right.yaxis.set_major_formatter(PercentFormatter(1))
    right.set_ylabel("keep their limits", fontsize=10)
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=9)
    title = f"{summary['scheduler'].replace('_', ', ')}, {summary['workload']}, {summary['how']}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.savefig(path)
