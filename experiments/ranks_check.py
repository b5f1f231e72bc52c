"""Checks that engines over ranks answer as one process does: starts an `mpirun` job for each row, in which rank 0
serves the same prompts with a colocated engine of its own and with the ranks, streamed and pulled. Flags enter; a line
for each row and summary.json leave. Ends with status 1 if an answer differs.

    python -m pdjax.experiments.ranks_check
"""

import dataclasses
import json
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

import pdjax
from pdjax import mpi, provenance, report
from pdjax.config import EngineConfig
from pdjax.experiments import flags, launcher, mpirun
from pdjax.models import source
from pdjax.mpi.start import job_layout

for name in ("model", "seed", "out", "max_tokens"):
    absl_flags.declare_key_flag(name)
absl_flags.set_default(flags.MODEL, "tiny")
absl_flags.set_default(flags.MAX_TOKENS, 24)
ROWS = absl_flags.DEFINE_list(
    "rows",
    ["1x1r1-1x1r1", "2x1r1-1x1r1", "1x1r1-2x1r1", "1x2r2-1x1r1", "1x1r1-1x2r2", "1x2r2-1x4r2"],
    "Each PxTrR-DxTrR: prefill instances x tp r ranks of one, then the same of decode instances.",
)
REQUESTS = absl_flags.DEFINE_integer("requests", 6, "Prompts.", lower_bound=1)
LONGEST = absl_flags.DEFINE_integer("longest", 100, "Most tokens of a prompt.", lower_bound=1)
ROW = absl_flags.DEFINE_string("row", "", "The row of a job. Set by the launcher for its own jobs.")
RESULTS = absl_flags.DEFINE_string("results", "", "File of a job's outcome. Set with --row.")

JOB_S = 900.0
MODES = {"streamed": 1, "pulled": 0}  # layers per streamed group


def config(row: str, stream_layers: int) -> EngineConfig:
    """The engine of a row. ValueError if it is none."""
    parts = re.fullmatch(r"(\d+)x(\d+)r(\d+)-(\d+)x(\d+)r(\d+)", row)
    if parts is None:
        raise ValueError(f"rows has {row!r}; allowed: like 2x1r1-1x2r2, PxTrR-DxTrR")
    names = ("instances", "tp", "ranks")
    fields = [f"{side}_{name}" for side in ("prefill", "decode") for name in names]
    sizes: dict[str, Any] = {field: int(size) for field, size in zip(fields, parts.groups(), strict=True)}
    return EngineConfig(
        model=flags.MODEL.value,
        dtype="float32",
        scheduler="disaggregated",
        transfer="mpi",
        prefill_chunk=32,
        prefill_max_batch=2,
        decode_max_batch=4,
        page_size=16,
        max_model_len=-(-(LONGEST.value + flags.MAX_TOKENS.value) // 64) * 64,
        stream_layers=stream_layers,
        warmup=False,
        verify_kv=True,
        **sizes,
    )


def job(row: str) -> dict[str, Any]:
    """On rank 0: one row. Answers of the ranks against those of one process."""
    one = config(row, 1)
    vocabulary = source.resolve(one.model).config.vocab_size
    draw = random.Random(flags.SEED.value)
    prompts = [
        [draw.randrange(vocabulary) for _ in range(draw.randint(1, LONGEST.value))] for _ in range(REQUESTS.value)
    ]
    sampling = pdjax.SamplingParams(temperature=0, max_tokens=flags.MAX_TOKENS.value, ignore_eos=True)
    alone = dataclasses.replace(
        one, scheduler="colocated", transfer="device_put", prefill_instances=1, decode_instances=1,
        prefill_tp=1, decode_tp=1, prefill_ranks=1, decode_ranks=1,
    )  # fmt: skip
    with pdjax.Engine(alone) as engine:
        expected = [result.token_ids for result in engine.generate(prompts, sampling)]
    out: dict[str, Any] = {"row": row}
    for mode, layers in MODES.items():
        began = time.perf_counter()
        with pdjax.Engine(config(row, layers)) as engine:
            results = engine.generate(prompts, sampling)
            ranks: dict[int | None, tuple[int, ...]] = {spec.index: spec.ranks for spec in engine.specs}
        out[mode] = {
            "equal": sum(result.token_ids == ids for result, ids in zip(results, expected, strict=True)),
            "of": len(results),
            "moved": sum(result.record.timeline.transfer_bytes > 0 for result in results),
            "prefill_ranks": sorted({ranks[result.placement.prefill] for result in results}),
            "decode_ranks": sorted({ranks[result.placement.decode] for result in results}),
            "seconds": time.perf_counter() - began,
        }
    return out


def run(row: str) -> dict[str, Any]:
    """Runs the job of a row; RuntimeError with what it said if it fails."""
    n = job_layout(config(row, 1)).size
    with tempfile.NamedTemporaryFile("r") as results:
        names = ("model", "seed", "max_tokens", "requests", "longest")
        given = [f"--{name}={absl_flags.FLAGS[name].value}" for name in names]
        argv = ["-m", "pdjax.experiments.ranks_check", *given, f"--row={row}", f"--results={results.name}"]
        done = mpirun.run(mpirun.command(n, argv), JOB_S)
        if done.returncode:
            raise RuntimeError(f"the job of {row} ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}")
        outcome: dict[str, Any] = json.load(results)
    return outcome


def words(outcome: dict[str, Any]) -> str:
    """A line on one row."""
    modes = ", ".join(
        f"{mode} {outcome[mode]['equal']} of {outcome[mode]['of']} equal, {outcome[mode]['moved']} moved "
        f"({outcome[mode]['seconds']:.1f} s)"
        for mode in MODES
    )
    ranks = [outcome["streamed"][f"{phase}_ranks"] for phase in ("prefill", "decode")]
    return f"{outcome['row']:12} ranks {ranks[0]} -> {ranks[1]}: {modes}"


def main(argv: list[str]) -> None:
    del argv
    if ROW.value:

        def write() -> None:
            Path(RESULTS.value).write_text(json.dumps(job(ROW.value)))

        mpi.run(write, config(ROW.value, 1))
        return
    if folder := flags.OUT.value:
        report.out_folder(folder)
    console = launcher.console()
    outcomes = []
    for row in ROWS.value:
        outcomes.append(run(row))
        console.print(words(outcomes[-1]), highlight=False, soft_wrap=True)
    wrong = sum(outcome[mode]["equal"] < outcome[mode]["of"] for outcome in outcomes for mode in MODES)
    if folder:
        origin = provenance.collect(flags.given() | {"rows": ROWS.value})
        report.write_summary(folder, {"provenance": origin, "rows": outcomes})
    if wrong:
        sys.exit(f"error: {wrong} of {len(outcomes) * len(MODES)} differ")


if __name__ == "__main__":
    launcher.run(main)
