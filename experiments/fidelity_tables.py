"""How near simulated runs are to real ones: what came of the same requests on both sides enters, errors, a table, a
dict for summary.json and a picture leave. Called by `fidelity`.

A point counts where the real or the simulated attainment lies within BAND: where both sides say that nearly all, or
nearly none, keep their limits, agreeing is no art. No point is left out for how far apart its two sides are.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from pdjax import metrics
from pdjax.record import RequestRecord

BAND = (0.25, 0.95)  # attainments at which a system is neither idle nor overrun
MEAN_BAR, MAX_BAR = 3.0, 8.0  # points of attainment that the two sides may differ by
PERCENTS = (50, 90)
OTHERS = ("by_profile", "around", "as_it_was")  # what else is simulated: attainments of `Point`


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """What came of the requests, in order: which kept their limits, and P50 and P90 of those that were measured, ms."""

    met: tuple[bool, ...]
    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]

    @property
    def attainment(self) -> float:
        return sum(self.met) / len(self.met)


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One workload, served for real and in virtual time.

    Attributes:
        rate: requests per second.
        simulated: by the profile, with passes as slow as those in front of the judged requests (`gauge`): a prediction.
        slower: attainment in virtual time if all passes took a few percent longer: what such an error of the latency
            model does here.
        by_profile: the same with passes as the profile alone has them.
        around: the same with passes as slow as those in front of the judged requests and behind them.
        as_it_was: the same with passes as slow as all of the real run were, the judged requests' as well.
        bias: by kind of pass, the mean of predicted / real - 1 of the real run; None: there were none. Above 0 the
            machine was faster than its profile.
        drift: by kind of pass, how much longer they took behind the judged requests than in front.
        attempts: how often it was served, until the machine was steady.
    """

    scheduler: str
    rate: float
    real: Side
    simulated: Side
    slower: float
    by_profile: float
    around: float
    as_it_was: float
    bias: Mapping[str, float | None]
    drift: Mapping[str, float]
    attempts: int = 1

    @property
    def error(self) -> float:
        """Simulated less real attainment, in points of a hundred."""
        return 100 * (self.simulated.attainment - self.real.attainment)

    @property
    def alike(self) -> float:
        """The share of the requests that both sides judge alike."""
        pairs = zip(self.real.met, self.simulated.met, strict=True)
        return sum(real == simulated for real, simulated in pairs) / len(self.real.met)

    @property
    def counts(self) -> bool:
        return within(self.real) or within(self.simulated)


def within(side: Side) -> bool:
    """Whether its attainment lies within BAND."""
    return BAND[0] <= side.attainment <= BAND[1]


def side_of(records: Sequence[RequestRecord]) -> Side:
    """Judged by the limits that the requests were asked with.

    Raises:
        ValueError: no request has a second token.
    """
    ttft = [value for record in records if (value := metrics.ttft_ms(record)) is not None]
    tpot = [value for record in records if (value := metrics.tpot_ms(record)) is not None]
    if not tpot:
        raise ValueError(f"none of {len(records)} requests has a second token; allowed: at least one")
    return Side(
        tuple(metrics.met(record) for record in records),
        tuple(metrics.percentile(ttft, percent) for percent in PERCENTS),
        tuple(metrics.percentile(tpot, percent) for percent in PERCENTS),
    )


def errors(points: Sequence[Point], name: str = "") -> tuple[float, float] | None:
    """(mean, largest) of |simulated - real attainment| over the points that count, in points; None without such.
    `name`: of another attainment of `Point` than that of `simulated`."""
    counted = [point for point in points if point.counts]
    found = [
        abs(point.error) if not name else 100 * abs(getattr(point, name) - point.real.attainment) for point in counted
    ]
    return (statistics.fmean(found), max(found)) if found else None


def _mean_and_max(found: tuple[float, float] | None) -> dict[str, float | None]:
    return dict(zip(("mean", "max"), found or (None, None), strict=True))


def summary(points: Sequence[Point], needed: int) -> dict[str, Any]:
    """For summary.json. `needed`: how many points with a real attainment within BAND each scheduler is to have; `ok`
    says that they all have, and that both bars are kept."""
    names = list(dict.fromkeys(point.scheduler for point in points))
    by = {name: [point for point in points if point.scheduler == name] for name in names}
    found = errors(points)
    inside = {name: sum(within(point.real) for point in own) for name, own in by.items()}
    mean, largest = found or (None, None)
    kept = found is not None and found[0] <= MEAN_BAR and found[1] <= MAX_BAR
    return {
        "mean_abs_error_points": mean,
        "max_abs_error_points": largest,
        "bars": {"mean_abs_error_points": MEAN_BAR, "max_abs_error_points": MAX_BAR, "points_within_band": needed},
        "ok": kept and min(inside.values()) >= needed,
        "band": BAND,
        "points_within_band": inside,
        "by_scheduler": {name: _mean_and_max(errors(own)) for name, own in by.items()},
        "abs_error_points_with": {name: _mean_and_max(errors(points, name)) for name in OTHERS},
        "latency_errors": latency_errors(points),
        "points": [_line(point) for point in points],
    }


def latency_errors(points: Sequence[Point]) -> dict[str, float]:
    """Mean of |simulated / real - 1| over all points, of each percentile."""
    return {
        f"{name}_p{percent}": statistics.fmean(
            abs(getattr(point.simulated, name)[index] / getattr(point.real, name)[index] - 1) for point in points
        )
        for name in ("ttft_ms", "tpot_ms")
        for index, percent in enumerate(PERCENTS)
    }


def _line(point: Point) -> dict[str, Any]:
    def side(one: Side) -> dict[str, Any]:
        values = {"ttft_ms": one.ttft_ms, "tpot_ms": one.tpot_ms}
        return {"attainment": one.attainment} | {
            f"{name}_p{percent}": each[index] for name, each in values.items() for index, percent in enumerate(PERCENTS)
        }

    return {
        "scheduler": point.scheduler,
        "rate": point.rate,
        "num_requests": len(point.real.met),
        "counts": point.counts,
        "real": side(point.real),
        "simulated": side(point.simulated),
        "error_points": point.error,
        "judged_alike": point.alike,
        "simulated_slower": point.slower,
        **{f"simulated_{name}": getattr(point, name) for name in OTHERS},
        "pass_bias": dict(point.bias),
        "drift": dict(point.drift),
        "attempts": point.attempts,
    }


def table(points: Sequence[Point], slowness: float) -> Table:
    """Real beside simulated, a row per point. By profile, around, as it was: how many points off those are. `slowness`:
    of `Point.slower`; passes and drift: of prefill, decode and mixed ones."""
    shown = Table(title="requests that keep their limits, real / simulated", title_justify="left")
    shown.add_column("")
    headers = (
        "rate/s",
        "attainment, %",
        "points",
        "alike",
        "by profile",
        "around",
        "as it was",
        f"{slowness - 1:.0%} slower",
        "passes, %",
        "drift, %",
        "runs",
        "TTFT p50 | p90",
        "TPOT p50 | p90",
    )
    for name in headers:
        shown.add_column(name, justify="right")
    before = ""
    for point in points:
        if before and before != point.scheduler:
            shown.add_section()
        shown.add_row(
            point.scheduler if point.scheduler != before else "",
            f"{point.rate:.3g}",
            f"{100 * point.real.attainment:.1f} / {100 * point.simulated.attainment:.1f}",
            f"{point.error:+.1f}" if point.counts else f"({point.error:+.1f})",
            f"{point.alike:.0%}",
            *(f"{100 * (getattr(point, name) - point.real.attainment):+.1f}" for name in OTHERS),
            f"{100 * (point.slower - point.simulated.attainment):+.1f}",
            " | ".join("-" if bias is None else f"{100 * bias:+.0f}" for bias in point.bias.values()),
            " | ".join(f"{100 * point.drift[kind]:+.0f}" if kind in point.drift else "-" for kind in point.bias),
            str(point.attempts),
            _sides(point.real.ttft_ms, point.simulated.ttft_ms),
            _sides(point.real.tpot_ms, point.simulated.tpot_ms),
        )
        before = point.scheduler
    return shown


def _sides(real: Sequence[float], simulated: Sequence[float]) -> str:
    return " | ".join(f"{mine:.0f} / {theirs:.0f}" for mine, theirs in zip(real, simulated, strict=True))


def verdict(found: dict[str, Any]) -> str:
    """A line on a `summary`."""
    if found["mean_abs_error_points"] is None:
        return f"No attainment lies within {BAND[0]:.0%} and {BAND[1]:.0%}: other rates are needed."
    few = [name for name, count in found["points_within_band"].items() if count < found["bars"]["points_within_band"]]
    alone, around, was = (found["abs_error_points_with"][name] for name in OTHERS)
    return (
        f"Simulated attainment is {found['mean_abs_error_points']:.1f} points off in the mean (bar {MEAN_BAR:g}) and "
        f"{found['max_abs_error_points']:.1f} at most (bar {MAX_BAR:g}): {'ok' if found['ok'] else 'not ok'}"
        + (f"; too few points within {BAND[0]:.0%} and {BAND[1]:.0%}: {', '.join(few)}" if few else "")
        + f". By the profile alone: {alone['mean']:.1f} and {alone['max']:.1f}; with passes as those in front and "
        f"behind: {around['mean']:.1f} and {around['max']:.1f}; as all were: {was['mean']:.1f} and {was['max']:.1f}."
    )


def scatter(points: Sequence[Point], path: Path) -> None:
    """Simulated over real: attainment, and the percentiles of TTFT and TPOT; needs matplotlib."""
    from pdjax.plots import GREY, GRID, bare, canvas
    from pdjax.plots_goodput import colour

    figure = canvas(13.5, 4.6)
    panels: tuple[tuple[str, Callable[[Side], Sequence[float]]], ...] = (
        ("attainment, %", lambda side: [100 * side.attainment]),
        ("TTFT, ms", lambda side: side.ttft_ms),
        ("TPOT, ms", lambda side: side.tpot_ms),
    )
    for index, (title, values) in enumerate(panels):
        axes = figure.add_subplot(1, 3, index + 1)
        every = [value for point in points for side in (point.real, point.simulated) for value in values(side)]
        low, high = (0.0, 100.0) if index == 0 else (0.8 * min(every), 1.25 * max(every))
        if index:
            axes.set(xscale="log", yscale="log")
            axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color=GRID, zorder=0)
        else:
            axes.fill_between([low, high], [low - MAX_BAR, high - MAX_BAR], [low + MAX_BAR, high + MAX_BAR], color=GRID)
        axes.plot([low, high], [low, high], color=GREY, linewidth=1)
        shown: set[str] = set()
        for point in points:
            for mark, real, simulated in zip("o^", values(point.real), values(point.simulated), strict=False):
                label = None if point.scheduler in shown else point.scheduler.replace("_", ", ")
                axes.plot(real, simulated, mark, color=colour(point.scheduler), alpha=0.85, label=label)
                shown.add(point.scheduler)
        axes.set(xlim=(low, high), ylim=(low, high), xlabel="real", ylabel="simulated" if index == 0 else "")
        band = f"band: {MAX_BAR:g} points" if index == 0 else "circles p50, triangles p90; band: 10%"
        axes.set_title(f"{title} ({band})", loc="left", fontsize=10, fontweight="bold")
        bare(axes)
        if index == 0:
            axes.legend(frameon=False, fontsize=9)
    figure.savefig(path)
