"""Serves a workload with each scheduler in turn, on equal devices, and compares them. Flags enter; answers, a table and
the files of `pdjax.report` leave. Run as `python -m pdjax.experiments.serve`.

The first run's answers are streamed to the terminal. All runs get the same requests at the same times.
"""

import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags
from rich.console import Console
from rich.progress import Progress

import pdjax
from pdjax import build, metrics, prompts, provenance, replay, report
from pdjax.config import EngineConfig
from pdjax.experiments import flags, launcher, table
from pdjax.experiments.answers import Answers
from pdjax.models import source
from pdjax.report import Report
from pdjax.schedulers import SCHEDULERS
from pdjax.schedulers.base import traits_of
from pdjax.workload import Workload

COMPARED = ("colocated", "disaggregated", "dynamic")

LOG_EVENTS = absl_flags.DEFINE_bool(
    "log_events", False, "Write every event to events.jsonl in --out (events-NAME.jsonl of each of several schedulers)."
)
absl_flags.adopt_module_key_flags(flags)  # --help shows them
absl_flags.set_default(flags.SCHEDULER, "all")
absl_flags.set_default(flags.OUT, "out")


def schedulers(value: str) -> tuple[str, ...]:
    """The policies that --scheduler names: one, several with commas, or "all" that are compared by default."""
    names = COMPARED if value == "all" else tuple(value.split(","))
    for name in names:
        if name not in SCHEDULERS or names.count(name) > 1:
            raise ValueError(f"scheduler is {value!r}; allowed: all, or some of {', '.join(SCHEDULERS)} with commas")
    return names


def event_log(name: str, names: Sequence[str]) -> str:
    """Where the run of scheduler `name`, one of `names`, writes its events; "" for nowhere."""
    if not LOG_EVENTS.value:
        return ""
    if not flags.OUT.value:
        raise ValueError("log_events is True without out; allowed: with a folder to write to")
    return str(Path(flags.OUT.value) / ("events.jsonl" if len(names) == 1 else f"events-{name}.jsonl"))


def build_workload(configs: Sequence[EngineConfig], found: source.Source) -> Workload:
    """The requests of the flags, for engines of these configurations of the model, which are checked first."""
    limits = []
    for config in configs:
        specs = build.specs_of(config, found.config, traits_of(build.scheduler_of(config)))
        limits += [spec.max_model_len for spec in specs]
    limit = min(limits)
    workload = flags.build_workload(vocab_size=found.config.vocab_size, max_model_len=limit)
    if flags.WARMUP_REQUESTS.value >= len(workload.items):
        raise ValueError(f"warmup_requests is {flags.WARMUP_REQUESTS.value}; allowed: fewer than {len(workload.items)}")
    replay.check(workload, lambda prompt, params: prompts.check_length(prompts.encode(prompt, found), params, limit))
    return workload


def serve(
    configs: Mapping[str, EngineConfig],
    workload: Workload,
    console: Console,
    *,
    platform: str | None = None,
    warmup_requests: int = 0,
    targets: Sequence[metrics.Target] = (),
    attainment: float = metrics.ATTAINMENT,
    make_engine: Callable[..., Any] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Report]]:
    """Plays the workload once per configuration, one engine after the other. `platform`: of their devices; None: the
    one at hand.

    Returns:
        (entries of summary.json's `runs`, the reports by scheduler).
    """
    entries: list[dict[str, Any]] = []
    reports: dict[str, Report] = {}
    for name, config in configs.items():
        console.print(f"[bold]{name}[/bold]")
        with _engine(config, console, make_engine or pdjax.Engine) as engine:
            if (said := launcher.control_latency(engine)) is not None:
                console.print(said, highlight=False, soft_wrap=True)
            reports[name] = _play(engine, workload, console, answers=not entries).without(warmup_requests)
            console.print(_outcome(reports), highlight=False)
            entries.append(
                {
                    "scheduler": name,
                    "model": config.model,
                    "dtype": build.dtype_of(config, platform),
                    **reports[name].summary(targets=targets, attainment=attainment),
                    "warmup_s": engine.warmup_s,
                    "compile_s": engine.compile_s,
                    "compiles_while_serving": engine.compiles_while_serving,
                }
            )
    return entries, reports


def _outcome(reports: Mapping[str, Report]) -> str:
    """One line on the last of the runs."""
    names = list(reports)
    first, last = reports[names[0]], reports[names[-1]]
    line = f"{len(last.records)} requests in {last.duration_s:.1f} s"
    if first is last:
        return line
    same = sum(a.token_ids == b.token_ids for a, b in zip(first.records, last.records, strict=True))
    return f"{line}; {same} of {len(last.records)} answers equal those of {names[0]}"


def _engine(config: EngineConfig, console: Console, make: Callable[..., Any]) -> Any:
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=None)
        return make(config, lambda done, total, what: bar.update(task, completed=done, total=total, description=what))


def _play(engine: Any, workload: Workload, console: Console, *, answers: bool) -> Report:
    if answers:
        with Answers(console, workload.items) as show:
            return engine.replay(workload, on_text=show)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=len(workload.items))
        return engine.replay(workload, progress=lambda done, total: bar.update(task, completed=done))


def check(entries: Sequence[Mapping[str, Any]]) -> None:
    """Exit with status 1 if a request of any run failed: its numbers are those of another workload."""
    failed = {entry["scheduler"]: entry["failed"] for entry in entries if entry["failed"]}
    if failed:
        sys.exit(f"error: requests failed: {failed}; the reasons are in requests.jsonl")


def main(argv: list[str]) -> None:
    del argv
    logging.getLogger("pdjax").setLevel(flags.LOG_LEVEL.value.upper())
    names = schedulers(flags.SCHEDULER.value)
    configs = {name: flags.build_config(scheduler=name, event_log=event_log(name, names)) for name in names}
    launcher.on_ranks(lambda: compare(configs), next(iter(configs.values())))


def compare(configs: Mapping[str, EngineConfig]) -> None:
    """Serves with each of the configurations, which differ in the policy only, and shows and writes the results."""
    one = next(iter(configs.values()))
    found = source.resolve(one.model, max_len=one.max_model_len)
    for config in configs.values():
        build.check_meshes(config, found.config, traits_of(build.scheduler_of(config)))
    ranks = launcher.ranks_for(one)
    devices = () if ranks else build.devices_for(one.devices)
    platform = ranks[1].platform if ranks else devices[0].platform
    workload = build_workload(tuple(configs.values()), found)
    if folder := flags.OUT.value:
        report.out_folder(folder)
    console = launcher.console()
    console.print(workload.note, highlight=False, soft_wrap=True)
    entries, reports = serve(
        configs,
        workload,
        console,
        platform=platform,
        warmup_requests=flags.WARMUP_REQUESTS.value,
        targets=flags.build_targets(),
        attainment=flags.ATTAINMENT.value,
    )
    console.print(table.comparison(entries))
    if any(entry["by_class"] for entry in entries):
        console.print(table.classes(entries))
    classes = {f" of class {kind.name}": kind.slo for kind in one.slo_classes} or {"": flags.build_slo()}
    for name, slo in classes.items():
        limits = dataclasses.asdict(slo)
        words = ", ".join(f"{limit} <= {value:g}" for limit, value in limits.items() if value is not None)
        console.print(f"SLO of a request{name}: {words or 'none'}.", highlight=False)
    console.print("Longest gap: between two tokens of one answer.", highlight=False)
    if platform == "cpu":
        console.print("The devices of a CPU share its cores: this shows behaviour, not what separate hardware gains.")
    if folder:
        origin = provenance.collect(flags.given(), devices=devices, ranks=ranks)
        report.write(folder, {"provenance": origin, "workload": workload.note, "runs": entries}, reports)
        console.print(f"{folder}/ has summary.json, requests.jsonl, timeline.json and plots", highlight=False)
    check(entries)


if __name__ == "__main__":
    launcher.run(main)
