"""A picture of figure 8: published points and our curves enter, a PNG file leaves. Called by `reproduce`; needs
matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from pdjax.experiments.papers.distserve_bench import MODELS, SYSTEMS
from pdjax.metrics import ATTAINMENT
from pdjax.plots import GREY, GRID, bare, canvas
from pdjax.plots_goodput import COLOURS

COLOUR = {"distserve": COLOURS["disaggregated"], "vllm": COLOURS["colocated_chunked"]}
NAME = {"distserve": "DistServe", "vllm": "vLLM"}
KINDS = {"rate": "requests/s per GPU", "slo_scale": "limits, times those of the paper"}

Entry = Mapping[str, Any]  # of `fig8_points`


def draw(summary: Mapping[str, Any], path: Path) -> None:
    """A row for each model; attainment against rate, and against the scale of the limits."""
    figure = canvas(11.0, 7.2)
    panels = figure.subplots(len(MODELS), len(KINDS), sharey=True)
    for row, model in enumerate(MODELS):
        for column, kind in enumerate(KINDS):
            axes = panels[row, column]
            for system in SYSTEMS:
                shown = [
                    point
                    for point in summary["fig8_points"]
                    if (point["model"], point["system"], point["kind"]) == (model.name, system, kind)
                ]
                _series(axes, system, sorted(shown, key=lambda point: float(point["x"])))
            limits = f"{model.slo.ttft_ms or 0:.0f} and {model.slo.tpot_ms or 0:.0f} ms"
            _frame(axes, f"{model.name.upper()}, TTFT and TPOT within {limits}" if column == 0 else "", KINDS[kind])
            if kind == "slo_scale":
                axes.invert_xaxis()  # as in the paper: stricter to the right
    panels[0, 0].set_ylabel("requests that keep both limits")
    panels[1, 0].set_ylabel("requests that keep both limits")
    error = summary["fig8_mean_abs_error_points"]
    figure.suptitle(
        f"DistServe's figure 8 from its authors' pass times: {error:.1f} points off in the mean, nothing fitted",
        x=0.01, ha="left", fontsize=12, fontweight="bold",
    )  # fmt: skip
    note = "dots: published, measured on A100; lines: pdjax, mean of simulated runs; shade: standard deviation of a run"
    figure.supxlabel(note, color=GREY, fontsize=9)
    figure.savefig(path)


def _series(axes: Axes, system: str, points: Sequence[Entry]) -> None:
    if not points:
        return
    xs, ours = [point["x"] for point in points], [point["ours"] for point in points]
    low = [max(0.0, point["ours"] - point["spread"]) for point in points]
    high = [min(100.0, point["ours"] + point["spread"]) for point in points]
    axes.fill_between(xs, low, high, color=COLOUR[system], alpha=0.15, linewidth=0)
    axes.plot(xs, ours, color=COLOUR[system], linewidth=2.0)
    axes.scatter(
        xs, [point["attainment"] for point in points], s=34, color=COLOUR[system], edgecolors="white", zorder=3
    )
    at = len(points) // 2
    below = system == "vllm"
    axes.annotate(
        NAME[system], (xs[at], min(ours[at], points[at]["attainment"]) if below else 100.0), (0, -16 if below else 4),
        textcoords="offset points", ha="right" if below else "center", color=COLOUR[system], fontsize=10,
        fontweight="bold",
    )  # fmt: skip


def _frame(axes: Axes, title: str, x: str) -> None:
    axes.axhline(100 * ATTAINMENT, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_ylim(0, 108)
    axes.set_yticks([0, 25, 50, 75, 100 * ATTAINMENT], ["0", "25 %", "50 %", "75 %", f"{100 * ATTAINMENT:.0f} %"])
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(x)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    bare(axes)
