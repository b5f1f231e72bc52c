"""Pictures of what is computed and not measured: costs and ratios enter, PNG files leave. Called by `kv_cost` and
`ratio`; without matplotlib a warning takes the picture's place.
"""

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdjax.kv_cost import Cost, Job, Link
from pdjax.kv_cost import cost as cost_of
from pdjax.pd_ratio import Point

log = logging.getLogger("pdjax")
_STEPS = 200  # of a curve


def kv_cost(job: Job, costs: Sequence[Cost], efficiency: float, title: str, path: Path) -> None:
    """Transfer time of each link beside the prefill's, and what a user sees of it over the bandwidth."""
    if not _can_draw():
        return
    from pdjax.plots import GREY, GRID, PREFILL, STALL, TRANSFER, bare, canvas

    figure = canvas(12.0, 4.4)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    left, right = figure.subplots(1, 2)
    at = range(len(costs))
    whole, streamed = ([1e3 * seconds for seconds in each] for each in _times(costs))
    left.axvline(1e3 * job.prefill_s, color=PREFILL, linewidth=2, label=f"prefill, {1e3 * job.prefill_s:,.0f} ms")
    left.hlines(at, streamed, whole, color=GRID, linewidth=5)
    left.scatter(whole, at, s=60, color=TRANSFER, label="sent whole", zorder=3)
    left.scatter(streamed, at, s=60, color=STALL, label="left after the prefill when streamed", zorder=3)
    for index, (most, least) in enumerate(zip(whole, streamed, strict=True)):
        for value, side, shift in ((most, "left", 7), (least, "right", -7)):
            text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            left.annotate(
                text,
                (value, index),
                (shift, 0),
                textcoords="offset points",
                ha=side,
                va="center",
                fontsize=8,
                color=GREY,
            )
    left.margins(x=0.14)
    left.set_yticks(at, [one.link.name for one in costs])
    left.invert_yaxis()
    left.set_xscale("log")
    left.xaxis.set_major_formatter(_plain)
    left.set_xlabel("ms", color=GREY)
    low, high = (1e9 / 8 * gbits for gbits in (0.5 * costs[0].link.gbits, 2 * costs[-1].link.gbits))
    speeds = [low * (high / low) ** (step / _STEPS) for step in range(_STEPS + 1)]
    curve = [cost_of(job, Link("", speed * 8e-9, rdma=False)) for speed in speeds]
    gigabytes = [speed / 1e9 for speed in speeds]
    for seconds, colour, label in zip(_times(curve), (TRANSFER, STALL), ("sent whole", "streamed"), strict=True):
        percent = [100 * value / job.prefill_s for value in seconds]
        right.plot(gigabytes, percent, color=colour, linewidth=2, label=label)
    right.axvline(job.hiding_bytes_per_s / 1e9, color=GREY, linestyle=":", linewidth=1.5)
    right.annotate(
        f" all but the last group\n hidden from {job.hiding_bytes_per_s / 1e9:.3g} GB/s on",
        (job.hiding_bytes_per_s / 1e9, 0.97),
        xycoords=("data", "axes fraction"),
        va="top",
        fontsize=9,
        color=GREY,
    )
    for one in costs:
        speed = job.nbytes / one.whole_s / 1e9
        right.plot(speed, 100 * one.streamed_s / job.prefill_s, "o", color=STALL, markersize=5)
        point = (speed, 100 * one.streamed_s / job.prefill_s)
        right.annotate(f"{one.link.name} ", point, fontsize=7, color=GREY, rotation=35, va="top", ha="right")
    right.set_xscale("log")
    right.set_yscale("log")
    right.xaxis.set_major_formatter(_plain)
    right.yaxis.set_major_formatter(_plain)
    right.set_xlabel(f"GB/s (links at {efficiency:.0%} of their line rate)", color=GREY)
    right.set_ylabel("transfer that is left after the prefill,\n% of the prefill", color=GREY)
    right.margins(y=0.15)
    for axes in (left, right):
        axes.grid(axis="both" if axes is right else "x", color=GRID, linewidth=0.8)
        bare(axes)
    left.legend(frameon=False, fontsize=8, loc="upper left")
    right.legend(frameon=False, fontsize=9, loc="lower left")
    figure.savefig(path)


def _times(costs: Sequence[Cost]) -> tuple[list[float], list[float]]:
    return [one.whole_s for one in costs], [one.streamed_s for one in costs]


def _plain(value: float, position: int | None = None) -> str:
    """A tick of a logarithmic axis as people write it."""
    del position
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def ratio(points: Sequence[Point], usual: tuple[float, float], path: Path) -> None:
    """Decode instances per prefill instance over the decode batch; the usual range is shaded."""
    if not _can_draw():
        return
    from pdjax.plots import DECODE, GREY, GRID, TRANSFER, bare, canvas

    figure = canvas(8.0, 4.4)
    axes: Any = figure.add_subplot()
    rows, ratios = [one.rows for one in points], [one.decodes_per_prefill for one in points]
    axes.axhspan(*usual, color=TRANSFER, alpha=0.18, linewidth=0, label=f"1:{usual[1]:g} to 1:{usual[0]:g}")
    axes.plot(rows, ratios, color=DECODE, linewidth=2.5)
    for one in (points[0], points[-1]):
        axes.annotate(f" {one.text}", (one.rows, one.decodes_per_prefill), va="bottom", color=GREY)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [2**power for power in range(points[-1].rows.bit_length())]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.yaxis.set_major_formatter(_plain)
    axes.yaxis.set_minor_formatter("")
    axes.margins(x=0.07)
    axes.set_xlabel("rows of a decode batch, B_d", color=GREY)
    axes.set_ylabel("decode instances per prefill instance", color=GREY)
    axes.set_title("The decode batch sets the ratio of the pools", loc="left", fontsize=12, fontweight="bold")
    axes.grid(color=GRID, linewidth=0.8)
    bare(axes)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path)


def _can_draw() -> bool:
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no picture: matplotlib is not installed (pip install pdjax[plot])")
        return False
    return True
