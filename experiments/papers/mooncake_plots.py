"""The picture of `mooncake`: what was found and what was published enter, a PNG file leaves. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pdjax.experiments.papers.mooncake_rejection import Turned
from pdjax.experiments.papers.mooncake_scheduling import Scheduled
from pdjax.plots import GREY, GRID, bare, canvas

OURS, PUBLISHED = "#c2306b", "#aab0b8"
RULES = {"each stage": "#aab0b8", "early": "#3b6fb6", "predicted": "#c2306b"}


def draw(
    rates: Mapping[int | None, float],
    published_rates: Mapping[int | None, float],
    ttft: Sequence[Scheduled],
    published_s: Mapping[str, float],
    rejections: Sequence[Turned],
    path: Path,
) -> None:
    """Hit rate against the size of the cache; mean TTFT by policy; decode load over time by rule."""
    figure = canvas(14.0, 4.2)
    hits, bars, loads = figure.subplots(1, 3)
    for axes in (hits, bars, loads):
        bare(axes)
        axes.grid(axis="y", color=GRID)
    sizes = [size for size in rates if size is not None]
    hits.plot(sizes, [published_rates[size] for size in sizes], "o", color=PUBLISHED, ms=9, label="published")
    hits.plot(sizes, [rates[size] for size in sizes], color=OURS, lw=2, marker=".", label="ours")
    hits.axhline(rates[None], color=GREY, lw=1, ls=":")
    hits.set_xscale("log")
    hits.set_ylim(0, 0.4)
    hits.set_xlabel("blocks of 512 tokens in the cache, LRU", fontsize=10)
    hits.set_title("blocks found", loc="left", fontsize=11)
    for at, one in enumerate(ttft):
        for shift, value, colour in ((-0.2, published_s[one.policy], PUBLISHED), (0.2, one.ttft_s, OURS)):
            bars.bar(at + shift, value, 0.38, color=colour)
            bars.annotate(f"{value:.3g}", (at + shift, value), ha="center", va="bottom", fontsize=9)
    bars.set_yscale("log")
    bars.set_ylim(bottom=1)
    bars.set_xticks(range(len(ttft)), [one.policy.replace(" ", "\n") for one in ttft])
    bars.set_title("mean TTFT, seconds (grey: published)", loc="left", fontsize=11)
    for rule in rejections:
        times, values = [time_s for time_s, _ in rule.loads], [load for _, load in rule.loads]
        loads.plot(times, values, color=RULES[rule.rule], lw=1, label=f"{rule.rule}: {rule.rejected} rejected")
    loads.set_ylim(bottom=0.6)
    loads.set_xlabel("seconds, at twice the trace's rate", fontsize=10)
    loads.set_title("load of the decode pool", loc="left", fontsize=11)
    for axes in (hits, loads):
        axes.legend(frameon=False, fontsize=9, loc="lower right")
    figure.savefig(path)
