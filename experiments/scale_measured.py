"""What the closed forms of a large cluster are checked with: assumptions enter; what a decision of the controller
costs at several sizes, what it keeps of a live request, and what smaller simulated clusters serve when they are
overrun, leave. Called by `scale`.
"""

import dataclasses
import math
import random
import statistics
import time
import tracemalloc
from collections.abc import Iterator, Sequence

import numpy as np

from pdjax import fleet, network, simulation
from pdjax.controller import Controller
from pdjax.experiments import decision_times, scale_forms
from pdjax.experiments.scale_forms import Assumptions, Resource, Split
from pdjax.fleet import Fleet
from pdjax.messages import Arrival, Role, Tick
from pdjax.network import Link
from pdjax.request import Request, SamplingParams
from pdjax.schedulers import Disaggregated
from pdjax.simulated import SimulatedCluster
from pdjax.tally import Tally

KINDS = ("arrivals", "passes", "transfers")
OVERLOAD = 1.5  # of the rate that the closed forms promise
GENERATIONS = 4  # of rows: one to fill the instances, one that drains them, and two to look at
LEAST = 400  # requests, where there are few rows: half as many are off by 8 % either way, these by 2
VOCABULARY = 32_000


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """Of the controller with so many instances: mean CPU seconds of a decision about each of KINDS."""

    instances: int
    live: int
    seconds: dict[str, float]

    @property
    def mean_s(self) -> float:
        """Of a decision about a pass: nearly all are."""
        return self.seconds["passes"]


def costs(instances: int, rows: int, events: int) -> Costs:
    """Measures the policy `disaggregated`, half of the instances decoding `rows` rows each."""
    found = decision_times.decisions(Disaggregated(), instances, max(1, instances // 2 * rows), events, 1.0)
    return Costs(instances, found.live, {kind: statistics.fmean(getattr(found, kind)) for kind in KINDS})


def cost_at(measured: Sequence[Costs], instances: float) -> Costs:
    """With another number of instances: between two that were measured, what lies between; beyond the largest, on a
    line through all by least squares, but no less than there. `measured`: ascending."""
    sizes = [each.instances for each in measured]
    seconds = {}
    for kind in KINDS:
        values = [each.seconds[kind] for each in measured]
        found = float(np.interp(instances, sizes, values))
        if instances > sizes[-1] and len(sizes) > 1:
            slope, base = np.polyfit(sizes, values, 1)
            found = max(found, float(base + slope * instances))
        seconds[kind] = found
    return Costs(round(instances), 0, seconds)


def busy_s(assumed: Assumptions, split: Split, cost: Costs, rps: float) -> float:
    """CPU seconds of the controller in a second of serving so many requests."""
    per_request = cost.seconds["arrivals"] + cost.seconds["passes"] + cost.seconds["transfers"]
    return rps * per_request + scale_forms.steps_per_s(assumed, split, rps) * cost.seconds["passes"]


def controllers(assumed: Assumptions, split: Split, measured: Sequence[Costs], rps: float) -> int:
    """So many, each with a share of the instances and of the requests, have less to do than there is time; as many as
    instances where even these would not do."""

    def share_s(count: int) -> float:
        return busy_s(assumed, split, cost_at(measured, assumed.instances / count), rps) / count

    return next((count for count in range(1, assumed.instances) if share_s(count) <= 1.0), assumed.instances)


# --- smaller clusters ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """A cluster that is overrun: what the closed forms say that it serves, and what it served in simulation.

    Attributes:
        first: the resource that is used up first.
        preempted: how often in the mean a request lost its row to older ones, and was computed again.
        requests_per_minute: simulated, of one core.
    """

    what: str
    split: Split
    first: str
    predicted_rps: float
    simulated_rps: float
    preempted: float
    requests_per_minute: float

    @property
    def difference(self) -> float:
        return self.simulated_rps / self.predicted_rps - 1


def cluster(assumed: Assumptions, split: Split) -> Fleet:
    """Its instances, with as many decode rows as the limit on TPOT allows, on links of their own to a switch."""
    rows = assumed.rows_by_tpot()
    pools = [
        assumed.instance.pool(Role.PREFILL, split.prefill),
        assumed.instance.pool(Role.DECODE, split.decode, max_rows=rows),
    ]
    nic = Link("nic", assumed.nic_bytes_per_s)
    return fleet.build(pools, network.switched(nic, split.prefill + split.decode))


def check(what: str, assumed: Assumptions, split: Split, seed: int) -> Check:
    """Serves requests at OVERLOAD times what the closed forms promise, so many that the middle of the run is steady."""
    first = limits(assumed, split)[0]
    rate = OVERLOAD * first.rps
    count = max(GENERATIONS * split.decode * scale_forms.rows_of(assumed), LEAST)
    requests = simulation.asks([(assumed.prompt, assumed.answer)] * count, simulation.poisson(rate, count, seed))
    began = time.process_time()
    served = simulation.simulate(cluster(assumed, split), requests, Disaggregated())
    minutes = (time.process_time() - began) / 60
    ends = sorted(record.timeline.finished_s or math.inf for record in served.records)
    low, high = count // 3, 2 * count // 3
    return Check(
        what,
        split,
        first.name,
        first.rps,
        (high - low) / (ends[high] - ends[low]),
        sum(record.preemptions for record in served.records) / count,
        count / minutes,
    )


def limits(assumed: Assumptions, split: Split) -> list[Resource]:
    """Of what a simulated cluster has: its controller takes no time, and its switches pass on everything."""
    every = scale_forms.resources(assumed, split, lambda rps: 0.0)
    return [each for each in every if each.name not in ("one controller", "switches between them")]


# --- memory ----------------------------------------------------------------------------------------------------------


def bytes_per_live_request(assumed: Assumptions, seed: int) -> float:
    """That Python keeps for a request that is being served, its prompt's ids and its tokens' times included: of a
    controller that is told every step, as engines tell it, at nine tenths of what a small cluster can serve."""
    split = scale_forms.split_of(dataclasses.replace(assumed, instances=4))
    rate = 0.9 * limits(assumed, split)[0].rps
    answer_s = assumed.answer * assumed.step_s(assumed.rows_at(rate / split.decode))
    small = cluster(assumed, split)
    world = SimulatedCluster(small.specs, small.latency, network=small.network)
    controller = Controller(small.specs, Disaggregated(), small.latency, Tally(), simulation.TIMEOUT_S)
    coming = _requests(assumed, rate, seed)
    tracemalloc.start()
    try:
        began, _ = tracemalloc.get_traced_memory()
        _post(world, coming)
        while world.now() < 1.5 * answer_s:
            event = world.next_event(None)
            if isinstance(event, Arrival):
                _post(world, coming)
            for command in controller.handle(event or Tick(), world.now()):
                world.submit(command)
        now, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (now - began) / len(controller.books.live)


def _requests(assumed: Assumptions, rate: float, seed: int) -> Iterator[Request]:
    """With prompts of their own, without end."""
    draw = random.Random(seed)
    at_s, number = 0.0, 0
    while True:
        prompt = tuple(draw.randrange(VOCABULARY) for _ in range(assumed.prompt))
        yield Request(number, prompt, SamplingParams(max_tokens=assumed.answer, seed=number), arrival_s=at_s)
        at_s, number = at_s + draw.expovariate(rate), number + 1


def _post(world: SimulatedCluster, coming: Iterator[Request]) -> None:
    request = next(coming)
    world.post(Arrival(request), request.arrival_s)
