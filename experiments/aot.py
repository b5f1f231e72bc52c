"""Compiles the programs of an engine for chips that are not there, by the vendors' own compilers. Flags enter, those of
an engine and --target; tables and, with --out, summary.json leave: whether each program compiles, its memory, whether
pages stay in place, collectives, costs, and what fits.

    python -m pdjax.experiments.aot --model=llama3.1-8b --target=tpu:v5e:2x4 --prefill_tp=4 --decode_tp=4 --out=aot

--check compiles a fixed list instead, and leaves out with a word what has no compiler here. --profile=FOLDER writes a
latency profile made of the compiler's estimates to that folder (`pdjax.experiments.aot_profile`).

Exit status: 2 with the numbers if an instance does not fit its chips, before anything is compiled where arithmetic
tells; 1 if a program does not compile or copies its pages. A case of the check that fails, however it does, leaves the
others to run and the status 1.
"""

import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
from absl import flags as absl_flags
from rich.console import Console
from rich.progress import Progress

from pdjax import build, provenance, report
from pdjax.aot import memory
from pdjax.aot.compiled import reason
from pdjax.aot.targets import Missing, Target, parse
from pdjax.experiments import aot_check, aot_profile, aot_runs, aot_tables, flags, launcher, published_data
from pdjax.experiments.aot_runs import Done, Job
from pdjax.models import source
from pdjax.schedulers.base import traits_of

TARGET = absl_flags.DEFINE_list("target", [], "Chips to compile for, such as tpu:v5e:2x4 or gpu:h100:2.")
CHECK = absl_flags.DEFINE_bool("check", False, "Compile a fixed list of programs instead of those of an engine.")
for _name in ("model", "out", "profile", "data"):
    absl_flags.declare_key_flag(_name)  # --help shows these

log = logging.getLogger("pdjax")


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
    # A compiler that is missing is told before another one has worked for minutes.
    chips = [target.devices() for target in targets]
    for (target, specs), devices in zip(every, chips, strict=True):
        for spec, first in aot_runs.distinct(specs):
            yield aot_runs.job(config, model, target, spec, specs, devices[first : first + spec.devices])


def check(console: Console) -> tuple[list[Done], list[dict[str, str]], list[str]]:
    """Compiles the fixed list, one case after the other.

    Returns:
        (what was compiled, what has no compiler here, why cases failed): entries of summary.json from the second on.
    """
    compiled: list[Done] = []
    skipped: list[dict[str, str]] = []
    failed: list[str] = []
    for case in aot_check.CASES:
        try:
            done = _run(aot_check.job(case), console)
            compiled.append(done)
            memory.check(done.job.spec, done.fit, done.job.target.hardware)
        except Missing as error:
            skipped.append({"target": case.target, "model": case.model, "reason": str(error)})
        except Exception as error:  # whatever it is, the other cases have their own to say
            log.exception("%s, %s", case.target, case.model)
            failed.append(f"{case.target}, {case.model}: {reason(error)}")
    return compiled, skipped, failed


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
    console = launcher.console(emoji=False)  # a target is no picture
    if CHECK.value and flags.PROFILE.value:
        raise ValueError(f"profile is {flags.PROFILE.value!r}; allowed with --check: none")
    if flags.PROFILE.value:
        estimate(console)
        return
    if flags.OUT.value:
        report.out_folder(flags.OUT.value)
    skipped: list[dict[str, str]] = []
    faults: list[str] = []
    if CHECK.value:
        compiled, skipped, faults = check(console)
    else:
        compiled = [_run(job, console) for job in engine_jobs([parse(text) for text in TARGET.value or [""]])]
    if compiled:
        console.print(aot_tables.instances(compiled))
        for line in aot_tables.lines(compiled):
            _say(console, line)
    for each in skipped:
        _say(console, f"left out {each['model']} on {each['target']}: {each['reason']}")
    faults += [fault for done in compiled for fault in done.faults]
    if flags.OUT.value:
        summary = _summary(compiled) | {"skipped": skipped, "faults": faults}
        report.write_summary(flags.OUT.value, summary)
        _say(console, f"{flags.OUT.value}/ has summary.json")
    if not CHECK.value:
        for done in compiled:
            memory.check(done.job.spec, done.fit, done.job.target.hardware)
    if faults:
        sys.exit("\n".join(["error: an engine could not run like this", *faults]))


def _run(job: Job, console: Console) -> Done:
    """Compiles an instance and shows it: a bar meanwhile, or a line per program where nobody watches."""
    began = time.perf_counter()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{job.target.text}: compiling", total=None)

        def tell(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)
            if not console.is_terminal:
                _say(console, f"{what} ({done} of {total})")

        done = aot_runs.run(job, tell)
    console.print(aot_tables.programs(done))
    seconds = time.perf_counter() - began
    _say(console, f"{job.target.text}, {job.name}: {len(done.answers)} programs in {seconds:.0f} s")
    return done


def _say(console: Console, line: str) -> None:
    """A line as it is: rich would take "[aot-tpu]" for the name of a style, and leave it out."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _summary(compiled: list[Done]) -> dict[str, Any]:
    given = flags.given() | {"target": TARGET.value, "check": CHECK.value}
    return {
        "provenance": provenance.collect(given),
        "instances": [aot_runs.instance_entry(done) for done in compiled],
        "programs": [entry for done in compiled for entry in aot_runs.program_entries(done)],
    }


if __name__ == "__main__":
    launcher.run(main)
