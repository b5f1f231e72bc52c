"""Runs an events.jsonl again: shows that the controller decides alike, or what another policy would have made of the
same requests. A log enters; one line, or a table and the files of `pdjax.report`, leave. Run as
`python -m pdjax.experiments.replay_events --log=out/events.jsonl [--scheduler=colocated]`.

With --scheduler the requests (arrivals, prompts, limits, classes, lengths of answers) are served in virtual time by the
recorded policy and by the other one, on the recorded instances and latency models, and both stand beside what was
recorded: how far the recorded policy's simulation is from its record says what the other column is worth. Admission and
late drops are as recorded unless --admission or --drop_late says otherwise.
"""

import dataclasses
import sys
from pathlib import Path

from absl import flags as absl_flags

from pdjax import eventlog, provenance, report, rerun
from pdjax.eventlog import Header
from pdjax.experiments import flags, launcher, table
from pdjax.report import Report
from pdjax.schedulers import SCHEDULERS

LOG = absl_flags.DEFINE_string("log", None, "An events.jsonl, as serve writes it with --log_events.")
for _name in ("scheduler", "admission", "drop_late", "out", "slo", "attainment"):
    absl_flags.declare_key_flag(_name)  # --help shows these


def check(log: eventlog.Log) -> tuple[str, bool]:
    """One line on a replay with the recorded policy, and whether every command was equal."""
    replayed = rerun.replay(log)
    line = f"{replayed.events} events, {replayed.commands} commands equal"
    return (line, True) if not replayed.difference else (f"{line}; then {replayed.difference}", False)


def compare(
    log: eventlog.Log, other: str, *, admission: bool | None = None, drop_late: bool | None = None
) -> dict[str, Report]:
    """The recorded run, its simulation with the recorded policy, and that with another, by name.

    Args:
        other: a name of SCHEDULERS; the recorded one, too.
        admission, drop_late: what the other is wrapped in; None: what the recorded one was.

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
            runs[f"{words(log.header)}, recorded"] = recorded
    wanted = dataclasses.replace(
        log.header,
        scheduler=other,
        admission=log.header.admission if admission is None else admission,
        drop_late=log.header.drop_late if drop_late is None else drop_late,
    )
    for header in dict.fromkeys((log.header, wanted)):
        if header.scheduler in SCHEDULERS:
            runs[f"{words(header)}, simulated"] = rerun.simulate(requests, log.header, rerun.policy_of(header))
    return runs


def words(header: Header) -> str:
    """A policy and what it is wrapped in."""
    wrapped = (name for name in ("admission", "drop_late") if getattr(header, name))
    return " + ".join((header.scheduler, *wrapped))


def _given(name: str) -> bool | None:
    """The value of a flag that was given."""
    flag = absl_flags.FLAGS[name]
    return flag.value if flag.present else None


def main(argv: list[str]) -> None:
    del argv
    if not LOG.value:
        raise ValueError("log is not given; allowed: an events.jsonl, as serve writes it with --log_events")
    log = eventlog.read(LOG.value)
    console = launcher.console()
    if not flags.SCHEDULER.value:
        line, same = check(log)
        if not same:
            sys.exit(f"error: {line}")
        console.print(line, highlight=False, soft_wrap=True)
        return
    runs = compare(log, flags.SCHEDULER.value, admission=_given("admission"), drop_late=_given("drop_late"))
    entries = [
        {"scheduler": name, **run.summary(targets=flags.build_targets(), attainment=flags.ATTAINMENT.value)}
        for name, run in runs.items()
    ]
    console.print(table.comparison(entries))
    if any(entry["by_class"] for entry in entries):
        console.print(table.classes(entries))
    if folder := flags.OUT.value:
        report.write(Path(folder), {"provenance": provenance.collect(flags.given()), "runs": entries}, runs)
        console.print(f"{folder}/ has summary.json, requests.jsonl, timeline.json and plots", highlight=False)


if __name__ == "__main__":
    absl_flags.set_default(flags.SCHEDULER, "")
    launcher.run(main)
