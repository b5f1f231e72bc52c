"""Chooses for every request, from predicted TTFT and TPOT, whether its prompt is computed on a prefill instance and
its KV shipped, or on the decode instance itself, chunk by chunk beside the running rows.

Colocation wins while decode instances are lightly loaded (no transfer, no second queue); disaggregation wins when a
chunk beside the rows would break their TPOT. Both are points of one space (TaiChi); here the point is chosen request
by request. Among the choices that keep both limits the one with the shortest TTFT is taken; if none does, the one
that misses by the smallest factor, and the reason says that the SLO is infeasible.
"""

import dataclasses

from pdjax.request import SLO
from pdjax.schedulers.base import Ask, ClusterView, InstanceView, Place, Traits, Wait, decoders, prefillers
from pdjax.schedulers.disaggregated import Disaggregated, least_loaded

DEFAULT_TTFT_MS, DEFAULT_TPOT_MS = 500.0, 50.0  # for requests that bring no limit of their own


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One way to serve a request, and what it would cost. Times in milliseconds; `place.reason` is filled later."""

    source: InstanceView
    target: InstanceView
    ttft_ms: float
    tpot_ms: float

    @property
    def local(self) -> bool:
        return self.source.spec.index == self.target.spec.index

    @property
    def text(self) -> str:
        source, target = self.source.spec.index, self.target.spec.index
        where = f"local on {target}" if self.local else f"{source}->{target}"
        return f"{where} TTFT {self.ttft_ms:.0f} ms TPOT {self.tpot_ms:.1f} ms"

    def miss(self, slo: SLO) -> float:
        """The worst ratio of prediction to limit; at most 1 when both are kept."""
        return max(self.ttft_ms / (slo.ttft_ms or DEFAULT_TTFT_MS), self.tpot_ms / (slo.tpot_ms or DEFAULT_TPOT_MS))


class Dynamic(Disaggregated):
    """Local or remote prefill by prediction. Remote prompts move as `Disaggregated` moves them."""

    traits = Traits(prefill_decodes=False, decode_prefills=True, steady=True)

    def place(self, ask: Ask, cluster: ClusterView) -> Place | Wait:
        sources, targets = prefillers(cluster.instances), decoders(cluster.instances)
        choices = [local(ask, view) for view in targets if view.spec.max_chunk]
        # Where the others of a role are lost, those that are left do both: nothing is gained by moving.
        sources = [view for view in sources if view not in targets]
        if sources and targets:
            source = min(sources, key=lambda view: (view.pending_tokens, view.spec.index))
            choices.append(remote(ask, source, least_loaded(targets)))
        if not choices:
            return Wait("no living instance can decode")
        best = min(choices, key=lambda choice: (max(choice.miss(ask.slo), 1.0), choice.ttft_ms))
        others = "; ".join(choice.text for choice in choices if choice is not best)
        verdict = "" if best.miss(ask.slo) <= 1 else "infeasible SLO, the nearest is "
        reason = f"dynamic: {verdict}{best.text}" + (f" (not: {others})" if others else "")
        if best.local:
            return Place(best.source.spec.index, best.target.spec.index, "whole", reason)
        if self._stream_from is None or ask.context_tokens < self._stream_from:
            return Place(best.source.spec.index, None, "whole", reason)
        return Place(best.source.spec.index, best.target.spec.index, "stream", reason)


def remote(ask: Ask, source: InstanceView, target: InstanceView) -> Choice:
    """Prefill on `source` behind its queue; the rows of `target` are not disturbed."""
    ahead = source.latency.prefill_s(source.spec, source.pending_tokens)
    ttft = ahead + source.latency.prefill_s(source.spec, ask.context_tokens)
    return Choice(source, target, 1e3 * ttft, 1e3 * _step_s(ask, target))


def local(ask: Ask, view: InstanceView) -> Choice:
    """Prefill on the decode instance: every chunk runs beside its rows, which then wait for the mixed pass.

    TPOT is that of the rows already there while the prompt is computed, the worst that anybody will see.
    """
    spec, latency = view.spec, view.latency
    chunk = min(spec.max_chunk, ask.context_tokens)
    mixed = latency.iteration_s(spec, view.load.beside((chunk, 0)))
    passes = -(-(view.pending_tokens + ask.context_tokens) // spec.max_chunk)
    step = _step_s(ask, view)
    return Choice(view, view, 1e3 * mixed * passes, 1e3 * (max(mixed, step) if view.rows else step))


def _step_s(ask: Ask, view: InstanceView) -> float:
    """A decode step of `view` once the request is one of its rows."""
    rows = view.rows + view.incoming + 1
    context = ask.context_tokens + ask.max_new_tokens
    load = view.load.plus_row(context)
    return view.latency.decode_s(view.spec, rows, load.context_tokens, load.attended_tokens)
