"""Runs an events.jsonl again: shows that the controller decides alike, or what another policy would have made of the
same requests. A log enters; one line, or a table and the files of `pdjax.report`, leave. Run as
`python -m pdjax.experiments.replay_events --log=out/events.jsonl [--scheduler=colocated]`.

With --scheduler the requests (arrivals, prompts, lengths of answers) are served in virtual time by the recorded policy
and by the other one, on the recorded instances and latency models, and both stand beside what was recorded.
"""

import sys
from pathlib import Path

from absl import flags as absl_flags
from rich.console import Console

from pdjax import eventlog, provenance, report, rerun
from pdjax.experiments import flags, launcher, table
from pdjax.report import Report
from pdjax.schedulers import SCHEDULERS

LOG = absl_flags.DEFINE_string("log", None, "An events.jsonl, as serve writes it with --log_events.")
for _name in ("scheduler", "out", "slo", "attainment"):
    absl_flags.declare_key_flag(_name)  # --help shows these
absl_flags.set_default(flags.SCHEDULER, "")


def check(log: eventlog.Log) -> tuple[str, bool]:
    """One line on a replay with the recorded policy, and whether every command was equal."""
    replayed = rerun.replay(log)
    line = f"{replayed.events} events, {replayed.commands} commands equal"
    return (line, True) if not replayed.difference else (f"{line}; then {replayed.difference}", False)


def compare(log: eventlog.Log, other: str) -> dict[str, Report]:
    """The recorded run, its simulation with the recorded policy, and that with another, by name.

    Raises:
        ValueError: an unknown policy, or one that the log's instances cannot serve.
    """
    if other not in SCHEDULERS:
        raise ValueError(f"scheduler is {other!r}; allowed: {', '.join(SCHEDULERS)}")
    requests = rerun.workload_of(log)
    if not requests:
        raise ValueError("log has no arrival; allowed: at least one")
    runs: dict[str, Report] = {}
    if log.header.scheduler in SCHEDULERS:  # a policy of the user's own is not at hand
        recorded = rerun.replay(log).report
        if recorded.records:
            runs[f"{log.header.scheduler}, recorded"] = recorded
        runs[f"{log.header.scheduler}, simulated"] = rerun.simulate(requests, log.header, rerun.policy_of(log.header))
    if other != log.header.scheduler:
        runs[f"{other}, simulated"] = rerun.simulate(requests, log.header, SCHEDULERS[other](log.header.stream_from))
    return runs


def main(argv: list[str]) -> None:
    del argv
    if not LOG.value:
        raise ValueError("log is not given; allowed: an events.jsonl, as serve writes it with --log_events")
    log = eventlog.read(LOG.value)
    console = Console()
    if not flags.SCHEDULER.value:
        line, same = check(log)
        if not same:
            sys.exit(f"error: {line}")
        console.print(line, highlight=False, soft_wrap=True)
        return
    runs = compare(log, flags.SCHEDULER.value)
    entries = [
        {"scheduler": name, **run.summary(targets=flags.build_targets(), attainment=flags.ATTAINMENT.value)}
        for name, run in runs.items()
    ]
    console.print(table.comparison(entries))
    if folder := flags.OUT.value:
        report.write(Path(folder), {"provenance": provenance.collect(flags.given()), "runs": entries}, runs)
        console.print(f"{folder}/ has summary.json, requests.jsonl, timeline.json and plots", highlight=False)


if __name__ == "__main__":
    launcher.run(main)
