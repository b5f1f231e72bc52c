"""The picture of `taichi`: goodput and attainment of three modes for each pair of limits. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pdjax.plots import DECODE, FLIP, GREY, GRID, MIXED, PREFILL, bare, canvas

COLOURS = {"aggregated": PREFILL, "disaggregated": DECODE, "dynamic": MIXED}


class Bars(NamedTuple):
    """Of one pair of limits, by mode: goodput in requests per second, attainment at dynamic's goodput in percent, and
    the published attainment."""

    name: str
    goodput: dict[str, float]
    attainment: dict[str, float]
    published: dict[str, float]


def bars(regimes: Sequence[Bars], path: Path) -> None:
    """One panel for goodput, one for attainment."""
    figure = canvas(11.0, 4.6)
    panels = (
        ("Goodput, requests per second", [one.goodput for one in regimes], "{:.2f}"),
        ("Attainment at dynamic's goodput, %", [one.attainment for one in regimes], "{:.0f}"),
    )
    for panel, (title, groups, form) in enumerate(panels):
        axes = figure.add_subplot(1, 2, panel + 1)
        for group, values in enumerate(groups):
            for place, (mode, colour) in enumerate(COLOURS.items()):
                at = group + 0.27 * (place - 1)
                axes.bar(at, values[mode], 0.25, color=colour, label=None if group or panel else mode)
                text = form.format(values[mode])
                axes.annotate(text, (at, values[mode]), ha="center", va="bottom", fontsize=7, color=GREY)
        axes.set_xticks(range(len(regimes)), [one.name.replace(" (", "\n(") for one in regimes])
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        bare(axes)
    for group, one in enumerate(regimes):
        for place, mode in enumerate(COLOURS):
            if mode in one.published:
                at = group + 0.27 * (place - 1)
                axes.hlines(one.published[mode], at - 0.125, at + 0.125, color=FLIP, linewidth=1.6)
    figure.legend(loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    figure.supxlabel("black lines: published attainment (TaiChi, Table 2), at its own load", color=GREY, fontsize=8)
    figure.savefig(path)
