"""How long the controller takes to decide in a large cluster, per policy and kind of event. Flags enter; a table and
`summary.json` leave. Run as `python -m pdjax.experiments.bench_decisions`.

The decode batches have room either for all of the live requests (`roomy`) or for a quarter, the rest waiting
(`crowded`); `decision_times` says what is timed.
"""

from typing import Any

import numpy as np
from absl import flags as absl_flags
from rich.table import Table

from pdjax import provenance, report
from pdjax.experiments import flags, launcher
from pdjax.experiments.decision_times import decisions
from pdjax.schedulers import SCHEDULERS, Scheduler
from pdjax.schedulers.admission import Admission

BAR_S = 1e-3
GUARDED = ("disaggregated", "dynamic")  # are measured with admission too
ROOM = {"roomy": 1.0, "crowded": 0.25}  # share of the live requests that decode batches have room for

absl_flags.declare_key_flag("out")
INSTANCES = absl_flags.DEFINE_integer("instances", 64, "Of the cluster.", lower_bound=2)
LIVE = absl_flags.DEFINE_integer("live", 10_000, "Requests that are there.", lower_bound=1)
EVENTS = absl_flags.DEFINE_integer("events", 2000, "Passes that are timed.", lower_bound=1)
POLICIES = absl_flags.DEFINE_list(
    "policies",
    [*SCHEDULERS, *(f"admission:{name}" for name in GUARDED)],
    "Names of policies, with commas; admission:NAME is that one with admission around it.",
)


def policy(name: str) -> Scheduler:
    """A fresh policy.

    Raises:
        ValueError: nothing is called that.
    """
    guard, _, inner = name.rpartition(":")
    if inner not in SCHEDULERS or guard not in ("", "admission"):
        raise ValueError(f"policies has {name!r}; allowed: {', '.join(SCHEDULERS)}, each also after 'admission:'")
    made = SCHEDULERS[inner](None)
    return Admission(made) if guard else made


def main(argv: list[str]) -> None:
    del argv
    table = Table("policy", "", "arrival: median, p99 ms", "pass: median, p99 ms", f"bar {1e3 * BAR_S:g} ms")
    table.title = f"a decision with {INSTANCES.value} instances and {LIVE.value} live requests"
    entries: dict[str, Any] = {}
    for name in POLICIES.value:
        policy(name)  # a mistake is told before anything is measured
    for name in POLICIES.value:
        entries[name] = {}
        for case, room in ROOM.items():
            if room < 1 and name.startswith("admission:"):
                continue  # it lets no crowd in
            timed = decisions(policy(name), INSTANCES.value, LIVE.value, EVENTS.value, room)
            entry = entries[name][case] = {
                f"{kind}_{what}_s": float(np.percentile(seconds, percent))
                for kind, seconds in (("arrival", timed.arrivals), ("pass", timed.passes))
                for what, percent in (("p50", 50), ("p99", 99))
            }
            ok = max(entry["arrival_p99_s"], entry["pass_p99_s"]) <= BAR_S
            cells = (
                f"{1e3 * entry[f'{kind}_p50_s']:.2f}, {1e3 * entry[f'{kind}_p99_s']:.2f}"
                for kind in ("arrival", "pass")
            )
            table.add_row(name, case, *cells, "ok" if ok else "above")
    launcher.console().print(table)
    if folder := flags.OUT.value:
        origin = provenance.collect({"instances": INSTANCES.value, "live": LIVE.value, "events": EVENTS.value})
        report.write_summary(folder, {"provenance": origin, "bar_s": BAR_S, "decision_s": entries})


if __name__ == "__main__":
    launcher.run(main)
