"""What `pdjax.experiments.transfer` shows: outcomes of jobs, as in summary.json's `links`, enter; tables and a picture
leave.
"""

import importlib.util
import logging
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from pdjax.experiments.links import WORDS

Outcome = Mapping[str, Any]
NOTE = (
    "Raw: plain MPI, the same bytes between the same ranks in the same job. Wire: the time in which KV was on its way "
    "into the staging ring. Arrival: from its first byte's departure until the whole is in the pages. Visible: from "
    "the first to the second token, beyond a decode step. Hidden: 1 - visible / (visible of a whole prompt - wire time "
    "of the last group)."
)
log = logging.getLogger("pdjax")


def bandwidth(outcomes: Sequence[Outcome]) -> Table:
    """Three rows per link: plain MPI, and the KV of the longest prompt on the wire and in the pages."""
    table = Table(title="KV of the longest prompt, sent whole")
    for name in ("link", "", "MB", "ms", "GB/s", "of raw"):
        table.add_column(name, justify="right" if name not in ("link", "") else "left")
    for outcome in outcomes:
        moved = moves(outcome)
        raw_bytes, raw_s = moved["raw"]
        for name, (nbytes, seconds) in moved.items():
            share = nbytes / seconds / (raw_bytes / raw_s)
            speed = f"{nbytes / seconds / 1e9:.3f}"
            table.add_row(words(outcome), name, f"{nbytes / 1e6:.1f}", _ms(seconds), speed, f"{share:.2f}")
        table.add_section()
    return table


def moves(outcome: Outcome) -> dict[str, tuple[int, float]]:
    """(bytes, seconds) of the longest prompt, sent whole, and of plain MPI."""
    point = outcome["whole"][-1]
    return {
        "raw": (outcome["raw_bytes"], statistics.median(outcome["raw_s"])),
        "wire": (point["nbytes"], point["busy_s"]),
        "arrival": (point["nbytes"], point["arrival_s"]),
    }


def visible(outcomes: Sequence[Outcome]) -> Table:
    """A row per link and prompt; times are milliseconds."""
    table = Table(title="ms; visible time of KV sent whole, and streamed")
    for name in ("link", "prompt", "prefill", "wire", "step", "whole", "streamed", "hidden"):
        table.add_column(name, justify="left" if name == "link" else "right")
    for outcome in outcomes:
        for whole, streamed, hidden in zip(outcome["whole"], outcome["streamed"], outcome["hidden"], strict=True):
            table.add_row(
                words(outcome),
                str(whole["tokens"]),
                *(_ms(whole[key]) for key in ("prefill_s", "busy_s", "step_s", "visible_s")),
                _ms(streamed["visible_s"]),
                "-" if hidden is None else f"{hidden:.2f}",
            )
        table.add_section()
    return table


def words(outcome: Outcome) -> str:
    """The name of a link, with the rate that was chosen for it."""
    name = WORDS[outcome["link"]]
    if outcome["link"] != "balanced":
        return name
    return f"{name} ({int(outcome['rate'].removesuffix('kbit')) / 1e3:.0f} Mb/s)"


def picture(outcomes: Sequence[Outcome], path: Path) -> None:
    """Visible time over prompt length, a panel per link."""
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no picture: matplotlib is not installed (pip install pdjax[plot])")
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from pdjax.plots import GREY, GRID, PREFILL, STALL, TRANSFER

    figure = Figure(figsize=(3.6 * len(outcomes), 3.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # no global state of pyplot, no display
    for number, outcome in enumerate(outcomes):
        axes = figure.add_subplot(1, len(outcomes), number + 1)
        at = [point["tokens"] for point in outcome["whole"]]
        lines = (
            ("prefill", PREFILL, [point["prefill_s"] for point in outcome["whole"]]),
            ("visible, whole", STALL, [point["visible_s"] for point in outcome["whole"]]),
            ("visible, streamed", TRANSFER, [point["visible_s"] for point in outcome["streamed"]]),
        )
        for label, colour, seconds in lines:
            axes.plot(at, [1e3 * value for value in seconds], color=colour, marker="o", markersize=4, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(at, [str(tokens) for tokens in at])
        axes.set_ylim(bottom=0)
        axes.set_title(words(outcome), loc="left", fontsize=10, fontweight="bold")
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0, labelsize=9)
        axes.set_xlabel("prompt tokens", color=GREY, fontsize=9)
    figure.axes[0].set_ylabel("ms", color=GREY, fontsize=9)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if abs(seconds) < 0.1 else f"{1e3 * seconds:.0f}"
