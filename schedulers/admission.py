"""Admission: takes a request in only where its promise, and those of the requests that are there, can be kept.

A wrapper of any policy. It asks the policy where a request would go and forecasts what would come of it (`forecast`):
queueing, prefill, transfer, decode beside those who are there, and what they would suffer. Its answers, in this order:

    admit        where the policy says
    elsewhere    on another pair of instances that keeps all promises, the one with the shortest TTFT
    queue        `Wait`: rows that are there now will have ended early enough for its TTFT
    degrade      to the first class of `ask.laxer` that can be kept, now or later
    reject       with the forecasts and the limit that breaks

A request that waits steps aside: those behind it, if they can be kept now, do not wait for it. It is asked about first,
whenever something changes, and after PATIENCE_S it steps aside no more, so that what is there drains until it fits in:
who has no limits is never rejected, and waits no longer than that and an answer.
"""

import bisect
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from pdjax.record import Predicted
from pdjax.request import SLO
from pdjax.schedulers.base import (
    Ask,
    ClusterView,
    Drop,
    InstanceView,
    Place,
    Plan,
    Reject,
    Revision,
    Scheduler,
    Wait,
    prefillers,
    traits_of,
)
from pdjax.schedulers.disaggregated import least_loaded
from pdjax.schedulers.forecast import Forecast, Moment, Pair
from pdjax.schedulers.predict import prefill_s

PATIENCE_S = 10.0
MAX_WAIT_S = 1.0  # after which a request that waits is looked at again at the latest
MANY = 1000  # answers to remember before those of requests that are gone are looked for


class Admission:
    """See the module's text.

    Args:
        inner: the policy that places, hands off and iterates.
    """

    def __init__(self, inner: Scheduler) -> None:
        self.inner = inner
        self.traits = dataclasses.replace(traits_of(inner), steady=False)  # time alone breaks promises
        self.rows_ride = getattr(inner, "rows_ride", True)
        self.decode_prefills = getattr(inner, "decode_prefills", self.traits.decode_prefills)
        self._waits: dict[int, tuple[float, str]] = {}  # request -> until when its answer stands, and its reason

    def place(self, ask: Ask, cluster: ClusterView) -> Place | Wait | Reject:
        until_s, reason = self._waits.get(ask.id, (cluster.now, ""))
        if cluster.now < until_s and any(map(_working, cluster.instances)):  # otherwise nobody might ask again
            return self._wait(ask, cluster, reason)
        self._waits.pop(ask.id, None)
        wanted = self.inner.place(ask, cluster)
        if not isinstance(wanted, Place):
            return wanted
        others = self._pairs(ask, wanted, cluster)
        first = next(others)
        forecasts = [first.at()]
        if _kept(forecasts[0], ask.slo):
            return _placed(wanted, first, forecasts, 0, ask, "")
        pairs = [first, *others]
        forecasts += [pair.at() for pair in pairs[1:]]
        kinds = [("", ask.slo), *((kind.name, kind.slo) for kind in ask.laxer)]
        for name, slo in kinds:
            kept = [index for index, forecast in enumerate(forecasts) if _kept(forecast, slo)]
            if kept:
                best = 0 if kept[0] == 0 else min(kept, key=lambda index: forecasts[index].ttft_ms)
                return _placed(wanted, pairs[best], forecasts, best, ask, name)
            later = [forecast for pair in pairs if (forecast := _later(pair, slo))]
            if later:
                best_later = min(later, key=lambda forecast: forecast.delay_s)
                what = f"as {name} it can be kept" if name else "it can be kept"
                delay_s = best_later.delay_s
                when = (
                    f"after {1e3 * delay_s:.0f} ms {best_later.text}" if delay_s < math.inf else "when all else ended"
                )
                reason = f"admission: {what} {when}"
                # Others may end sooner than expected: it is looked at again before that.
                self._remember(ask, cluster, min(delay_s / 2, MAX_WAIT_S), reason)
                return self._wait(ask, cluster, f"{reason}; now: {_why(forecasts, slo)}")
        classes = f", nor of {', '.join(name for name, _ in kinds[1:])}" if ask.laxer else ""
        return Reject(f"admission: no promise can be kept of its own{classes}: {_why(forecasts, kinds[-1][1])}")

    def hand_off(self, ask: Ask, cluster: ClusterView) -> int | None:
        return self.inner.hand_off(ask, cluster)

    def iterate(self, instance: InstanceView, cluster: ClusterView) -> Plan:
        return self.inner.iterate(instance, cluster)

    def revise(self, cluster: ClusterView) -> Sequence[Revision]:
        return revisions(self.inner, cluster)

    def _wait(self, ask: Ask, cluster: ClusterView, reason: str) -> Wait:
        return Wait(reason, aside=cluster.now - ask.arrival_s < PATIENCE_S)

    def _remember(self, ask: Ask, cluster: ClusterView, seconds: float, reason: str) -> None:
        if len(self._waits) > MANY:  # some of them have been aborted
            queued = {other.id for other in cluster.queue}
            self._waits = {number: wait for number, wait in self._waits.items() if number in queued}
        self._waits[ask.id] = cluster.now + seconds, reason

    def _pairs(self, ask: Ask, wanted: Place, cluster: ClusterView) -> Iterator[Pair]:
        """Where the policy wants it, and then the best of what else its traits allow, by sums alone."""
        moment, views = Moment(cluster), cluster.instances
        seen: set[tuple[int, int]] = set()

        def new(source: InstanceView, target: InstanceView) -> Iterator[Pair]:
            key = source.spec.index, target.spec.index
            if source.spec.max_chunk and target.spec.max_rows and key not in seen:
                seen.add(key)
                streamed = wanted.mode == "stream" and source is not target
                yield Pair(ask, source, target, moment, streamed=streamed, rows_ride=self.rows_ride)

        target = least_loaded(moment.targets)
        yield from new(views[wanted.prefill], target if wanted.decode is None else views[wanted.decode])
        idle = min(prefillers(views), key=_queued)
        if self.traits.colocated:
            others = [(idle, idle), (target, target)]
        else:
            others = [(idle, target)]
            if self.decode_prefills:
                local = min(moment.targets, key=_queued)
                others += [(local, local), (target, target)]
            if self.traits.prefill_decodes:
                others.append((idle, idle))
        for pair in others:
            yield from new(*pair)


class DropLate:
    """Any policy, and requests that have not begun and can no longer keep their limits are dropped: they count as
    rejected, and nothing is computed for them.

    Prompts are looked at from the front of each queue up to the first that is in time: those behind it came later.
    A prompt with a shorter limit is seen when it comes to the front.
    """

    def __init__(self, inner: Scheduler) -> None:
        self.inner = inner
        self.traits = dataclasses.replace(traits_of(inner), steady=False)
        self.rows_ride = getattr(inner, "rows_ride", True)
        self.decode_prefills = getattr(inner, "decode_prefills", self.traits.decode_prefills)

    def place(self, ask: Ask, cluster: ClusterView) -> Place | Wait | Reject:
        return self.inner.place(ask, cluster)

    def hand_off(self, ask: Ask, cluster: ClusterView) -> int | None:
        return self.inner.hand_off(ask, cluster)

    def iterate(self, instance: InstanceView, cluster: ClusterView) -> Plan:
        return self.inner.iterate(instance, cluster)

    def revise(self, cluster: ClusterView) -> Sequence[Revision]:
        sources = prefillers(cluster.instances)
        drops = [] if not cluster.queue or not sources else late(cluster.queue, min(sources, key=_queued), cluster)
        for view in cluster.instances:
            if view.prefills:
                drops += late((ask for ask in view.prefills if not ask.prefilled), view, cluster)
        return [*revisions(self.inner, cluster), *drops]


def guarded(policy: Scheduler, *, admission: bool, drop_late: bool) -> Scheduler:
    """The policy with what a configuration adds to it."""
    if drop_late:
        policy = DropLate(policy)
    return Admission(policy) if admission else policy


def revisions(policy: Scheduler, cluster: ClusterView) -> Sequence[Revision]:
    """What a policy that may be unable to revise has to say."""
    revise = getattr(policy, "revise", None)
    return revise(cluster) if revise else ()


def late(waiting: Iterable[Ask], view: InstanceView, cluster: ClusterView) -> list[Drop]:
    """Those at the front that would miss a limit even if they were the next prompt of the instance."""
    drops = []
    busy_s = None
    for ask in waiting:
        if ask.slo.ttft_ms is None and ask.slo.e2e_ms is None:
            break
        busy_s = view.busy_s if busy_s is None else busy_s
        own_s = prefill_s(view.latency, view.spec, ask.context_tokens)
        ttft_ms = 1e3 * (cluster.now - ask.arrival_s + busy_s + own_s)
        if ask.slo.ttft_ms is not None and ttft_ms > ask.slo.ttft_ms:
            drops.append(Drop(ask, f"TTFT would be {ttft_ms:.0f} > {ask.slo.ttft_ms:g} ms at best"))
        elif ask.slo.e2e_ms is not None and ttft_ms > ask.slo.e2e_ms:
            drops.append(Drop(ask, f"E2E would be above {ttft_ms:.0f} > {ask.slo.e2e_ms:g} ms at best"))
        else:
            break
    return drops


def _kept(forecast: Forecast, slo: SLO) -> bool:
    return not forecast.harm and not forecast.broken(slo)


def _later(pair: Pair, slo: SLO) -> Forecast | None:
    """The forecast for the first time at which enough will have ended here, if the limits can be kept then."""
    delays = pair.delays

    def enough(delay_s: float) -> bool:
        forecast = pair.at(delay_s)
        return not forecast.harm and not forecast.steady_broken(slo)

    at = bisect.bisect_left(delays, True, key=enough)  # ends only ever help
    if at == len(delays):
        return None
    forecast = pair.at(delays[at])
    return None if forecast.broken(slo) else forecast


def _placed(wanted: Place, pair: Pair, forecasts: list[Forecast], best: int, ask: Ask, name: str) -> Place:
    chosen = forecasts[best]
    others = "; ".join(forecast.text for forecast in forecasts if forecast is not chosen)
    verdict = ["admitted"] + (["elsewhere"] if best else []) + ([f"as {name}"] if name else [])
    reason = f"admission: {' '.join(verdict)} {chosen.text}" + (f" (not: {others})" if others else "")
    place = wanted
    if best:
        if pair.local:
            place = Place(chosen.source, chosen.target, "whole", reason)
        else:
            decode = None if wanted.decode is None else chosen.target
            place = Place(chosen.source, decode, wanted.mode, reason)
    gaps = ask.max_new_tokens > 1
    return dataclasses.replace(
        place,
        reason=f"{reason}; {wanted.reason}",
        predicted=Predicted(chosen.ttft_ms, chosen.tpot_ms if gaps else None),
        slo_class=name,
    )


def _why(forecasts: list[Forecast], slo: SLO) -> str:
    """Of each pair, the prediction and what breaks."""
    return "; ".join(f"{forecast.text}: {forecast.harm or forecast.broken(slo)}" for forecast in forecasts)


def _queued(view: InstanceView) -> tuple[int, int, int]:
    return view.pending_tokens, view.rows, view.spec.index


def _working(view: InstanceView) -> bool:
    """Whether something is there that will end."""
    return bool(view.rows or view.prefills or view.incoming or view.busy_s)
