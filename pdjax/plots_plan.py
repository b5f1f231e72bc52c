"""The picture of a plan: a `pdjax.planning.planner.Plan` enters, a PNG file leaves. Called by `pdjax.experiments.plan`;
needs matplotlib.

A scheduler has the colour that it has in the pictures of comparisons.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from pdjax.planning.planner import Candidate, Plan
from pdjax.plots import GREY, GRID, bare, canvas
from pdjax.plots_goodput import COLOURS

SHOWN = 12  # candidates


def plan(found: Plan, title: str, path: Path) -> None:
    """Goodput per device of the candidates, best first; beside it that of every P:D split, as a line what is expected
    of the instances and as dots what was played."""
    shown = found.candidates[:SHOWN]
    figure = canvas(13.0, 1.6 + 0.42 * max(len(shown), 8))
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _bars(left, shown)
    _splits(right, found)
    policies = dict.fromkeys(one.policy for one in shown)
    handles = [Patch(color=COLOURS[name], label=name.replace("_", ", ")) for name in policies]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=10)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.savefig(path)


def _bars(axes: Axes, shown: tuple[Candidate, ...]) -> None:
    best = shown[0].per_device
    for row, one in enumerate(shown):
        axes.barh(row, one.per_device, color=COLOURS[one.policy], height=0.7)
        inside = one.per_device > 0.5 * max(candidate.per_device for candidate in shown)
        axes.annotate(
            f"{one.per_device:.3g}  {one.bottleneck}",
            (one.per_device, row),
            (-4 if inside else 4, 0),
            textcoords="offset points",
            ha="right" if inside else "left",
            va="center",
            fontsize=9,
            color="white" if inside else GREY,
        )
    axes.axvline(best, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(shown)), [one.cluster for one in shown], fontsize=9)
    axes.invert_yaxis()
    axes.set_title("goodput per device, requests/s", loc="left", fontsize=11, fontweight="bold")
    bare(axes)


def _splits(axes: Axes, found: Plan) -> None:
    axes.set_title("P:D splits: dots played, line expected", loc="left", fontsize=11, fontweight="bold")
    shares = [one.prefill / (one.prefill + one.decode) for one in found.splits]
    colour = COLOURS["disaggregated"]
    axes.plot(shares, [one.estimate for one in found.splits], color=colour, linewidth=1.6, alpha=0.5)
    for share, one in zip(shares, found.splits, strict=True):
        if one.goodput is not None:
            axes.plot([share], [one.goodput], "o", color=colour)
            axes.annotate(
                f"{one.prefill}:{one.decode}", (share, one.goodput), (5, 3), textcoords="offset points", fontsize=9
            )
    whole = max((one.goodput for one in found.candidates if one.policy.startswith("colocated")), default=None)
    if whole is not None:
        axes.axhline(whole, color=COLOURS["colocated_chunked"], linewidth=1.4)
        axes.annotate("best colocated", (1, whole), (0, 3), textcoords="offset points", ha="right", fontsize=9)
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("share of the instances that prefill", color=GREY)
    axes.set_ylabel("requests/s")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    bare(axes)
