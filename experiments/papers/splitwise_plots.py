"""The picture of Splitwise's clusters: what searches found enters, a PNG file leaves. Called by
`pdjax.experiments.papers.splitwise`; needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from pdjax.experiments.papers.splitwise_clusters import LIMITS, Found
from pdjax.plots import GREY, GRID, bare, canvas

COLOURS = {
    "Baseline-A100": "#aab0b8",
    "Baseline-H100": "#5f6670",
    "AA": "#7fb2dd",
    "HH": "#2274b5",
    "HA": "#e0a100",
    "HHcap": "#c2306b",
}
HATCHES = ("", "///")
WORDS = {"TTFT": "time to first token", "TBT": "time between tokens"}


def draw(found: Mapping[str, Sequence[Found]], published: Mapping[str, tuple[float, float | None]], path: Path) -> None:
    """Bars of highest rates, one for each engine, with the authors' as a mark; below, slowdowns against the rate.

    Args:
        found: by engine, in the order of the bars; the first is the one whose slowdowns are shown.
        published: by cluster, the highest rate that keeps all limits, and the lowest that does not.
        path: of the picture.
    """
    figure = canvas(11.0, 7.6)
    grid = figure.add_gridspec(2, 2)
    _bars(figure.add_subplot(grid[0, :]), found, published)
    for column, name in enumerate(WORDS):
        _slowdowns(figure.add_subplot(grid[1, column]), next(iter(found.values())), name)
    figure.suptitle("Splitwise's clusters of equal power, conversations", x=0.01, ha="left", fontweight="bold")
    figure.savefig(path)


def _bars(
    axes: Axes, found: Mapping[str, Sequence[Found]], published: Mapping[str, tuple[float, float | None]]
) -> None:
    names = [one.design.name for one in next(iter(found.values()))]
    width = 0.8 / len(found)
    for index, (engine, hatch) in enumerate(zip(found, HATCHES, strict=False)):
        for one in found[engine]:
            at = names.index(one.design.name) + (index - (len(found) - 1) / 2) * width
            axes.bar(at, one.rate, width, color=COLOURS[one.design.name], hatch=hatch, edgecolor="white")
            axes.annotate(f"{one.rate:.0f}", (at, one.rate), ha="center", va="bottom", fontsize=9)
    for at, name in enumerate(names):
        kept, broken = published[name]
        axes.plot((at - 0.45, at + 0.45), (kept, kept), color="black", linewidth=1.2)
        if broken is not None:
            axes.plot((at, at), (kept, broken), color="black", linewidth=0.8)
    titles = [one.design.title for one in next(iter(found.values()))]
    axes.set_xticks(range(len(names)), titles)
    axes.set_ylabel("req/s that keep all nine limits")
    axes.set_title(
        "plain: steps as in the authors' simulator; hatched: as measured by batch size; black: the authors' simulator",
        loc="left", fontsize=9, color=GREY,
    )  # fmt: skip
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    bare(axes)


def _slowdowns(axes: Axes, found: Sequence[Found], name: str) -> None:
    """P90 of a slowdown against the rate, and its limit."""
    for one in found:
        points = [(rate, slowdowns[name, 90]) for rate, slowdowns in one.runs]
        axes.plot(*zip(*points, strict=True), "o-", markersize=3, color=COLOURS[one.design.name], label=one.design.name)
    axes.axhline(LIMITS[name, 90], color=GREY, linestyle="--", linewidth=1)
    axes.set_ylim(0, 3 * LIMITS[name, 90])
    axes.set_xlabel("req/s")
    axes.set_title(f"P90 of {WORDS[name]} / alone on DGX-A100; dashed: limit", loc="left", fontsize=10)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.legend(frameon=False, fontsize=8)
    bare(axes)
