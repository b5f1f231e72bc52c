"""Mooncake's table 3 (arXiv 2407.00079, section 7): requests that an overloaded cluster turns away, by when it looks at
the decode pool. Rows of the trace enter; counts and the course of the load leave. Called by `mooncake`.

    each stage   prefill looks at itself when a request arrives, decode when its prompt is computed: too late
    early        when a request arrives, at both loads of that moment
    predicted    the same, at the decode load of the time when its prompt will be computed

Load of prefill is predicted TTFT over its limit; load of decode is the predicted TBT, with the request and averaged
over the pool, over its limit. All three look again when a prompt is computed (section 3: the double check of the decode
instance). A request that fails there ends with its first token. Prefixes are not reused here.
"""

import dataclasses
import math
from collections.abc import Iterable

from pdjax import fleet, traces
from pdjax.experiments.papers import mooncake_node as node
from pdjax.latency import Load
from pdjax.messages import Role
from pdjax.network import Link, switched
from pdjax.record import RequestRecord
from pdjax.request import SLO, Request
from pdjax.schedulers.admission import guarded
from pdjax.schedulers.base import Ask, ClusterView, InstanceView, Place, Plan, Reject, Scheduler, Wait, traits_of
from pdjax.schedulers.disaggregated import Disaggregated
from pdjax.schedulers.predict import prefill_s
from pdjax.simulation import asks, serve
from pdjax.tally import Tally

RULES = ("each stage", "early", "predicted")
OURS = "admission"
SETTLED_S = 120.0  # from then on loads are looked at


class Gate:
    """A policy's places, and who is turned away.

    Args:
        inner: the policy.
        rule: one of RULES.
        cluster: whose last instances decode.

    Attributes:
        refused: requests that were turned away when their prompts were computed.
        loads: (time, decode load) at arrivals.
    """

    def __init__(self, inner: Scheduler, rule: str, cluster: fleet.Fleet) -> None:
        self._inner, self._rule = inner, rule
        self._spec, self._latency = cluster.specs[-1], cluster.latency[-1]
        self._decoders = sum(spec.role is Role.DECODE for spec in cluster.specs)
        self.traits = traits_of(inner)
        self._coming: dict[int, tuple[float, int]] = {}  # request -> when its prompt should be computed, its tokens
        self._rows: dict[int, tuple[float, int]] = {}  # request -> since when it decodes, its tokens
        self._decoded_s, self._decoded = 0.0, 0  # of those that ended
        self.refused: set[int] = set()
        self.loads: list[tuple[float, float]] = []

    def place(self, ask: Ask, cluster: ClusterView) -> Place | Wait | Reject:
        wanted = self._inner.place(ask, cluster)
        if not isinstance(wanted, Place):
            return wanted
        now, view = cluster.now, cluster.instances[wanted.prefill]
        ttft_s = now - ask.arrival_s + view.busy_s
        for other in (*view.prefills, ask):
            ttft_s += prefill_s(view.latency, view.spec, other.context_tokens - other.prefilled)
        self.loads.append((now, self._tbt_s(list(self._rows.values())) / node.TBT_S))
        if ttft_s > node.TTFT_S:
            return Reject("prefill is loaded")
        if self._rule != "each stage" and ask.max_new_tokens > 1:
            rows = list(self._rows.values()) if self._rule == "early" else self._at(now + ttft_s)
            if self._tbt_s([*rows, (now, ask.context_tokens)]) > node.TBT_S:
                return Reject("decode is loaded")
        self._coming[ask.id] = now + ttft_s, ask.context_tokens
        return wanted

    def hand_off(self, ask: Ask, cluster: ClusterView) -> int | None:
        return self._inner.hand_off(ask, cluster)

    def iterate(self, instance: InstanceView, cluster: ClusterView) -> Plan:
        return self._inner.iterate(instance, cluster)

    def computed(self, request: Request, time_s: float) -> bool:
        """A prompt is computed; whether the request has to end here."""
        del self._coming[request.id]
        if request.sampling.max_tokens == 1:
            return False
        row = time_s, len(request.prompt_ids)
        if self._tbt_s([*self._rows.values(), row]) > node.TBT_S:
            self.refused.add(request.id)
            return True
        self._rows[request.id] = row
        return False

    def ended(self, request: Request, time_s: float) -> None:
        """It decodes no more."""
        if row := self._rows.pop(request.id, None):
            self._decoded_s += time_s - row[0]
            self._decoded += 1

    def waits(self, request: Request) -> bool:
        """Whether its prompt is not computed."""
        return request.id in self._coming

    def _at(self, time_s: float) -> list[tuple[float, int]]:
        """Rows at that time, if all decode equally long (section 7.4)."""
        lasts_s = self._decoded_s / self._decoded if self._decoded else math.inf
        return [row for row in (*self._rows.values(), *self._coming.values()) if time_s - lasts_s < row[0] <= time_s]

    def _tbt_s(self, rows: list[tuple[float, int]]) -> float:
        """A step of an instance that has its share of these rows."""
        context = round(sum(tokens for _, tokens in rows) / self._decoders)
        load = Load((), math.ceil(len(rows) / self._decoders), context, context)
        return self._latency.iteration_s(self._spec, load)


class Watch(Tally):
    """Tells a gate when prompts are computed and answers end. What it refuses counts as rejected."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    def token(self, request: Request, token: int, time_s: float, logprob: float | None) -> bool:
        return self._gate.waits(request) and self._gate.computed(request, time_s)

    def done(self, request: Request, record: RequestRecord) -> None:
        self._gate.ended(request, record.timeline.finished_s or 0.0)
        if request.id in self._gate.refused:
            self.requests += 1
            self.rejected += 1
        else:
            super().done(request, record)


@dataclasses.dataclass(frozen=True, slots=True)
class Turned:
    """What came of a rule.

    Attributes:
        early, late: requests turned away when they arrived, and when their prompts were computed.
        kept: requests that kept both limits.
        load, swing: mean and standard deviation of the decode load, from SETTLED_S on.
        loads: (time, decode load) at arrivals.
    """

    rule: str
    early: int
    late: int
    kept: int
    load: float
    swing: float
    loads: tuple[tuple[float, float], ...] = dataclasses.field(repr=False)

    @property
    def rejected(self) -> int:
        return self.early + self.late


def cluster_of(prefillers: int, decoders: int) -> fleet.Fleet:
    """The nodes, each with its wire in either direction."""
    pools = [node.pool(Role.PREFILL, prefillers), node.pool(Role.DECODE, decoders)]
    return fleet.build(pools, switched(Link("rdma", node.NIC_BYTES_PER_S), prefillers + decoders))


def turned(
    rows: Iterable[traces.Row],
    rule: str,
    *,
    speed: float = 2.0,
    prefillers: int = node.PREFILLERS,
    decoders: int = node.DECODERS,
) -> Turned:
    """Serves the rows, `speed` times as quickly as they came, under one of RULES or under OURS."""
    timed = list(rows)
    limits = SLO(ttft_ms=1e3 * node.TTFT_S, tpot_ms=1e3 * node.TBT_S)
    requests = asks(
        ((row.input_tokens, row.output_tokens) for row in timed), ((row.time_s or 0.0) / speed for row in timed), limits
    )
    cluster = cluster_of(prefillers, decoders)
    if rule == OURS:
        tally = Tally()
        serve(cluster, requests, guarded(Disaggregated(), admission=True, drop_late=False), tally)
        return Turned(rule, tally.rejected, 0, tally.met[""], math.nan, math.nan, ())
    gate = Gate(Disaggregated(), rule, cluster)
    watch = Watch(gate)
    serve(cluster, requests, gate, watch)
    loads = [load for time_s, load in gate.loads if time_s >= SETTLED_S] or [load for _, load in gate.loads]
    mean = sum(loads) / len(loads)
    swing = math.sqrt(sum((load - mean) ** 2 for load in loads) / len(loads))
    late = len(gate.refused)
    return Turned(rule, watch.rejected - late, late, watch.met[""], mean, swing, tuple(gate.loads))
