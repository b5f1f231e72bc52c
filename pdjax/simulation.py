"""Serves requests in virtual time: a `pdjax.fleet.Fleet`, requests and a policy enter, a `Report` leaves, or whatever a
sink of one's own makes of tokens and records. Called by the planner, the launchers, `pdjax.rerun` and users.

    requests = asks([(512, 64)] * 1000, poisson(2.0, 1000, seed=0), SLO(ttft_ms=250, tpot_ms=100))
    report = simulate(fleet, requests, Disaggregated())

The controller and the policies are those of the engine. Requests are taken one by one as they arrive, so that what is
in memory is what is live: with a sink that keeps no records (`pdjax.tally`) a trace may be as long as it likes.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pdjax.controller import Controller, Sink
from pdjax.fleet import Fleet
from pdjax.messages import Arrival, InstanceSpec, Tick
from pdjax.record import FlipRecord, IterationRecord, MoveRecord, RequestRecord, TransferRecord
from pdjax.report import Report
from pdjax.request import SLO, Request, SamplingParams
from pdjax.schedulers.base import Scheduler
from pdjax.simulated import SimulatedCluster

RUN_STEPS = 128  # decode steps that the simulation takes at once, at most: what a cut drops was computed in vain
TIMEOUT_S = 1e9  # of transfers, which are as slow as they are


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """An instance is lost at a time, seconds."""

    instance: int
    at_s: float


def simulate(
    fleet: Fleet,
    requests: Iterable[Request],
    scheduler: Scheduler,
    *,
    faults: Sequence[Fault] = (),
    max_queue: int = 0,
    transfer_timeout_s: float = TIMEOUT_S,
    on_failure: str = "recompute",
) -> Report:
    """Serves all requests and keeps every record.

    Args:
        fleet: the instances.
        requests: in order of arrival, with ids that ascend.
        scheduler: a fresh policy.
        faults: instances that are lost.
        max_queue, transfer_timeout_s, on_failure: as for `Controller`.

    Raises:
        ValueError: requests that are not in order.
    """
    sink = Records()
    serve(
        fleet,
        requests,
        scheduler,
        sink,
        faults=faults,
        max_queue=max_queue,
        transfer_timeout_s=transfer_timeout_s,
        on_failure=on_failure,
    )
    return sink.report(fleet.specs)


def serve(
    fleet: Fleet,
    requests: Iterable[Request],
    scheduler: Scheduler,
    sink: Sink,
    *,
    faults: Sequence[Fault] = (),
    max_queue: int = 0,
    transfer_timeout_s: float = TIMEOUT_S,
    on_failure: str = "recompute",
) -> float:
    """Serves all requests; tokens (none are computed) and records go to the sink. Arguments and errors as `simulate`.

    Returns:
        The time when all was done, seconds.
    """
    cluster = SimulatedCluster(fleet.specs, fleet.latency, network=fleet.network, layer_groups=fleet.layer_groups)
    believed = fleet.believed or fleet.latency
    controller = Controller(
        fleet.specs, scheduler, believed, sink, transfer_timeout_s, max_queue, RUN_STEPS, on_failure
    )
    for fault in faults:
        cluster.lose(fault.instance, "lost", fault.at_s)
    coming = iter(requests)
    last_s = _post_next(cluster, coming, 0.0)
    while True:
        deadline = controller.next_deadline()
        event = cluster.next_event(None if deadline is None else max(0.0, deadline - cluster.now()))
        if event is None and deadline is None:
            return cluster.now()
        if isinstance(event, Arrival):
            last_s = _post_next(cluster, coming, last_s)
        for command in controller.handle(event or Tick(), cluster.now()):
            cluster.submit(command)


def _post_next(cluster: SimulatedCluster, coming: Iterator[Request], last_s: float) -> float:
    request = next(coming, None)
    if request is None:
        return last_s
    if not request.arrival_s >= last_s:
        raise ValueError(
            f"request {request.id} arrives at {request.arrival_s!r} s, behind one of {last_s} s; allowed: in order"
        )
    cluster.post(Arrival(request), request.arrival_s)
    return request.arrival_s


# --- requests -------------------------------------------------------------------------------------------------------


def asks(lengths: Iterable[tuple[int, int]], arrivals_s: Iterable[float], slo: SLO | None = None) -> Iterator[Request]:
    """Requests of these lengths (prompt, answer) at these times; made one by one. Their prompts are zeros."""
    sampling: dict[int, SamplingParams] = {}
    limits = slo or SLO()
    zeros: tuple[int, ...] = ()
    for number, ((prompt, answer), arrival_s) in enumerate(zip(lengths, arrivals_s, strict=False)):
        if prompt < 1 or answer < 1:
            raise ValueError(f"lengths[{number}] is {prompt}, {answer}; allowed: at least one token each")
        if prompt > len(zeros):
            zeros = (0,) * (2 * prompt)
        if answer not in sampling:
            sampling[answer] = SamplingParams(max_tokens=answer, temperature=0.0, seed=0)
        yield Request(number, zeros[:prompt], sampling[answer], slo=limits, arrival_s=arrival_s)


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Arrivals with exponential gaps, the first at 0: seconds."""
    if not 0 < rate < float("inf"):
        raise ValueError(f"rate is {rate!r}; allowed: requests per second > 0")
    gaps = np.random.default_rng(seed).exponential(1 / rate, max(0, count - 1))
    return list(itertools.accumulate(gaps.tolist(), initial=0.0))[:count]


# --- records --------------------------------------------------------------------------------------------------------


class Records:
    """A sink that keeps every record. An answer ends early where `ends` says so, by the number of the token among those
    since `count` was 0."""

    def __init__(self) -> None:
        self.ends: tuple[int, ...] = ()
        self.count = 0
        self._records: dict[int, RequestRecord] = {}
        self._iterations: list[IterationRecord] = []
        self._transfers: list[TransferRecord] = []
        self._revisions: list[FlipRecord | MoveRecord] = []

    def token(self, request: Request, token: int, time_s: float, logprob: float | None) -> bool:
        self.count += 1
        return self.count - 1 in self.ends

    def done(self, request: Request, record: RequestRecord) -> None:
        self._records[request.id] = record

    def iteration(self, record: IterationRecord) -> None:
        self._iterations.append(record)

    def transfer(self, record: TransferRecord) -> None:
        self._transfers.append(record)

    def revised(self, record: FlipRecord | MoveRecord) -> None:
        self._revisions.append(record)

    def report(self, specs: tuple[InstanceSpec, ...]) -> Report:
        records = [self._records[number] for number in sorted(self._records)]
        first = min((record.timeline.arrival_s for record in records), default=0.0)
        last = max((record.timeline.finished_s or 0.0 for record in records), default=0.0)
        return Report(records, self._iterations, self._transfers, last - first, specs, revisions=tuple(self._revisions))
