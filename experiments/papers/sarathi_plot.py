"""The picture of `sarathi`: what the token budget does to stalls and to the first token. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pdjax.experiments.papers.sarathi_systems import WHOLE, Times
from pdjax.plots import DECODE, GREY, GRID, PREFILL, bare, canvas

TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20)  # seconds


def by_tau(curves: Mapping[str, Sequence[tuple[int, Times]]], path: Path) -> None:
    """P99 of the time between tokens and P50 of the time to the first token over tau, a line per workload."""
    figure = canvas(9.6, 4.0)
    panels = (("Time between tokens, P99, s", "tbt_p99_s"), ("Time to first token, P50, s", "ttft_p50_s"))
    for panel, (title, field) in enumerate(panels):
        axes = figure.add_subplot(1, 2, panel + 1)
        for (name, points), colour in zip(curves.items(), (DECODE, PREFILL), strict=True):
            taus, values = [tau for tau, _ in points], [getattr(times, field) for _, times in points]
            axes.plot(taus, values, color=colour, marker="o", markersize=4, linewidth=1.6)
            axes.annotate(
                name, (taus[-1], values[-1]), xytext=(0, 8), textcoords="offset points", ha="right", fontsize=8
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(taus, ["whole" if tau == WHOLE else str(tau) for tau in taus])
        low, high = axes.get_ylim()
        ticks = [tick for tick in TICKS if low <= tick <= high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.set_xlabel("tokens of a pass (tau)", fontsize=9, color=GREY)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        bare(axes)
    figure.savefig(path)
