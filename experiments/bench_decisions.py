"""How long the controller takes to decide in a large cluster, per policy and kind of event. Flags enter; a table and
`summary.json` leave. Run as `python -m pdjax.experiments.bench_decisions`.

A decision is one `Controller.handle`: the event in the books, whatever the policy is asked, and the commands. Instances
are simulated and tokens only counted: handing them out is no decision, and costs the same under every policy. Requests
arrive until `live` of them are there and stay, either with room for all of them in the decode batches (`roomy`) or for
a quarter, the rest waiting (`crowded`). Then every event is timed, in seconds of the CPU, while more requests arrive.
"""

import dataclasses
import gc
import time
from typing import Any

import numpy as np
from absl import flags as absl_flags
from rich.console import Console
from rich.table import Table

from pdjax import provenance, report
from pdjax.experiments import flags, launcher
from pdjax.latency import LatencyModel
from pdjax.messages import Arrival, InstanceSpec, IterationDone, Role
from pdjax.request import SLO, Request, SamplingParams
from pdjax.schedulers import SCHEDULERS, Scheduler
from pdjax.schedulers.admission import Admission
from pdjax.schedulers.base import traits_of
from pdjax.simulated import Timing
from pdjax.testing import World

BAR_S = 1e-3
LATENCY = LatencyModel((5e-3, 1e-5, 0.0, 1e-5, 1e-9, 0.0))  # of a fast accelerator: prompts are soon computed
PROMPT, TOKENS, PAGE = 128, 4000, 64
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


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each decision, by what it was about, and the requests that were there."""

    arrivals: list[float]
    passes: list[float]
    live: int


def decisions(scheduler: Scheduler, instances: int, live: int, events: int, room: float) -> Times:
    """Times decisions of a fresh controller with `live` requests.

    Args:
        scheduler: a fresh policy.
        instances: half of them prefill and half decode, unless the policy is colocated.
        live: requests.
        events: passes that are timed; an arrival for every tenth of them.
        room: how many rows decode instances have, as a share of `live`.
    """
    colocated = traits_of(scheduler).colocated
    roles = [Role.MIXED] * instances
    if not colocated:
        roles = [Role.PREFILL if index < instances // 2 else Role.DECODE for index in range(instances)]
    decoders = sum(role is not Role.PREFILL for role in roles)
    rows = 1 + int(room * live * 1.1 / decoders)
    length = PROMPT + TOKENS
    world = World(
        [
            InstanceSpec(index, role, 1, rows, 2048, 16, PAGE, 1 + (rows + 1) * -(-length // PAGE), length, 1000)
            for index, role in enumerate(roles)
        ],
        scheduler,
        LATENCY,
        machine=lambda _: Timing(),
    )
    prompt = tuple(range(PROMPT))

    def ask(number: int, at_s: float) -> Request:
        limits = SLO(ttft_ms=5000.0, tpot_ms=500.0)
        return Request(number, prompt, SamplingParams(max_tokens=TOKENS), slo=limits, arrival_s=at_s)

    world.add(*(ask(number, 1e-4 * number) for number in range(live)))
    books = world.controller.books
    while len(books.live) < live or (room >= 1 and sum(lane.rows for lane in books.instances) < live):
        world.step()
    timed = Times([], [], len(books.live))
    handle, number = world.controller.handle, live
    gc.collect()
    gc.disable()  # of the requests' own making: a collection costs the same whatever the policy
    try:
        while len(timed.passes) < events:
            if len(timed.passes) >= 10 * (number - live + 1):
                world.add(ask(number, world.cluster.now()))
                number += 1
            event, now = world.cluster.next_event(None), world.cluster.now()
            assert event is not None
            began = time.thread_time()
            commands = handle(event, now)
            seconds = time.thread_time() - began
            if isinstance(event, Arrival):
                timed.arrivals.append(seconds)
            elif isinstance(event, IterationDone):
                timed.passes.append(seconds)
            for command in commands:
                world.cluster.submit(command)
    finally:
        gc.enable()
    return timed


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
    Console().print(table)
    if folder := flags.OUT.value:
        origin = provenance.collect({"instances": INSTANCES.value, "live": LIVE.value, "events": EVENTS.value})
        report.write_summary(folder, {"provenance": origin, "bar_s": BAR_S, "decision_s": entries})


if __name__ == "__main__":
    launcher.run(main)
