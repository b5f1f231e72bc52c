"""Measures what passes and transfers of a model take on the present hardware, fits the latency model, and tries it on
passes that it was not fitted to. Flags enter; tables, profile.json, summary.json and a picture leave.

    python -m pdjax.experiments.profile --model=smollm2-135m --out=profile

`EngineConfig.profile` (--profile=profile/profile.json of the launchers) takes the file. Under
`mpirun -n 3 ... --transfer=mpi` the ranks measure, both at a time, as they serve. Instances are built with all
programs, so one profile serves every scheduler with chunks of at most this size and as many rows.
"""

import itertools
import logging
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from absl import flags as absl_flags
from rich.console import Console
from rich.progress import Progress

import pdjax
from pdjax import build, probes, profile, provenance, report, workload
from pdjax.config import EngineConfig
from pdjax.experiments import flags, kv_times, launcher, profile_tables
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
BUSY = 16  # prompts at once, which keep an instance busy


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
        for tokens, policy.streams in itertools.product(asked, (False, True)):  # compared: right after each other
            (point,) = kv_times.measure(engine, [tokens], REPEATS.value, flags.SEED.value, found.config.vocab_size)
            moved.append(_moved(point, policy.streams, engine.specs[0].max_chunk))
        policy.streams, limit = False, engine.specs[0].max_model_len
        late_s = _reporting(engine, found.config.vocab_size)
        return profile.Profile(
            version=profile.VERSION,
            name=config.model,
            model=found.config,
            dtype=engine.home.dtype,
            hardware=engine.home.hardware,
            kinds=tuple(kinds),
            transfers=(profile.transfers_of(config.transfer, moved, limit, late_s),),
        )


def _reporting(engine: pdjax.Engine, vocabulary: int) -> float:
    """Of prompts that fill a pass each, all at once: one pass follows the other."""
    spec = engine.specs[0]
    tokens = min(spec.max_chunk, spec.max_model_len - kv_times.STEPS)
    asked = workload.parse(
        f"fixed:{tokens},{kv_times.STEPS}",
        num_requests=BUSY,
        vocab_size=vocabulary,
        max_model_len=spec.max_model_len,
        rate=math.inf,
    )
    played = engine.replay(asked)
    return profile.reporting_s(played.records, played.iterations)


def _all(wanted: Sequence[Probe], tried: dict[str, tuple[Probe, ...]]) -> list[Probe]:
    return [*wanted, *(probe for group in tried.values() for probe in group)]


def _medians(instances: Sequence[Sequence[Sample]]) -> dict[Probe, float]:
    """Seconds of each probe, the median of equal instances."""
    times: dict[Probe, list[float]] = {}
    for samples in instances:
        for sample in samples:
            times.setdefault(sample.probe, []).append(sample.seconds)
    return {probe: statistics.median(each) for probe, each in times.items()}


def _moved(point: kv_times.Point, streamed: bool, max_chunk: int) -> profile.Moved:
    second_s, chunks = point.prefill_s + point.visible_s + point.step_s, math.ceil(point.tokens / max_chunk)
    return profile.Moved(point.tokens, point.nbytes, streamed, point.arrival_s, second_s, point.prefill_s, chunks)


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
    console = launcher.console()
    known = measure(config, policy, console)
    console.print(profile_tables.errors(known))
    for line in profile_tables.numbers(known):
        console.print(line, highlight=False, soft_wrap=True)
    if folder:
        origin = provenance.collect(flags.given(), devices=devices, ranks=ranks)
        profile.save(known, Path(folder) / "profile.json")
        report.write_summary(folder, {"provenance": origin, **profile_tables.summary(known)})
        profile_tables.picture(known, Path(folder) / "profile.png")
        console.print(f"{folder}/ has profile.json, summary.json and a picture", highlight=False)


if __name__ == "__main__":
    launcher.run(main)
