"""Pictures of comparisons: summaries as `pdjax.experiments.compare` and `switch` write them enter, PNG files leave.
Called by these launchers; needs matplotlib.

A scheduler has one colour in all of them. Whiskers are the intervals of `pdjax.goodput`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from pdjax.metrics import ATTAINMENT
from pdjax.plots import DECODE, GREY, GRID, MIXED, PREFILL, bare, canvas

COLOURS = {
    "colocated": "#aab0b8",
    "colocated_chunked": "#5f6670",
    "disaggregated": "#2274b5",
    "splitwise": "#e0a100",
    "dynamic": "#c2306b",
}
OTHER = "#3a9b5c"  # a scheduler without a colour of its own

Summary = Mapping[str, Any]


def compare(summary: Summary, path: Path) -> None:
    """Attainment against rate, a panel for each point of the SLO; below, throughput against rate, goodputs, and
    attainment against the scale of the limits."""
    points, schedulers = list(summary["goodput"]), list(next(iter(summary["goodput"].values())))
    figure = canvas(4.6 * len(points), 7.6)
    grid = figure.add_gridspec(2, len(points))
    for column, point in enumerate(points):
        axes = figure.add_subplot(grid[0, column])
        _attainment(axes, summary, point, schedulers)
        axes.set_ylabel("requests that keep both limits" if column == 0 else "")
    lower = grid[1, :].subgridspec(1, 3)
    _throughput(figure.add_subplot(lower[0]), summary, schedulers)
    _bars(figure.add_subplot(lower[1]), summary, schedulers)
    _scales(figure.add_subplot(lower[2]), summary, schedulers)
    handles = [Patch(color=colour(who), label=who.replace("_", ", ")) for who in schedulers]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=10)
    how = "in virtual time" if summary["simulated"] else "measured"
    figure.suptitle(f"{summary['workload']}, {how}", x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.savefig(path)


def switch(summary: Summary, path: Path) -> None:
    """Attainment over time of every system, with the phases of the workload; below, the roles of the instances of
    `dynamic`, and the flips between them."""
    figure = canvas(12.0, 6.0)
    roles = summary["runs"]["dynamic"]["roles"]
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4.2, 0.5 + 0.42 * len(roles)))
    for index, (name, run) in enumerate(summary["runs"].items()):
        who = name.split()[0]
        dashes = "--" if index > 1 and who == "disaggregated" else "-"  # another split of the instances
        label = f"{name}: {run['attainment']:.0%}"
        width = 2.4 if who == "dynamic" else 1.6
        upper.plot(
            *zip(*run["over_time"], strict=True), color=colour(who), linestyle=dashes, linewidth=width, label=label
        )
    _shares(upper)
    upper.set_ylabel("requests that keep both limits")
    for phase in summary["phases"]:
        for axes in (upper, lower):
            axes.axvline(phase["start_s"], color=GREY, linewidth=0.8, linestyle=":")
        upper.annotate(
            phase["kind"], (phase["start_s"], 1.04), (4, 2), textcoords="offset points", fontsize=9, color=GREY,
            annotation_clip=False,
        )  # fmt: skip
    upper.grid(axis="y", color=GRID, linewidth=0.8)
    bare(upper)
    end_s = max(run["over_time"][-1][0] for run in summary["runs"].values())
    _roles(lower, roles, summary["flips"], end_s)
    upper.set_xlim(0, end_s)
    handles, labels = upper.get_legend_handles_labels()
    handles += [Patch(color=ROLES[role], label=role) for role in dict.fromkeys(_all_roles(roles, summary["flips"]))]
    labels += [f"{role} instance" for role in dict.fromkeys(_all_roles(roles, summary["flips"]))]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    how = "in virtual time" if summary["simulated"] else "measured"
    ratio = summary["dynamic_over_best_static"]
    words = "" if ratio is None else f": dynamic keeps {ratio:.2f} x as many as {summary['best_static']}"
    figure.suptitle(f"A mix that moves, {how}{words}", x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.savefig(path)


ROLES = {"prefill": PREFILL, "decode": DECODE, "mixed": MIXED}


def _all_roles(roles: Sequence[str], flips: Sequence[Mapping[str, Any]]) -> list[str]:
    return [*roles, *(flip["to"] for flip in flips)]


def _roles(axes: Axes, roles: Sequence[str], flips: Sequence[Mapping[str, Any]], end_s: float) -> None:
    """A lane per instance in the colour of its role; hatched while it changes."""
    for index, role in enumerate(roles):
        since_s, now = 0.0, role
        for flip in [flip for flip in flips if flip["instance"] == index]:
            axes.broken_barh([(since_s, flip["start_s"] - since_s)], (index - 0.35, 0.7), facecolors=ROLES[now])
            span = (flip["start_s"], flip["seconds"])
            axes.broken_barh([span], (index - 0.35, 0.7), facecolors=ROLES[now], hatch="////", edgecolor="white")
            axes.vlines(flip["start_s"] + flip["seconds"], index - 0.42, index + 0.42, color="#30353b", linewidth=1.4)
            since_s, now = flip["start_s"] + flip["seconds"], flip["to"]
        axes.broken_barh([(since_s, end_s - since_s)], (index - 0.35, 0.7), facecolors=ROLES[now])
    axes.set_yticks(range(len(roles)), [f"dynamic, instance {index}" for index in range(len(roles))])
    axes.set_ylim(len(roles) - 0.4, -0.6)
    axes.set_xlabel("arrival, seconds after the first")
    bare(axes)


def colour(scheduler: str) -> str:
    return COLOURS.get(scheduler, OTHER)


def _attainment(axes: Axes, summary: Summary, point: str, schedulers: Sequence[str]) -> None:
    for who in schedulers:
        runs = [
            (run["rate"], run["attainment"][point])
            for run in summary["points"]
            if run["scheduler"] == who and run["scale"] == 1 and point in run["attainment"]
        ]
        rates, shares = [rate for rate, _ in runs], [share for _, share in runs]
        axes.scatter(rates, shares, s=14, color=colour(who), alpha=0.45, linewidth=0)
        axes.plot(*_means(runs), color=colour(who), linewidth=1.8)
        goodput = summary["goodput"][point][who]
        if not goodput["bound"]:
            axes.plot([goodput["value"]], [ATTAINMENT], "o", color=colour(who), markeredgecolor="white", markersize=8)
    axes.axhline(ATTAINMENT, color=GREY, linewidth=0.8, linestyle=":")
    _shares(axes)
    axes.set_xscale("log")
    _plain_ticks(axes)
    axes.set_xlabel("requests/s")
    slo = summary["slo"][point]
    limits = f"TTFT {slo['ttft_ms'] / 1e3:.3g} s, TPOT {slo['tpot_ms']:.0f} ms"
    _title(axes, f"{_words(point)}: {limits}")


def _throughput(axes: Axes, summary: Summary, schedulers: Sequence[str]) -> None:
    for who in schedulers:
        runs = [run for run in summary["points"] if run["scheduler"] == who and run["scale"] == 1]
        axes.plot(
            *_means([(run["rate"], run["output_tokens_per_s"]) for run in runs]), color=colour(who), linewidth=1.8
        )
    axes.set_ylim(bottom=0)
    axes.set_xscale("log")
    _plain_ticks(axes)
    axes.set_xlabel("requests/s")
    axes.set_ylabel("output tokens/s")
    _title(axes, "Throughput, limits kept or not")


def _bars(axes: Axes, summary: Summary, schedulers: Sequence[str]) -> None:
    width = 0.8 / len(schedulers)
    for place, (point, goodputs) in enumerate(summary["goodput"].items()):
        for index, who in enumerate(schedulers):
            found = goodputs[who]
            at = place + (index - (len(schedulers) - 1) / 2) * width
            axes.bar(at, found["value"], 0.92 * width, color=colour(who))
            axes.vlines(at, found["low"], found["high"], color="#30353b", linewidth=1.0)
        ratio = summary["goodput_ratio"][point].get("dynamic_over_best")
        top = max(min(found["high"], 1.3 * found["value"]) for found in goodputs.values())
        if ratio is not None:
            axes.annotate(
                f"dynamic {ratio:.2f} x the best", (place, top), (0, 5), textcoords="offset points", ha="center",
                fontsize=8, color=GREY,
            )  # fmt: skip
    values = [found["value"] for goodputs in summary["goodput"].values() for found in goodputs.values()]
    axes.set_ylim(0, 1.6 * max(values))  # whiskers of few seeds are long: they may be cut
    axes.set_xticks(range(len(summary["goodput"])), [_words(point) for point in summary["goodput"]])
    axes.set_ylabel("requests/s")
    _title(axes, f"Goodput: the rate at which {ATTAINMENT:.0%} keep both")


def _scales(axes: Axes, summary: Summary, schedulers: Sequence[str]) -> None:
    entries = summary["scales"]
    point = "balanced" if any(entry["slo"] == "balanced" for entry in entries) else None
    shown = [entry for entry in entries if point in (None, entry["slo"])]
    for who in schedulers:
        line = [(entry["scale"], entry["attainment"][who]) for entry in shown if who in entry["attainment"]]
        axes.plot(*_means(line), color=colour(who), linewidth=1.8, marker="o", markersize=4)
    axes.axhline(ATTAINMENT, color=GREY, linewidth=0.8, linestyle=":")
    _shares(axes)
    axes.set_xlabel("limits, times those of the point")
    if shown:
        how = ", in virtual time" if shown[0]["simulated"] and not summary["simulated"] else ""
        _title(axes, f"{_words(shown[0]['slo'])} at {shown[0]['rate']:.3g} requests/s{how}")


def _means(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """x, ascending, and the mean of y at each."""
    by_x: dict[float, list[float]] = {}
    for x, y in sorted(pairs):
        by_x.setdefault(x, []).append(y)
    return list(by_x), [sum(values) / len(values) for values in by_x.values()]


def _shares(axes: Axes) -> None:
    axes.set_ylim(0, 1.04)
    axes.set_yticks([0, 0.25, 0.5, 0.75, ATTAINMENT, 1], ["0", "25 %", "50 %", "75 %", f"{100 * ATTAINMENT:.0f} %", ""])


def _plain_ticks(axes: Axes) -> None:
    """Rates as people write them, in place of powers of ten."""
    low, high = axes.get_xlim()
    steps = [step * 10.0**power for power in range(-4, 5) for step in (1, 2, 5)]
    shown = [step for step in steps if low <= step <= high]
    axes.set_xticks(shown, [f"{step:g}" for step in shown])
    axes.set_xticks([], minor=True)


def _words(point: str) -> str:
    """ "tight_tpot" as people write it."""
    return point.replace("_", " ").replace("tpot", "TPOT").replace("ttft", "TTFT")


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10, fontweight="bold")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    bare(axes)
