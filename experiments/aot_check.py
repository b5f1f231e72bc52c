"""The fixed list of programs that `pdjax.experiments.aot --check` compiles: enters nothing, leave the instances. Passes
of prompts (2048 tokens), of rows (32 of 4096) and of both, a unit of KV of each kind, and a decode instance of a model
that needs eight chips.

It is as short as what it shows allows, since a head alone takes a compiler half a minute. Passes differ in their
groups, so there is one of each; it has one layer, which more would only repeat. Of every other kind there is the
largest program.
"""

import dataclasses
from collections.abc import Sequence

from pdjax import build
from pdjax.aot.programs import Program
from pdjax.aot.targets import parse
from pdjax.config import EngineConfig
from pdjax.experiments import aot_runs
from pdjax.experiments.aot_runs import Job
from pdjax.messages import InstanceSpec
from pdjax.models import source
from pdjax.schedulers.base import traits_of

CHUNK, ROWS, CONTEXT = 2048, 32, 4096
GROUP = 1  # layers


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One instance: a decode instance of `tp` chips, which computes prompts too where `mixed`."""

    target: str
    model: str
    tp: int
    mixed: bool


CASES = (
    Case("tpu:v5e:2x4", "llama3.1-8b", 4, mixed=True),
    Case("gpu:h100:1", "llama3.1-8b", 1, mixed=True),
    Case("gpu:h100:2", "llama3.1-8b", 2, mixed=True),
    Case("tpu:v5p:2x2x2", "llama2-70b", 8, mixed=False),
)


def job(case: Case) -> Job:
    """What a case compiles.

    Raises:
        pdjax.aot.targets.Missing: its compiler is not installed.
        ValueError: what does not fit.
    """
    target = parse(case.target)
    devices = target.devices()
    model = source.resolve(case.model, random_weights=True).config
    page_size = EngineConfig().page_size
    config = EngineConfig(
        model=case.model,
        scheduler="dynamic" if case.mixed else "disaggregated",
        prefill_tp=case.tp,
        decode_tp=case.tp,
        prefill_chunk=CHUNK,
        decode_chunk=CHUNK,
        decode_max_batch=ROWS,
        decode_num_pages=1 + ROWS * CONTEXT // page_size,
        max_model_len=CONTEXT,
        stream_layers=GROUP,
    )
    traits = traits_of(build.scheduler_of(config))
    specs = [_one_size(spec) for spec in build.specs_of(config, model, traits, target.platform)]
    aot_runs.refuse(config, model, target, specs[-1:])
    made = aot_runs.job(config, model, target, specs[-1], specs, build.devices_for(case.tp, devices))
    return dataclasses.replace(made, programs=tuple(_needed(made.programs)))


def _one_size(spec: InstanceSpec) -> InstanceSpec:
    """Passes of the largest sizes only."""
    return dataclasses.replace(
        spec,
        chunk_buckets=(spec.max_chunk,) if spec.max_chunk else (),
        row_buckets=(spec.max_rows,) if spec.max_rows else (),
    )


def _needed(programs: Sequence[Program]) -> list[Program]:
    """The groups of all passes, and of every other kind the largest: the last."""
    last = {program.kind: program for program in programs}
    return [program for program in programs if program.kind == "group" or program is last[program.kind]]
