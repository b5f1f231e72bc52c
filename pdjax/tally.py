"""Sums up a simulation while it runs: tokens and records enter as they come, shares and percentiles leave. A sink of
`pdjax.simulation.serve` whose memory does not grow with the number of requests.

Percentiles are those of a histogram whose bins are STEP wide, so they are off by less than half of that.
"""

import bisect
import math
from collections.abc import Mapping

from pdjax import metrics
from pdjax.record import FlipRecord, IterationRecord, MoveRecord, RequestRecord, TransferRecord
from pdjax.request import SLO, Request, State

STEP = 0.01  # of a bin, relative to the values in it
LEAST = 1e-6  # below it all values are one


class Histogram:
    """Counts of values >= 0 by size; their sum and number are exact."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._bins: dict[int, int] = {}

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        at = round(math.log(max(value, LEAST)) / STEP)
        self._bins[at] = self._bins.get(at, 0) + 1

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    def percentile(self, percent: float) -> float:
        """NaN where there is no value."""
        if not self.count:
            return math.nan
        bins = sorted(self._bins)
        sums = []
        total = 0
        for at in bins:
            total += self._bins[at]
            sums.append(total)
        rank = min(max(percent / 100 * total, 1), total)
        return math.exp(STEP * bins[bisect.bisect_left(sums, rank)])


class Tally:
    """See the module's text.

    Args:
        slos: limits that requests are judged by, besides their own, by name.
        skip: so many first requests are not counted.

    Attributes:
        requests, finished, rejected: how many ended, in all and so.
        met: of these, by the name of the limits, "" for a request's own.
        ttft_ms, tpot_ms, e2e_ms: of those that finished.
        prompt_tokens, output_tokens: of those that finished.
        transfers, transfer_bytes, transfer_s: KV moves.
        preempted, moves, flips: how often.
        last_s: when the last one ended.
    """

    def __init__(self, slos: Mapping[str, SLO] | None = None, skip: int = 0) -> None:
        self._slos = dict(slos or {})
        self._skip = skip
        self.requests = self.finished = self.rejected = 0
        self.met = dict.fromkeys(["", *self._slos], 0)
        self.ttft_ms, self.tpot_ms, self.e2e_ms = Histogram(), Histogram(), Histogram()
        self.prompt_tokens = self.output_tokens = 0
        self.transfers = self.transfer_bytes = 0
        self.transfer_s = 0.0
        self.preempted = self.moves = self.flips = 0
        self.last_s = 0.0

    def attainment(self, name: str = "") -> float:
        """The share that met the limits of a name; NaN without requests."""
        return self.met[name] / self.requests if self.requests else math.nan

    def token(self, request: Request, token: int, time_s: float, logprob: float | None) -> bool:
        return False

    def done(self, request: Request, record: RequestRecord) -> None:
        if request.id < self._skip:
            return
        self.requests += 1
        self.rejected += record.state is State.REJECTED
        self.preempted += record.preemptions
        self.last_s = record.timeline.finished_s or self.last_s
        if record.state is not State.FINISHED:
            return
        self.finished += 1
        for name, slo in self._slos.items():
            self.met[name] += metrics.met(record, slo)
        self.met[""] += metrics.met(record)
        self.prompt_tokens += record.prompt_tokens
        self.output_tokens += len(record.token_ids)
        for values, value in (
            (self.ttft_ms, metrics.ttft_ms(record)),
            (self.tpot_ms, metrics.tpot_ms(record)),
            (self.e2e_ms, metrics.e2e_ms(record)),
        ):
            if value is not None:
                values.add(value)

    def iteration(self, record: IterationRecord) -> None:
        pass

    def transfer(self, record: TransferRecord) -> None:
        self.transfers += 1
        self.transfer_bytes += record.nbytes
        self.transfer_s += record.finished_s - record.started_s

    def revised(self, record: FlipRecord | MoveRecord) -> None:
        if isinstance(record, FlipRecord):
            self.flips += 1
        else:
            self.moves += 1
