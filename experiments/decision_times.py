"""Times the controller's decisions: a policy and the size of a cluster enter, CPU seconds of every decision leave.
Called by `bench_decisions` and `scale`.

A decision is one `Controller.handle`: the event in the books, whatever the policy is asked, and the commands. Instances
are simulated and tokens only counted: handing them out is no decision, and costs the same under every policy. Requests
arrive until `live` of them are there and stay. Then every event is timed while more requests arrive.
"""

import dataclasses
import gc
import time

from pdjax.latency import LatencyModel
from pdjax.messages import Arrival, InstanceSpec, IterationDone, Role, TransferDone
from pdjax.request import SLO, Request, SamplingParams
from pdjax.schedulers import Scheduler
from pdjax.schedulers.base import traits_of
from pdjax.simulated import Timing
from pdjax.testing import World

LATENCY = LatencyModel((5e-3, 1e-5, 0.0, 1e-5, 1e-9, 0.0))  # of a fast accelerator: prompts are soon computed
PROMPT, TOKENS, PAGE = 128, 4000, 64


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each decision, by what it was about, and the requests that were there: `passes` of all kinds."""

    arrivals: list[float]
    passes: list[float]
    transfers: list[float]
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
    timed = Times([], [], [], len(books.live))
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
            elif isinstance(event, TransferDone):
                timed.transfers.append(seconds)
            for command in commands:
                world.cluster.submit(command)
    finally:
        gc.enable()
    return timed
