"""Shows a latency profile, measured or estimated: a `pdjax.profile.Profile` enters; tables, lines, entries of
summary.json and a picture leave. Called by `pdjax.experiments.profile`, `fidelity` and `aot_profile`; knows no flags.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from pdjax import profile


def errors(known: profile.Profile) -> Table:
    """How well passes are predicted, those that the model was fitted to and others; of an estimate, how well the model
    keeps to it."""
    against = "estimate" if known.estimate else "measurement"
    table = Table("passes", "number", f"mean error to the {against}", "largest")
    for kind in known.kinds:
        for points in kind.points:
            table.add_row(f"{points.name}, fitted", *_cells(points))
        table.add_section()
        for points in kind.held_out:
            table.add_row(f"{points.name}, not fitted", *_cells(points))
        table.add_section()
    return table


def _cells(points: profile.Points) -> tuple[str, str, str]:
    return str(len(points.samples)), f"{points.mean_error:.1%}", f"{points.max_error:.1%}"


def numbers(known: profile.Profile) -> list[str]:
    """What follows from the profile, a line each."""
    kind = known.kinds[0]
    rates = ", ".join(f"{tokens}: {_ms(known.prefill_s(tokens))} ms" for tokens in (128, 512))
    steps = ", ".join(f"{rows}: {_ms(known.decode_s(rows, 512))} ms" for rows in (1, kind.spec.max_rows))
    lines = [
        f"prefill of a prompt alone, by tokens: {rates}; decode step with 512 tokens each, by rows: {steps}",
        f"saturating length L_m: {kind.saturating_tokens} tokens; budget beside rows: {kind.token_budget} tokens",
    ]
    for moved in known.transfers:
        line = f"transfers by {moved.transport}: {_ms(moved.alpha_s)} ms + bytes / ({moved.bytes_per_s / 1e6:.0f} MB/s)"
        pays = "never" if moved.stream_from is None else f"from {moved.stream_from} prompt tokens on"
        part_s, token_s = moved.streaming
        costs = f"a streamed prompt makes its pass {_ms(part_s)} ms longer, and {1e6 * token_s:.0f} us a token"
        late = f"the controller hears of a pass {_ms(moved.reporting)} ms after its end while another one runs"
        lines.append(f"{line}; streaming pays {pays}; {costs}; {late}" if moved.samples else line)
    return [*lines, known.origin] if known.estimate else lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def summary(known: profile.Profile) -> dict[str, Any]:
    """Entries of summary.json."""

    def of(points: Sequence[profile.Points]) -> dict[str, Any]:
        return {
            each.name: {"count": len(each.samples), "mean_error": each.mean_error, "max_error": each.max_error}
            for each in points
        }

    return {
        "estimate": None if known.estimate is None else dataclasses.asdict(known.estimate),
        "kinds": [
            {
                "tp": kind.spec.devices // kind.spec.pp,
                "pp": kind.spec.pp,
                "fitted": of(kind.points),
                "held_out": of(kind.held_out),
                "saturating_tokens": kind.saturating_tokens,
                "token_budget": kind.token_budget,
            }
            for kind in known.kinds
        ],
        "transfers": [
            {
                "transport": moved.transport,
                "alpha_s": moved.alpha_s,
                "bytes_per_s": moved.bytes_per_s,
                "stream_from": moved.stream_from,
                "streaming_s": moved.streaming,
                "reporting_s": moved.reporting,
            }
            for moved in known.transfers
        ],
    }


def picture(known: profile.Profile, path: Path) -> None:
    """Predicted against measured, of every pass; needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    from pdjax.plots import DECODE, GREY, GRID, MIXED, PREFILL

    colours = {"prefill": PREFILL, "decode": DECODE, "mixed": MIXED}
    figure = Figure(figsize=(11, 5.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    kind = known.kinds[0]
    for column, (title, groups) in enumerate((("fitted", kind.points), ("not fitted", kind.held_out))):
        axes = figure.add_subplot(1, 2, column + 1)
        ends: list[float] = []
        shown: set[str] = set()
        for sample in (sample for group in groups for sample in group.samples):
            load = sample.probe.load(kind.spec)
            what = profile.name_of(load)
            predicted = 1e3 * kind.latency.iteration_s(kind.spec, load)
            ends += [1e3 * sample.seconds, predicted]
            label = None if what in shown else what
            axes.plot(1e3 * sample.seconds, predicted, "o", color=colours[what], alpha=0.75, ms=6, label=label)
            shown.add(what)
        low, high = 0.8 * min(ends), 1.25 * max(ends)
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.plot([low, high], [low, high], color=GREY, linewidth=1)
        axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color=GRID, zorder=0)
        axes.set_xlabel("measured, ms")
        axes.set_ylabel("predicted, ms")
        mean = statistics.fmean(group.mean_error for group in groups)
        axes.set_title(f"Passes {title}: mean error {mean:.1%} (band: 10%)", loc="left", fontweight="bold")
        axes.legend(frameon=False)
    figure.savefig(path)
