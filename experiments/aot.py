"""Compiles the programs of an engine for chips that are not there, by the vendors' own compilers. Flags enter, those of
an engine and --target; tables and, with --out, summary.json leave: whether each program compiles, its memory, whether
pages stay in place, collectives, costs, and what fits.

    python -m pdjax.experiments.aot --model=llama3.1-8b --target=tpu:v5e:2x4 --prefill_tp=4 --decode_tp=4 --out=aot

--check compiles a fixed list instead, and leaves out with a word what has no compiler here. --profile=FOLDER writes a
latency profile made of the compiler's estimates to that folder (`pdjax.experiments.aot_profile`).

Exit status: 2 with the numbers if an instance does not fit its chips, before anything is compiled where arithmetic
tells; 1 if a program does not compile or copies its pages.
"""

import logging
import sys
from collections.abc import Iterator
from typing import Any

import jax
from absl import flags as absl_flags
from rich.console import Console
from rich.progress import Progress

from pdjax import build, provenance, report
from pdjax.aot import memory
from pdjax.aot.targets import Missing, Target, parse
from pdjax.experiments import aot_check, aot_profile, aot_runs, aot_tables, flags, launcher, published_data
from pdjax.experiments.aot_runs import Done, Job
from pdjax.models import source
from pdjax.schedulers.base import traits_of

TARGET = absl_flags.DEFINE_list("target", [], "Chips to compile for, such as tpu:v5e:2x4 or gpu:h100:2.")
CHECK = absl_flags.DEFINE_bool("check", False, "Compile a fixed list of programs instead of those of an engine.")
WIDTH = 200  # of the tables where they go to a file
for _name in ("model", "out", "profile", "data"):
    absl_flags.declare_key_flag(_name)  # --help shows these


def engine_jobs(targets: list[Target]) -> Iterator[Job]:
    """The instances that the flags describe, on each target. ValueError for what does not fit."""
    config = flags.build_config(profile="")
    model = source.resolve(config.model, max_len=config.max_model_len, random_weights=True).config
    traits = traits_of(build.scheduler_of(config))
    every = [(target, build.specs_of(config, model, traits, target.platform)) for target in targets]
    for target, specs in every:
        if (wanted := sum(spec.devices for spec in specs)) > target.count:
            raise ValueError(f"target is {target.text!r}, {target.count} chips; allowed: at least {wanted}")
        aot_runs.refuse(config, model, target, specs)
    for target, specs in every:
        devices = target.devices()
        for spec, first in aot_runs.distinct(specs):
            yield aot_runs.job(config, model, target, spec, specs, devices[first : first + spec.devices])


def check_jobs(skipped: list[dict[str, str]]) -> Iterator[Job]:
    """The fixed list; what cannot be compiled here goes to `skipped`, with the reason."""
    for case in aot_check.CASES:
        try:
            yield aot_check.job(case)
        except Missing as reason:
            skipped.append({"target": case.target, "model": case.model, "reason": str(reason)})


def estimate(console: Console) -> None:
    """Writes a latency profile that nobody has measured."""
    if len(TARGET.value) != 1:
        raise ValueError(f"target is {','.join(TARGET.value)!r}; allowed with --profile: one")
    config = flags.build_config(profile="")
    model = source.resolve(config.model, max_len=config.max_model_len, random_weights=True).config
    data = published_data.folder()
    aot_profile.run(config, model, parse(TARGET.value[0]), flags.PROFILE.value, console, str(data or ""))


def main(argv: list[str]) -> None:
    del argv
    logging.getLogger("pdjax").setLevel(flags.LOG_LEVEL.value.upper())
    jax.config.update("jax_platforms", "cpu")  # nothing runs: a chip that is here stays free
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if flags.PROFILE.value:
        estimate(console)
        return
    if flags.OUT.value:
        report.out_folder(flags.OUT.value)
    skipped: list[dict[str, str]] = []
    jobs = check_jobs(skipped) if CHECK.value else engine_jobs([parse(text) for text in TARGET.value or [""]])
    compiled = [_run(job, console) for job in jobs]
    if compiled:
        console.print(aot_tables.instances(compiled))
        for line in aot_tables.lines(compiled):
            console.print(line, highlight=False, soft_wrap=True)
    for each in skipped:
        console.print(
            f"left out {each['model']} on {each['target']}: {each['reason']}", highlight=False, soft_wrap=True
        )
    faults = [fault for done in compiled for fault in done.faults]
    if flags.OUT.value:
        summary = _summary(compiled) | {"skipped": skipped, "faults": faults}
        report.write_summary(flags.OUT.value, summary)
        console.print(f"{flags.OUT.value}/ has summary.json", highlight=False)
    for done in compiled:
        memory.check(done.job.spec, done.fit, done.job.target.hardware)
    if faults:
        sys.exit("\n".join(["error: an engine could not run like this", *faults]))


def _run(job: Job, console: Console) -> Done:
    """Compiles an instance and shows it."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("compiling", total=None)
        done = aot_runs.run(
            job, lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
        )
    console.print(aot_tables.programs(done))
    return done


def _summary(compiled: list[Done]) -> dict[str, Any]:
    given = flags.given() | {"target": TARGET.value, "check": CHECK.value}
    return {
        "provenance": provenance.collect(given),
        "instances": [aot_runs.instance_entry(done) for done in compiled],
        "programs": [entry for done in compiled for entry in aot_runs.program_entries(done)],
    }


if __name__ == "__main__":
    launcher.run(main)
