"""What would come of a request on a pair of instances, and of those that are there. Enter: views of the request, of the
instance that prefills and the one that decodes. Leave: predicted TTFT, TPOT, ITL and E2E, and whose promise would be
broken. Pure arithmetic; used by `admission`.

The decode load is that of the time when the prompt will be computed (Mooncake, section 7, prediction-based early
rejection): the rows of now, less those that will have ended, more those whose prompts will be computed by then and
whose answers last longer. Times are seconds from now unless a name says otherwise.
"""

import dataclasses
import functools
import math

import numpy as np

from pdjax.latency import Load, saturating_tokens
from pdjax.request import SLO
from pdjax.schedulers.base import Ask, ClusterView, InstanceView, decoders
from pdjax.schedulers.colocated import MAX_STREAK
from pdjax.schedulers.predict import NO_ROWS, Spares, answer_tokens, prefill_s, queue_s, spares

MARGIN = 0.05  # by which predictions may be too short: what a promise is made on is taken to be longer by so much
FEW = 32  # prompts of a queue
P99_GAPS = 100  # an answer of fewer gaps has its longest as the 99th percentile, nearly


@dataclasses.dataclass(frozen=True, slots=True)
class Forecast:
    """What is expected of a request that is placed on `source` and `target` after `delay_s`.

    Attributes:
        waited_ms: since its arrival, until now.
        ttft_ms, tpot_ms, itl_ms, e2e_ms: as `pdjax.metrics` will count them; TPOT and ITL of one token are 0.
        harm: whose promise would be broken, and by what; "": nobody's.
    """

    source: int
    target: int
    delay_s: float
    waited_ms: float
    ttft_ms: float
    tpot_ms: float
    itl_ms: float
    e2e_ms: float
    harm: str

    def steady_broken(self, slo: SLO) -> str:
        """What no longer waiting makes worse: the first limit on TPOT or ITL that would be missed, in words."""
        for name, value, limit in (("TPOT", self.tpot_ms, slo.tpot_ms), ("ITL", self.itl_ms, slo.itl_p99_ms)):
            if limit is not None and value * (1 + MARGIN) > limit:
                return f"{name} {value:.1f} + {MARGIN:.0%} > {limit:g} ms"
        return ""

    def broken(self, slo: SLO) -> str:
        """The first limit that would be missed, in words; "": none."""
        for name, value, limit in (("TTFT", self.ttft_ms, slo.ttft_ms), ("E2E", self.e2e_ms, slo.e2e_ms)):
            left_ms = value - self.waited_ms
            if limit is not None and value + MARGIN * left_ms > limit:
                of = f" of {left_ms:.0f}" if self.waited_ms else ""
                return f"{name} {value:.0f} + {MARGIN:.0%}{of} > {limit:g} ms"
        return self.steady_broken(slo)

    @property
    def text(self) -> str:
        where = f"on {self.source}" if self.source == self.target else f"{self.source}->{self.target}"
        return f"{where} TTFT {self.ttft_ms:.0f} TPOT {self.tpot_ms:.1f} ITL {self.itl_ms:.0f} E2E {self.e2e_ms:.0f} ms"


class Moment:
    """What the pairs of one decision share: the rows of an instance are looked at once."""

    def __init__(self, cluster: ClusterView) -> None:
        self.cluster = cluster
        self.targets = decoders(cluster.instances)
        self._rows: dict[int, Spares] = {}

    def rows(self, view: InstanceView) -> Spares:
        """Of its rows, and of those on their way."""
        index = view.spec.index
        if index not in self._rows:
            self._rows[index] = spares(view, self.cluster)
        return self._rows[index]

    @functools.cached_property
    def unnamed(self) -> float:
        """Requests before their decoding for whom no instance is named yet, of each that decodes."""
        roles = {view.spec.index for view in self.targets}
        queued = sum(len(view.prefills) for view in self.cluster.instances if view.spec.index not in roles)
        return (queued + len(self.cluster.held)) / max(len(self.targets), 1)


class Pair:
    """Forecasts of one request for one pair of instances.

    Args:
        moment: of the decision.
        streamed: KV moves while the prompt is computed, and the decode instance is named at once.
        rows_ride: rows make a step in every pass of prompts; otherwise prompts go first, MAX_STREAK passes at a time.
    """

    def __init__(
        self,
        ask: Ask,
        source: InstanceView,
        target: InstanceView,
        moment: Moment,
        *,
        streamed: bool = False,
        rows_ride: bool = True,
    ) -> None:
        self.source, self.target, self.local = source, target, source is target
        cluster = moment.cluster
        self._ask, self._cluster, self._rows_ride = ask, cluster, rows_ride
        traffic = cluster.traffic
        self._step_s = _step_s(ask, target)
        self._rows = moment.rows(target)
        self._beside = self._rows
        if not self.local:
            self._beside = moment.rows(source) if source.rows else NO_ROWS
        self._busy_s, self._queue_s = source.busy_s, _queue_s(source, cluster)
        self._tokens = answer_tokens(ask.max_new_tokens, 0, ask.open_ended, traffic)
        self._mean_tokens = traffic.output_tokens or self._tokens
        self._arriving = _arriving(source, target, moment, streamed=streamed)
        nbytes = source.spec.kv_bytes_per_token * (
            min(ask.context_tokens, source.spec.max_chunk) if streamed else ask.context_tokens
        )
        self._transfer_s = 0.0 if self.local else source.latency.transfer_s(nbytes)
        promised = source.prefills if self.local or not streamed else target.assigned
        self._tightest_ms = min((other.slo.tpot_ms for other in promised if other.slo.tpot_ms), default=math.inf)

    @property
    def delays(self) -> list[float]:
        """When something will have changed here: ends of rows, in order; at last, when all has ended."""
        ends = [self._rows.left_s, self._beside.left_s]
        if self._arriving:
            ends.append(np.array([self._busy_s + self._queue_s + self._mean_tokens * self._step_s]))
        return [*np.unique(np.concatenate(ends)).tolist(), math.inf]

    def at(self, delay_s: float = 0.0) -> Forecast:
        """If it is placed after `delay_s`, and nobody else before."""
        ask, cluster, source = self._ask, self._cluster, self.source
        queued_s = min(self._queue_s, max(self._busy_s + self._queue_s - delay_s, 0.0))
        own_s = prefill_s(source.latency, source.spec, ask.context_tokens)
        share, queue_alone_s = queued_s / self._queue_s if self._queue_s else 0.0, queued_s
        tokens = share * source.pending_tokens
        beside = self._beside.after(delay_s)
        if beside.size or (self.local and tokens):  # prompts that are queued here will be rows beside those behind them
            queued_s, own_s = queued_s + self._slower_s(tokens), own_s + self._slower_s(ask.context_tokens)
        first_s = max(delay_s, self._busy_s + self._queue_s - queue_alone_s) + queued_s + own_s
        join_s = first_s + self._transfer_s

        # The decode instance when the prompt is computed.
        steps = self._steps(delay_s, join_s, tokens + ask.context_tokens)
        staying = int((self._rows.left_s > steps * self._step_s).sum())
        lasts_s = self._mean_tokens * self._step_s  # an answer's decoding; Mooncake's t_d
        done_s = max(self._busy_s + self._queue_s, 1e-9)  # prompts before it end evenly until then
        arriving = self._arriving * min(max((done_s + lasts_s - join_s) / done_s, 0.0), 1.0)
        rows, context = staying + arriving, self._context(staying, arriving, steps)
        without_s, with_s = self._step(rows, context), self._step(rows, context, joins=True)
        wait_s = max(self._over(rows + 1, context + ask.context_tokens + self._tokens), 0.0) * lasts_s
        stall_s = 0.0 if self.local else max(_queue_s(self.target, cluster) - join_s, 0.0)

        gaps = self._tokens - 1
        if not self.local:  # it joins behind the steps that are in flight when its KV is there
            wait_s += self._transfer_s + without_s * self.target.spec.max_in_flight * (rows > 0)
        gap_s = wait_s + with_s
        tpot_s = with_s + (wait_s + stall_s) / gaps if gaps else 0.0
        pass_s = self._pass_s(rows, context) if self.local or self.target.pending_tokens else 0.0
        itl_s = max(with_s, pass_s, gap_s if gaps < P99_GAPS else 0.0) if gaps else 0.0
        waited_s = cluster.now - ask.arrival_s
        ttft_s = waited_s + first_s
        grows_s = with_s - without_s if gaps else 0.0
        if self.local:
            harm = self._harm_of_rows(beside, queued_s, own_s, pass_s, steps, grows_s)
            harm = harm or ("" if delay_s else self._harm_of_earlier(own_s, without_s))
        else:
            harm = self._harm_of_rows(self._rows, 0.0, 0.0, 0.0, steps, grows_s)
            harm = harm or self._harm_of_rows(beside, queued_s, own_s, own_s, 0, 0.0)
        harm = harm or ("" if delay_s else self._harm_of_later(own_s))
        if not harm and gaps and 1e3 * without_s <= self._tightest_ms < 1e3 * with_s:
            harm = f"prompts before it would decode at {1e3 * with_s:.1f} > {self._tightest_ms:g} ms"
        return Forecast(
            source=source.spec.index,
            target=self.target.spec.index,
            delay_s=delay_s,
            waited_ms=1e3 * waited_s,
            ttft_ms=1e3 * ttft_s,
            tpot_ms=1e3 * tpot_s,
            itl_ms=1e3 * itl_s,
            e2e_ms=1e3 * (ttft_s + gaps * tpot_s),
            harm=harm,
        )

    # --- the decode instance ----------------------------------------------------------------------------------------

    def _steps(self, delay_s: float, join_s: float, tokens: float) -> float:
        """Decode steps that the target makes until the request joins: fewer where it computes `tokens` prompt tokens
        meanwhile."""
        if not self.local:
            return join_s / self._step_s
        spec = self.source.spec
        size = self._ride_tokens if self._rows_ride else MAX_STREAK * spec.max_chunk
        return delay_s / self._step_s + tokens / size

    def _context(self, staying: int, arriving: float, steps: float) -> float:
        """Tokens of all contexts then."""
        target, traffic = self.target, self._cluster.traffic
        mean = target.context_tokens / target.rows if target.rows else 0.0
        grown = staying * (mean + steps) if staying else 0.0
        return grown + arriving * ((traffic.prompt_tokens or self._ask.context_tokens) + self._mean_tokens / 2)

    def _load(self, rows: float, context: float) -> Load:
        """Rows attend as far beyond their own contexts as those of now do."""
        now = self.target.load
        wide = now.attended_tokens / now.context_tokens if now.context_tokens else 1.0
        return Load((), math.ceil(rows), round(context), round(wide * context))

    def _step(self, rows: float, context: float, *, joins: bool = False) -> float:
        """Seconds of a decode step, with or without the request at its longest."""
        load = self._load(rows, context)
        if joins:
            load = load.plus_row(self._ask.context_tokens + self._tokens)
        return self.target.latency.iteration_s(self.target.spec, load)

    def _over(self, rows: float, context: float) -> float:
        """By which part of its slots or pages, whichever is worse, there is more than fits in."""
        spec = self.target.spec
        return max(rows / spec.max_rows, context / (spec.usable_pages * spec.page_size)) - 1

    def _harm_of_rows(
        self, rows: Spares, queued_s: float, own_s: float, pass_s: float, steps: float, grows_s: float
    ) -> str:
        """By the time that rows lose while prompts are computed beside them, the queued and this one, and by steps that
        take longer from when it joins."""
        slower_s = np.maximum(rows.left_s / self._step_s - steps, 0.0) * grows_s
        safe = rows.seconds >= 0  # or it misses its limits whatever happens
        broken = safe & (rows.seconds < queued_s + own_s + slower_s)
        if broken.any():
            at = int(broken.argmax())
            return (
                f"{1e3 * queued_s:.0f} + {1e3 * own_s:.0f} ms of prefill, {1e3 * slower_s[at]:.0f} ms of longer steps: "
                f"they break the limits of a row there with {1e3 * rows.seconds[at]:.0f} ms to spare"
            )
        if (safe & (pass_s > rows.pass_s)).any():
            return f"a pass of {1e3 * pass_s:.0f} ms breaks the ITL limit of a row there"
        return ""

    # --- the prefill instance ---------------------------------------------------------------------------------------

    @property
    def _ride_tokens(self) -> int:
        """Prompt tokens of a pass that rows ride in."""
        return saturating_tokens(self.source.latency, self.source.spec, beside_rows=True)

    def _slower_s(self, tokens: float) -> float:
        """How much longer so many prompt tokens take because there are rows: they ride in short passes, or get a step
        between long ones."""
        view, spec = self.source, self.source.spec
        if not self._rows_ride:
            return math.ceil(tokens / spec.max_chunk) / MAX_STREAK * view.latency.iteration_s(spec, view.load)
        size, prior = self._ride_tokens, self._ask.context_tokens // 2
        mixed_s = view.latency.iteration_s(spec, view.load.beside((size, prior)))
        alone_s = view.latency.iteration_s(spec, Load(((spec.max_chunk, prior),)))
        return tokens * max(mixed_s / size - alone_s / spec.max_chunk, 0.0)

    def _pass_s(self, rows: float, context: float) -> float:
        """A pass with prompt tokens, as rows of the decode instance will meet it."""
        view, prior = self.target, self._ask.context_tokens // 2
        if not self._rows_ride:
            return view.latency.iteration_s(view.spec, Load(((view.spec.max_chunk, prior),)))
        return view.latency.iteration_s(view.spec, self._load(rows, context).beside((self._ride_tokens, prior)))

    def _harm_of_later(self, own_s: float) -> str:
        """By going before prompts that arrived later: it was preempted, or waited."""
        view, ask, now = self.source, self._ask, self._cluster.now
        if not view.prefills or view.prefills[-1].arrival_s <= ask.arrival_s:
            return ""
        first_s = self._busy_s
        for other in view.prefills:
            first_s += prefill_s(view.latency, view.spec, other.context_tokens - other.prefilled)
            if other.slo.ttft_ms is None or other.prefilled or other.arrival_s <= ask.arrival_s:
                continue
            left_s = other.slo.ttft_ms / 1e3 - (now - other.arrival_s) - first_s
            if 0 <= left_s < own_s:
                return f"{1e3 * own_s:.0f} ms of prefill break the TTFT of a prompt behind it"
        return ""

    def _harm_of_earlier(self, own_s: float, step_s: float) -> str:
        """By running beside rows that are prompts now: prompts go in order, and each pays for all behind it."""
        view, behind_s = self.source, 0.0
        token_s = self._queue_s / max(view.pending_tokens, 1)
        for other in reversed(view.prefills):
            if other.slo.tpot_ms is not None:
                tokens = answer_tokens(other.max_new_tokens, 0, other.open_ended, self._cluster.traffic)
                spare_s = (tokens - 1) * (other.slo.tpot_ms / 1e3 - step_s)
                if 0 <= spare_s < behind_s + own_s:
                    return f"{1e3 * own_s:.0f} ms of prefill break the TPOT of a prompt before it, once it decodes"
            behind_s += token_s * (other.context_tokens - other.prefilled)
        return ""


def _step_s(ask: Ask, view: InstanceView) -> float:
    """Of the rows there and on their way, as `spares` counts on it; without any, of the request alone."""
    load = view.full_load
    return view.latency.iteration_s(view.spec, load if load.rows else load.plus_row(ask.context_tokens))


def _queue_s(view: InstanceView, cluster: ClusterView) -> float:
    """Seconds of prefilling what is queued: prompt by prompt where they are few, by their mean where they are many."""
    if len(view.prefills) > FEW:
        return queue_s(view, cluster.traffic)
    lengths = [ask.context_tokens - ask.prefilled for ask in view.prefills]
    return math.fsum(prefill_s(view.latency, view.spec, tokens) for tokens in lengths)


def _arriving(source: InstanceView, target: InstanceView, moment: Moment, *, streamed: bool) -> float:
    """Requests that will have become rows of the target before this one. Where it is not decided who decodes them, its
    share."""
    own = len(target.prefills) + len(target.assigned)
    return own if source is target or streamed else own + moment.unnamed
