"""What users see of interference: gaps between tokens and runs enter, one PNG leaves. Called by
`pdjax.experiments.interference`; needs matplotlib. Colours are those of `pdjax.plots`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from pdjax import metrics
from pdjax.plots import DECODE, GREY, GRID, LEGEND, STALL, STALL_FACTOR, Span, bare, canvas, lanes, stalls, wait_lane
from pdjax.report import Report


def interference(
    gaps_ms: Mapping[str, Sequence[float]],
    runs: Mapping[str, Report],
    spans: Mapping[str, Span],
    title: str,
    path: Path,
) -> None:
    """Every gap between two tokens as a dot, one row per name; below, a strip of the timeline of some runs.

    Args:
        gaps_ms: by name, at least one each; the first is what the others are compared with. Gaps over STALL_FACTOR
            times its median are red, here and in the strips.
        runs: of which strips are drawn, by name.
        spans: seconds since a run's first arrival at which its strip begins and ends.
        title: what was measured.
        path: of the file.
    """
    heights = [0.62 * len(gaps_ms) + 0.5, *(0.38 * (len(report.specs) + 2.2) for report in runs.values())]
    figure = canvas(13.0, 1.2 + sum(heights) + 0.35 * len(heights))
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    limit_ms = STALL_FACTOR * metrics.percentile(next(iter(gaps_ms.values())), 50)
    _dots(figure.add_subplot(grid[0]), gaps_ms, limit_ms)
    waits = {name: stalls(report, limit_ms) for name, report in runs.items()}
    most = max((max(counts, default=0) for _, counts in waits.values()), default=0)
    used = {STALL}
    for row, (name, report) in enumerate(runs.items()):
        axes = figure.add_subplot(grid[row + 1])
        used |= lanes(axes, report)
        if most:
            wait_lane(axes, *waits[name], most)
        axes.set_xlim(*spans[name])
        axes.set_title(name, loc="left", fontsize=10, fontweight="bold")
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        bare(axes)
    if runs:
        axes.set_xlabel("seconds since the first arrival", color=GREY)
    handles = [Patch(color=colour, label=words) for colour, words in LEGEND.items() if colour in used]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path)


def _dots(axes: Axes, gaps_ms: Mapping[str, Sequence[float]], limit_ms: float) -> None:
    base_ms = metrics.percentile(next(iter(gaps_ms.values())), 95)
    for row, gaps in enumerate(gaps_ms.values()):
        # Spread by number: the same picture every time.
        heights = [row + 0.56 * ((number * 0.618034) % 1.0 - 0.5) for number in range(len(gaps))]
        colours = [STALL if gap > limit_ms else DECODE for gap in gaps]
        axes.scatter(gaps, heights, s=9, c=colours, alpha=0.6, linewidth=0)
        for percent, width in ((50, 2.6), (95, 1.2)):
            axes.vlines(metrics.percentile(gaps, percent), row - 0.36, row + 0.36, color=GREY, linewidth=width)
        p95_ms = metrics.percentile(gaps, 95)
        words = f"P95 {p95_ms:.0f} ms" + (f", {p95_ms / base_ms:.1f} x" if row else "")
        axes.annotate(words, (1.005, row), xycoords=("axes fraction", "data"), va="center", fontsize=9, color=GREY)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(gaps_ms)), list(gaps_ms))
    axes.set_ylim(len(gaps_ms) - 0.4, -0.6)
    axes.set_xlabel("ms between two tokens of an answer; thick bar P50, thin bar P95", color=GREY)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    bare(axes)
