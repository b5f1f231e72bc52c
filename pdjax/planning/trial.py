"""Plays a cluster that is planned, in virtual time, at one rate after the other: a `Task` enters, a `Found` leaves, the
goodput and what it fails by. Called by `pdjax.planning.search`, mostly in processes of its own: all of it is plain data
and plain functions, and nothing here imports JAX.

A run starts empty, so its first requests are not judged; requests keep coming until the last judged one has ended. It
is over as soon as its outcome is certain. Phases are judged alone as DistServe does (section 4.1, algorithm 1): prefill
with answers of one token; decode behind a prefill instance whose passes take no time, and begun with as many rows, each
somewhere in its answer, as there would be in the long run. KV is pulled when there is room for it, so that whoever
waits for a decode instance has its first token, and the wait counts in TPOT.
"""

import contextlib
import dataclasses
import heapq
import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from pdjax import fleet, goodput, metrics, simulation
from pdjax.curves import Curves, Decode
from pdjax.fleet import Pool
from pdjax.goodput import Bound, Trial
from pdjax.messages import Role
from pdjax.network import Network
from pdjax.planning import bounds
from pdjax.planning.mix import Mix
from pdjax.record import FlipRecord, IterationRecord, MoveRecord, RequestRecord, TransferRecord
from pdjax.request import SLO, Request
from pdjax.schedulers import SCHEDULERS

Phase = Literal["prefill", "decode", "both"]
Reason = Literal["", "TTFT: queueing", "TTFT: the prefill itself", "TPOT: decode steps", "KV memory", "link"]

FULL = 0.8  # of the KV memory held on average counts as full: rows come and go in whole requests
FIRST = 0.1  # of the judged requests go before them where no answers are decoded
WARM = 1.2  # times as long as an answer takes, requests come before them where answers are
TOLERANCE = 0.06  # of a goodput: within the bracket that is left it is interpolated


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A goodput to find.

    Attributes:
        policy: by the name of `pdjax.schedulers`.
        pools: the cluster.
        phase: what of requests is played and judged.
        guess: the rate to begin with.
        judged: requests of a run that are judged.
        network: the links that KV goes over; None: as the latency models say.
        max_runs, factor: of the search.
    """

    policy: str
    pools: tuple[Pool, ...]
    mix: Mix
    phase: Phase
    guess: float
    judged: int
    network: Network | None = None
    max_runs: int = 9
    factor: float = 1.3


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A goodput: requests per second; 0 where no rate that was tried is served. `bound` as in `pdjax.goodput`.
    `reason`: what most requests missed their limits by, at the lowest rate that is too high."""

    rate: float
    bound: Bound
    reason: Reason
    runs: int


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One run, and what most of its requests missed their limits by; "" if none missed any."""

    trial: Trial
    reason: Reason


def find(task: Task) -> Found:
    """The goodput of a task, by `pdjax.goodput.search`."""
    runs: dict[float, Run] = {}

    def run(rate: float) -> Trial:
        runs[rate] = play(task, rate)
        return runs[rate].trial

    trials = goodput.search(
        run,
        task.guess,
        target=task.mix.attainment,
        factor=task.factor,
        tolerance=TOLERANCE,
        max_runs=task.max_runs,
    )
    found = goodput.crossing(trials, task.mix.attainment)
    too_high = [rate for rate, one in runs.items() if one.trial.attainment < task.mix.attainment]
    reason = runs[min(too_high)].reason if too_high else ""
    most = _capacity(task)
    if found.rate > most and found.bound != "at most":
        # Requests are too few to show it: a queue that grows takes a while to use up what the limits leave.
        return Found(most, "", "KV memory", len(trials))
    return Found(0.0 if found.bound == "at most" else found.rate, found.bound, reason, len(trials))


def _capacity(task: Task) -> float:
    """What instances that decode have memory and slots for."""
    if task.phase == "prefill":
        return math.inf
    decoding = [pool for pool in task.pools if pool.role is not Role.PREFILL or task.policy == "dynamic"]
    return sum(pool.count * bounds.capacity(pool, task.mix) for pool in decoding)


def play(task: Task, rate: float) -> Run:
    """Serves the mix at a rate."""
    mix, pools = task.mix, task.pools
    slo = mix.slo
    if task.phase == "prefill":
        slo = SLO(ttft_ms=slo.ttft_ms)
    elif task.phase == "decode":
        slo = SLO(tpot_ms=slo.tpot_ms, itl_p99_ms=slo.itl_p99_ms)
        pools = (_no_time(pools), *pools)
    decoding = [pool for pool in pools if pool.role is not Role.PREFILL]
    first = math.ceil(FIRST * task.judged)
    running: list[tuple[int, int]] = []
    if task.phase == "both":
        first += math.ceil(WARM * rate * mix.steps * _step_s(decoding, mix, rate))
    elif task.phase == "decode":
        running = _running(decoding, mix, rate)
        first += len(running)
    lengths = mix.draw(2 * first + 4 * task.judged)
    if task.phase == "prefill":
        lengths = [(prompt, 1) for prompt, _ in lengths]
    arrivals = [0.0] * len(running) + simulation.poisson(rate, len(lengths), mix.seed)
    lengths = running + lengths
    judge = Judge(slo, first, task.judged, mix.attainment)
    with contextlib.suppress(Decided):
        simulation.serve(
            fleet.build(pools, task.network),
            judge.watched(simulation.asks(lengths, arrivals, slo)),
            SCHEDULERS[task.policy](None),
            judge,
        )
    memory = sum(pool.count * pool.kv_tokens for pool in decoding)
    return judge.run(rate, memory if task.phase != "prefill" else math.inf)


def _no_time(pools: tuple[Pool, ...]) -> Pool:
    """A prefill instance for decode instances alone. KV waits there for them, as much as would fill them again."""
    nothing = Curves((0.0, 0.0, 0.0), (Decode(0, 0.0, 0.0, 0.0),))
    room = sum(pool.count * pool.kv_tokens for pool in pools)
    return dataclasses.replace(pools[0], role=Role.PREFILL, count=1, latency=nothing, kv_tokens=room, devices=1, pp=1)


def _running(pools: list[Pool], mix: Mix, rate: float) -> list[tuple[int, int]]:
    """Rows of the long run as requests: an answer is met in proportion to its length, and anywhere in it."""
    count = sum(pool.count for pool in pools)
    rows = rate * mix.steps * _step_s(pools, mix, rate)
    most = count * bounds.most_rows(pools[0], mix, math.inf)
    rng = np.random.default_rng((mix.seed, 2))
    steps = np.asarray([answer - 1 for _, answer in mix.lengths])
    picks = rng.choice(len(steps), size=min(round(rows), most), p=steps / steps.sum())
    done = (rng.random(len(picks)) * steps[picks]).astype(int)
    return [
        (mix.lengths[pick][0] + before, mix.lengths[pick][1] - before)
        for pick, before in zip(picks.tolist(), done.tolist(), strict=True)
    ]


def _step_s(pools: list[Pool], mix: Mix, rate: float) -> float:
    """Seconds of a step when a rate is decoded, as far as limits allow."""
    count = sum(pool.count for pool in pools)
    most_s = bounds.step_s(pools[0], bounds.most_rows(pools[0], mix, mix.tpot_s), mix)
    seconds = bounds.step_s(pools[0], 1, mix)
    for _ in range(20):
        seconds = min(bounds.step_s(pools[0], rate / count * mix.steps * seconds, mix), most_s)
    return seconds


class Decided(Exception):
    """The outcome of a run is certain."""


class Judge:
    """A sink that judges `count` requests behind the `first` ones, and ends the run when its outcome is certain.

    Requests whose limits have passed have missed them, whether they have ended or not: in a cluster that is far too
    slow hardly any do.
    """

    def __init__(self, slo: SLO, first: int, count: int, attainment: float) -> None:
        self._slo, self._first, self._count = slo, first, count
        self._may_miss = count - math.ceil(attainment * count)
        self._open: dict[int, float | None] = {}  # judged requests under way: when they had their first token
        self._due: list[tuple[float, int, bool]] = []  # when a limit passes, whose, that of the first token
        self._met = 0
        self._missed: dict[Reason, int] = {}
        self._held = 0.0  # tokens in memory, times seconds, of those that ended
        self._ended = 0

    def watched(self, requests: Iterator[Request]) -> Iterator[Request]:
        """The requests as they come."""
        now = 0.0
        for request in requests:
            self._expire(now)
            now = request.arrival_s
            if self._first <= request.id < self._first + self._count:
                self._open[request.id] = None
                if self._slo.ttft_ms is not None:
                    heapq.heappush(self._due, (now + self._slo.ttft_ms / 1e3, request.id, True))
            yield request

    def run(self, rate: float, kv_tokens: float) -> Run:
        """What came of it at this rate on instances with so much memory for decoding."""
        missed = sum(self._missed.values())
        reason: Reason = max(self._missed, key=lambda why: self._missed[why], default="")
        if self._ended and reason not in ("", "link") and rate * self._held / self._ended > FULL * kv_tokens:
            reason = "KV memory"
        return Run(Trial(rate, (True,) * self._met + (False,) * missed), reason)

    # --- the sink ---------------------------------------------------------------------------------------------------

    def token(self, request: Request, token: int, time_s: float, logprob: float | None) -> bool:
        if request.id in self._open and self._open[request.id] is None:
            self._open[request.id] = time_s
            if self._slo.tpot_ms is not None:
                last_s = time_s + (request.sampling.max_tokens - 1) * self._slo.tpot_ms / 1e3
                heapq.heappush(self._due, (last_s, request.id, False))
        return False

    def done(self, request: Request, record: RequestRecord) -> None:
        if request.id >= self._first and record.timeline.prefill_start_s is not None:
            finished_s = record.timeline.finished_s or record.timeline.prefill_start_s
            tokens = record.prompt_tokens + len(record.token_ids) / 2
            self._held += tokens * (finished_s - record.timeline.prefill_start_s)
            self._ended += 1
        if self._open.pop(request.id, self) is self:
            return
        if metrics.met(record):
            self._met += 1
        else:
            reason = _reason(record)
            self._missed[reason] = self._missed.get(reason, 0) + 1
        self._decide()

    def iteration(self, record: IterationRecord) -> None:
        pass

    def transfer(self, record: TransferRecord) -> None:
        pass

    def revised(self, record: FlipRecord | MoveRecord) -> None:
        pass

    def _expire(self, now: float) -> None:
        while self._due and self._due[0][0] < now:
            _, number, first = heapq.heappop(self._due)
            if number not in self._open or (first and self._open[number] is not None):
                continue
            del self._open[number]
            reason: Reason = "TTFT: queueing" if first else "TPOT: decode steps"
            self._missed[reason] = self._missed.get(reason, 0) + 1
            self._decide()

    def _decide(self) -> None:
        missed = sum(self._missed.values())
        if missed > self._may_miss or self._met + missed == self._count:
            raise Decided


def _reason(record: RequestRecord) -> Reason:
    """What a request missed its limits by: the largest part of the time that it took too long in."""
    if not record.timeline.token_s:
        return "TTFT: queueing"
    parts = metrics.parts(record)
    if not metrics.kept(record).get("ttft_ms", True):
        return "TTFT: queueing" if parts["queue"] > parts["prefill"] else "TTFT: the prefill itself"
    steps = max(len(record.token_ids) - 1, 1)
    if parts["decode"] / steps > (record.slo.tpot_ms or math.inf):
        return "TPOT: decode steps"
    # The steps alone would have kept it: what came before them did not.
    sent = min(1e3 * record.timeline.transfer_busy_s, parts["transfer"])
    before: dict[Reason, float] = {
        "TPOT: decode steps": parts["decode_wait"],  # until the step that was under way is done
        "link": sent,
        "KV memory": parts["transfer"] - sent,  # until there was room for it
    }
    return max(before, key=lambda why: before[why])
