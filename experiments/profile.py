"""Measures what passes and transfers of a model take on the present hardware, fits the latency model, and tries it on
passes that it was not fitted to. Flags enter; tables, profile.json, summary.json and a picture leave.

    python -m pdjax.experiments.profile --model=smollm2-135m --out=profile

`EngineConfig.profile` (--profile=profile/profile.json of the launchers) takes the file. Under
`mpirun -n 3 ... --transfer=mpi` the ranks measure, both at a time, as they serve. Instances are built with all
programs, so one profile serves every scheduler with chunks of at most this size and as many rows.
"""

import logging
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import pdjax
from pdjax import build, probes, profile, provenance, report
from pdjax.config import EngineConfig
from pdjax.experiments import flags, kv_times, launcher
from pdjax.latency import Probe, Sample
from pdjax.models import source
from pdjax.schedulers.base import Ask, ClusterView, InstanceView, Place, Plan, Traits, take_chunks

for name in ("model", "dtype", "seed", "out", "transfer", "pin", "prefill_chunk", "decode_max_batch", "max_model_len"):
    absl_flags.declare_key_flag(name)
absl_flags.set_default(flags.OUT, "profile")
PROMPTS = absl_flags.DEFINE_list(
    "kv_prompts", ["32", "64", "128", "256", "512"], "Tokens of prompts whose KV is moved."
)
REPEATS = absl_flags.DEFINE_integer("kv_repeats", 3, "Requests of each length and kind; medians count.", lower_bound=1)

CHUNK = 256


class Apart:
    """Prefills on instance 0 and decodes on instance 1, which both have all programs. `streams` may be changed between
    requests."""

    traits = Traits()
    streams = False

    def place(self, ask: Ask, cluster: ClusterView) -> Place:
        if self.streams:
            return Place(0, 1, "stream", "measured streamed")
        return Place(0, None, "whole", "measured whole")

    def hand_off(self, ask: Ask, cluster: ClusterView) -> int:
        return 1

    def iterate(self, instance: InstanceView, cluster: ClusterView) -> Plan:
        return Plan(take_chunks(instance, instance.spec.max_chunk), decode=instance.rows > 0)


def lengths(limit: int) -> list[int]:
    """The prompts whose KV is moved, ascending. ValueError naming the flag."""
    texts, most = PROMPTS.value, limit - kv_times.STEPS - 1
    if not texts or not all(text.isdigit() and 0 < int(text) <= most for text in texts):
        raise ValueError(f"kv_prompts is {','.join(texts)!r}; allowed: token counts of at most {most}, with commas")
    return sorted({int(text) for text in texts})


def measure(config: EngineConfig, policy: Apart, console: Console) -> profile.Profile:
    """Builds an engine, runs every probe on its instances, and moves the KV of single requests."""
    found = source.resolve(config.model, max_len=config.max_model_len)
    with pdjax.Engine(config) as engine:
        asked = lengths(engine.specs[0].max_model_len)
        tried = [probes.held_out(spec) for spec in engine.specs]
        wanted = [probes.measured(spec) for spec in engine.specs]
        every = list(dict.fromkeys(probe for each in zip(wanted, tried, strict=True) for probe in _all(*each)))
        random.Random(flags.SEED.value).shuffle(every)  # a machine that slows down meanwhile does so for all alike
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("loading", total=None)
            done = engine.warmup(
                lambda done, total, what: bar.update(task, completed=done, total=total, description=what), every
            )
        kinds: list[profile.Kind] = []
        for spec in engine.specs:
            if any(profile.covers(known.spec, spec) for known in kinds):
                continue
            same = [n for n, other in enumerate(engine.specs) if profile.covers(spec, other)]
            seconds = _medians([done.samples[n] for n in same])
            kinds.append(
                profile.kind_of(
                    spec,
                    [Sample(probe, seconds[probe]) for probe in wanted[spec.index]],
                    [
                        (name, [Sample(probe, seconds[probe]) for probe in group])
                        for name, group in tried[spec.index].items()
                    ],
                )
            )
        moved: list[profile.Moved] = []
        for policy.streams in (False, True):
            points = kv_times.measure(engine, asked, REPEATS.value, flags.SEED.value, found.config.vocab_size)
            moved += [_moved(point, policy.streams) for point in points]
        return profile.Profile(
            version=profile.VERSION,
            name=config.model,
            model=found.config,
            dtype=engine.home.dtype,
            hardware=engine.home.hardware,
            kinds=tuple(kinds),
            transfers=(profile.transfers_of(config.transfer, moved, engine.specs[0].max_model_len),),
        )


def _all(wanted: Sequence[Probe], tried: dict[str, tuple[Probe, ...]]) -> list[Probe]:
    return [*wanted, *(probe for group in tried.values() for probe in group)]


def _medians(instances: Sequence[Sequence[Sample]]) -> dict[Probe, float]:
    """Seconds of each probe, the median of equal instances."""
    times: dict[Probe, list[float]] = {}
    for samples in instances:
        for sample in samples:
            times.setdefault(sample.probe, []).append(sample.seconds)
    return {probe: statistics.median(each) for probe, each in times.items()}


def _moved(point: kv_times.Point, streamed: bool) -> profile.Moved:
    second_s = point.prefill_s + point.visible_s + point.step_s
    return profile.Moved(point.tokens, point.nbytes, streamed, point.arrival_s, second_s)


def errors(known: profile.Profile) -> Table:
    """How well passes are predicted, those that the model was fitted to and others."""
    table = Table("passes", "number", "mean error", "largest")
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
    rates = ", ".join(f"{tokens}: {1e3 * known.prefill_s(tokens):.0f} ms" for tokens in (128, 512))
    steps = ", ".join(f"{rows}: {1e3 * known.decode_s(rows, 512):.0f} ms" for rows in (1, kind.spec.max_rows))
    lines = [
        f"prefill of a prompt alone, by tokens: {rates}; decode step with 512 tokens each, by rows: {steps}",
        f"saturating length L_m: {kind.saturating_tokens} tokens; budget beside rows: {kind.token_budget} tokens",
    ]
    for moved in known.transfers:
        pays = "never" if moved.stream_from is None else f"from {moved.stream_from} prompt tokens on"
        lines.append(
            f"transfers by {moved.transport}: {1e3 * moved.alpha_s:.1f} ms + bytes / "
            f"({moved.bytes_per_s / 1e6:.0f} MB/s); streaming pays {pays}"
        )
    return lines


def summary(known: profile.Profile) -> dict[str, Any]:
    """Entries of summary.json."""

    def of(points: Sequence[profile.Points]) -> dict[str, Any]:
        return {
            each.name: {"count": len(each.samples), "mean_error": each.mean_error, "max_error": each.max_error}
            for each in points
        }

    return {
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


def main(argv: list[str]) -> None:
    del argv
    logging.getLogger("pdjax").setLevel(flags.LOG_LEVEL.value.upper())
    policy, chunk = Apart(), absl_flags.FLAGS["prefill_chunk"].value or CHUNK
    config = flags.build_config(
        scheduler=policy, prefill_chunk=chunk, decode_chunk=chunk, warmup=False, correct=False, profile=""
    )
    if not config.stream_layers:
        raise ValueError("stream_layers is 0; allowed: at least 1, to compare streaming with whole prompts")
    launcher.on_ranks(lambda: run(config, policy), config)


def run(config: EngineConfig, policy: Apart) -> None:
    """Measures, shows and writes."""
    if folder := flags.OUT.value:
        report.out_folder(folder)
    ranks = launcher.ranks_for(config)
    devices = () if ranks else build.devices_for(config.devices)
    console = Console()
    known = measure(config, policy, console)
    console.print(errors(known))
    for line in numbers(known):
        console.print(line, highlight=False, soft_wrap=True)
    if folder:
        origin = provenance.collect(flags.given(), devices=devices, ranks=ranks)
        profile.save(known, Path(folder) / "profile.json")
        report.write_summary(folder, {"provenance": origin, **summary(known)})
        picture(known, Path(folder) / "profile.png")
        console.print(f"{folder}/ has profile.json, summary.json and a picture", highlight=False)


if __name__ == "__main__":
    launcher.run(main)
