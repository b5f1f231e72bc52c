"""Kills ranks of jobs that serve, at every stage, and shows that no request is lost. Flags enter; a table and
`summary.json` leave. Run as `python -m pdjax.experiments.kill_soak`; it starts `mpirun --with-ft ulfm` itself.

Each job serves the same requests undisturbed, then again and again; each time a rank is hit, until one instance is
left. The next job goes on with the next kill.
"""

import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from absl import flags as absl_flags
from rich.console import Console
from rich.table import Table

import pdjax
from pdjax import mpi, provenance, report
from pdjax.config import EngineConfig
from pdjax.experiments import flags, kills, launcher, mpirun
from pdjax.models import source
from pdjax.mpi.start import job_layout

absl_flags.declare_key_flag("model")
absl_flags.declare_key_flag("out")
absl_flags.declare_key_flag("seed")
absl_flags.set_default(flags.MODEL, "tiny")
KILLS = absl_flags.DEFINE_integer("kills", 50, "How many ranks are hit.", lower_bound=1)
REQUESTS = absl_flags.DEFINE_integer("requests", 8, "Asked at a time.", lower_bound=1)
FIRST = absl_flags.DEFINE_integer("first", None, "The first kill of a job. Set by the launcher for its own jobs.")
RESULTS = absl_flags.DEFINE_string("results", "", "File of a job's outcomes. Set with --first.")

JOB_S = 300.0
# (prefill instances, ranks of one, decode instances, ranks of one): jobs take turns.
SHAPES = ((2, 1, 2, 1), (1, 1, 2, 2), (2, 2, 1, 1))


def config(shape: tuple[int, int, int, int]) -> EngineConfig:
    """The engine of a job."""
    prefills, prefill_ranks, decodes, decode_ranks = shape
    return EngineConfig(
        model=flags.MODEL.value,
        scheduler="disaggregated",
        transfer="mpi",
        prefill_instances=prefills,
        prefill_ranks=prefill_ranks,
        prefill_tp=prefill_ranks,
        decode_instances=decodes,
        decode_ranks=decode_ranks,
        decode_tp=decode_ranks,
        prefill_chunk=32,
        decode_chunk=32,
        prefill_max_batch=1,
        decode_max_batch=8,
        page_size=16,
        max_model_len=256,
        stream_layers=1,
        peer_timeout_s=2.0,
    )


def job(shape: tuple[int, int, int, int], first: int, last: int, results: Path) -> None:
    """On rank 0: kills `first` to `last` - 1, as far as the instances that are left allow. Outcomes are written as they
    come."""
    asked = config(shape)
    vocabulary = source.resolve(asked.model).config.vocab_size
    head = mpi.current()
    assert head is not None, "a job runs under mpirun"
    with pdjax.Engine(asked) as engine, open(results, "a") as file:
        soak = kills.Soak(engine, head.facts, flags.SEED.value, REQUESTS.value, vocabulary)
        for number in range(first, last):
            kill = kills.plan(flags.SEED.value, number, max(shape[1], shape[3]))
            if soak.left == 1 or not soak.can(kill.stage):
                return
            outcome = soak.strike(kill)
            file.write(json.dumps({"number": number, **dataclasses.asdict(outcome)}) + "\n")
            file.flush()


def soak(console: Console) -> list[dict[str, Any]]:
    """Runs jobs until all kills have been done."""
    outcomes: list[dict[str, Any]] = []
    while len(outcomes) < KILLS.value:
        shape = SHAPES[len(outcomes) % len(SHAPES)]
        with tempfile.NamedTemporaryFile("r") as results:
            ranks = job_layout(config(shape)).size
            given = [f"--{name}={absl_flags.FLAGS[name].value}" for name in ("model", "seed", "kills", "requests")]
            argv = [
                "-m",
                "pdjax.experiments.kill_soak",
                *given,
                f"--first={len(outcomes)}",
                f"--results={results.name}",
            ]
            done = mpirun.run(mpirun.command(ranks, argv, survive=True), JOB_S)
            fresh = [json.loads(line) for line in results]
        if done.returncode or not fresh:
            console.print(done.stdout[-2000:], done.stderr[-4000:], highlight=False)
            sys.exit(f"error: the job of kills from {len(outcomes)} on ended with status {done.returncode}")
        for outcome in fresh:
            console.print(words(outcome), highlight=False, soft_wrap=True)
        outcomes += fresh
    return outcomes


def words(outcome: dict[str, Any]) -> str:
    """A line on one kill."""
    kill, wait = outcome["kill"], outcome["next_token_s"]
    how = "SIGSTOP, SIGCONT" if kill["stop"] else "SIGKILL"
    again = (
        "no request concerned" if wait is None else f"{outcome['restarted']} start over, next tokens in {wait:.3f} s"
    )
    verdict = "; ".join(outcome["wrong"]) or "all answers equal"
    return (
        f"{outcome['number']:3d} {kill['stage']:10} {outcome['role']:7} rank {outcome['rank']} {how}: noticed in "
        f"{outcome['noticed_s']:.3f} s, {again}; {verdict}"
    )


def table(outcomes: list[dict[str, Any]]) -> Table:
    """By stage and signal."""
    made = Table("stage", "signal", "kills", "wrong", "noticed s (median, max)", "next token s (median, max)")
    for stage in kills.STAGES:
        for stop in (False, True):
            some = [o for o in outcomes if o["kill"]["stage"] == stage and o["kill"]["stop"] == stop]
            if some:
                waits = [o["next_token_s"] for o in some if o["next_token_s"] is not None]
                wrong = sum(bool(o["wrong"]) for o in some)
                row = [stage, "SIGSTOP" if stop else "SIGKILL", str(len(some)), str(wrong)]
                made.add_row(*row, _spread([o["noticed_s"] for o in some]), _spread(waits))
    return made


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f}, {max(values):.3f}" if values else "-"


def main(argv: list[str]) -> None:
    del argv
    if FIRST.value is not None:
        shape, first = SHAPES[FIRST.value % len(SHAPES)], FIRST.value
        mpi.run(lambda: job(shape, first, KILLS.value, Path(RESULTS.value)), config(shape))
        return
    if folder := flags.OUT.value:
        report.out_folder(folder)
    console = launcher.console()
    outcomes = soak(console)
    console.print(table(outcomes))
    wrong = sum(bool(outcome["wrong"]) for outcome in outcomes)
    console.print(f"{len(outcomes)} kills, {wrong} with something wrong", highlight=False)
    if folder:
        origin = provenance.collect(flags.given() | {"kills": KILLS.value, "requests": REQUESTS.value})
        report.write_summary(folder, {"provenance": origin, "kills": outcomes, "wrong": wrong})
    if wrong:
        sys.exit(f"error: {wrong} of {len(outcomes)} kills left something wrong")


if __name__ == "__main__":
    launcher.run(main)
