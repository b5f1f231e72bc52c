"""Pictures of runs: `Report`s by name enter, PNG files leave. Called by `pdjax.report.write`; needs matplotlib.

One colour means one thing in all pictures: prefill is orange, decode blue, an iteration of both purple, KV on its way
green, and red is what a user waits for.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pdjax import metrics
from pdjax.record import IterationRecord, RequestRecord
from pdjax.report import Report, instance_name
from pdjax.request import State

PREFILL, DECODE, MIXED, TRANSFER, STALL, FLIP = "#e8892b", "#7fb2dd", "#8a5fb5", "#3a9b5c", "#c8322b", "#1d1f23"
GREY, GRID = "#5f6670", "#e6e8eb"
STALL_FACTOR = 3.0
"""A gap between two tokens is drawn as a wait when it is this many times the median gap of all runs."""

LEGEND = {
    PREFILL: "prefill",
    DECODE: "decode",
    MIXED: "both in one pass",
    TRANSFER: "KV moving",
    FLIP: "role flip: asked for, done at the bar",
    STALL: f"answers that wait for a token over {STALL_FACTOR:g} x the usual time",
}

Span = tuple[float, float]
Metric = Callable[[RequestRecord], float | None]


def latency_by_run(runs: Mapping[str, Report], path: Path) -> None:
    """TTFT, TPOT and the longest gap of every request, one dot each and one column per run; bars mark P50 and P95."""
    panels: tuple[tuple[str, Metric], ...] = (
        ("TTFT: ms to the first token", metrics.ttft_ms),
        ("TPOT: ms per token after it", metrics.tpot_ms),
        ("Longest wait for a token, ms", lambda record: max(metrics.itl_ms(record), default=None)),
    )
    figure = canvas(4.0 * len(panels), 4.2)
    for index, (title, metric) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        for column, report in enumerate(runs.values()):
            done = [record for record in report.records if record.state is State.FINISHED]
            _column(axes, column, [value for record in done if (value := metric(record)) is not None])
        axes.set_xticks(range(len(runs)), list(runs))
        axes.set_xlim(-0.6, len(runs) - 0.4)
        axes.set_ylim(bottom=0)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        bare(axes)
    figure.supxlabel("each dot is a request; thick bar P50, thin bar P95", color=GREY, fontsize=9)
    figure.savefig(path)


def timeline(runs: Mapping[str, Report], path: Path) -> None:
    """What each instance did over time, one panel per run; a red lane shows how many answers stood still."""
    heights = [len(report.specs) + bool(report.transfers) + 1.2 for report in runs.values()]
    figure = canvas(13.0, 0.9 + sum(0.42 * height + 0.5 for height in heights))
    grid = figure.add_gridspec(len(runs), 1, height_ratios=heights)
    end_s = max(report.duration_s for report in runs.values())
    # One limit and one scale for all runs: the red lanes compare.
    gaps = [gap for report in runs.values() for record in report.records for gap in metrics.itl_ms(record)]
    limit_ms = STALL_FACTOR * metrics.percentile(gaps, 50) if gaps else 0.0
    waits = {run: stalls(report, limit_ms) for run, report in runs.items()}
    most = max(max(depths, default=0) for _, depths in waits.values())
    used: set[str] = set()
    for row, (run, report) in enumerate(runs.items()):
        axes = figure.add_subplot(grid[row])
        used |= lanes(axes, report)
        if most:
            wait_lane(axes, *waits[run], most)
            used.add(STALL)
        axes.set_xlim(0, end_s)
        axes.set_title(run, loc="left", fontsize=11, fontweight="bold")
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        bare(axes)
        if row < len(runs) - 1:
            axes.tick_params(labelbottom=False)
        else:
            axes.set_xlabel("seconds since the first arrival", color=GREY)
    handles = [Patch(color=colour, label=name) for colour, name in LEGEND.items() if colour in used]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path)


def stalls(report: Report, limit_ms: float) -> tuple[list[float], list[int]]:
    """How many answers are in a gap between two tokens that lasts over limit_ms: from times[i] on, counts[i] of them.

    Times are seconds since the first arrival.
    """
    edges = []
    for record in report.records:
        for early, late in itertools.pairwise(record.timeline.token_s):
            if 1e3 * (late - early) > limit_ms:
                edges += [(early - report.start_s, 1), (late - report.start_s, -1)]
    edges.sort()
    return [time for time, _ in edges], list(itertools.accumulate(step for _, step in edges))


def lanes(axes: Axes, report: Report) -> set[str]:
    """Draws what each instance of a run did over time, and returns the colours it used."""
    by_colour: dict[tuple[int, str], list[Span]] = {}
    for iteration in report.iterations:
        spans = by_colour.setdefault((iteration.instance, _colour(iteration)), [])
        spans.append((iteration.started_s - report.start_s, iteration.finished_s - iteration.started_s))
    for (instance, colour), spans in by_colour.items():
        axes.broken_barh(spans, (instance - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.4)
    used = {colour for _, colour in by_colour}
    labels = [instance_name(report, index) for index in range(len(report.specs))]
    if report.transfers:
        moves = [(t.started_s - report.start_s, t.finished_s - t.started_s) for t in report.transfers]
        axes.broken_barh(moves, (len(labels) - 0.3, 0.6), facecolors=TRANSFER, alpha=0.7)
        labels.append("KV transfers")
        used.add(TRANSFER)
    for flip in report.flips:
        asked_s, done_s = flip.started_s - report.start_s, flip.finished_s - report.start_s
        axes.plot([asked_s, done_s], [flip.instance] * 2, color=FLIP, linewidth=1.2)
        axes.plot([done_s] * 2, [flip.instance - 0.45, flip.instance + 0.45], color=FLIP, linewidth=2.4)
        used.add(FLIP)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    return used


def wait_lane(axes: Axes, times: Sequence[float], counts: Sequence[int], most: int) -> None:
    """Adds a red lane (of `stalls`) whose steps grow from the bottom to the top, which is `most`."""
    labels = [label.get_text() for label in axes.get_yticklabels()]
    lane = len(labels)
    bottom = lane + 0.4
    tops = [bottom - 0.8 * count / most for count in counts]
    axes.fill_between(times, bottom, tops, step="post", color=STALL, linewidth=0)
    axes.set_yticks(range(lane + 1), [*labels, f"answers waiting (top: {most})"])
    axes.set_ylim(lane + 0.6, -0.6)


def _column(axes: Axes, column: int, values: list[float]) -> None:
    if not values:
        return
    # Spread sideways by rank: the same picture every time, and equal values stay apart.
    order = sorted(range(len(values)), key=values.__getitem__)
    offsets = [0.0] * len(values)
    for rank, index in enumerate(order):
        offsets[index] = 0.22 * ((rank * 0.618) % 1.0 - 0.5)
    axes.scatter([column + offset for offset in offsets], values, s=22, color=DECODE, edgecolors="white", linewidth=0.5)
    for percent, width in ((50, 2.6), (95, 1.0)):
        value = metrics.percentile(values, percent)
        axes.hlines(value, column - 0.25, column + 0.25, color=GREY, linewidth=width)
        axes.annotate(f"{value:.0f}", (column + 0.28, value), va="center", fontsize=8, color=GREY)


def _colour(iteration: IterationRecord) -> str:
    if not iteration.rows:
        return PREFILL
    return MIXED if iteration.chunk_tokens else DECODE


def canvas(width: float, height: float) -> Figure:
    """An empty picture of so many inches."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # no global state of pyplot, no display
    return figure


def bare(axes: Axes) -> None:
    """Takes away what says nothing: most of the frame, and ticks."""
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, labelsize=9, labelcolor="#30353b")
