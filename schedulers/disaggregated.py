"""Prefill instances prefill, decode instances decode; KV moves between them.

What is DistServe's (section 4.3): prompts first come, first served to the prefill instance with the shortest queue;
prompts share a pass up to the length L_m that saturates the instance, found by profiling, and a longer one goes alone;
rows to the least loaded decode instance, which pulls the KV when it has room. Until then it stays in prefill pages,
which buffer bursts and, once full, hold up new prompts: the backpressure.

What is ours: a queue's length is its prompt tokens not issued yet, then the time until what was issued is done; a
prompt longer than `max_chunk` takes several passes; a decode instance keeps some pages free for answers that grow;
prompts that fit into the padding of a pass join it; decode instances take rows up to their slots and pages, where
DistServe takes L_m for the largest batch (more rows than have slots here); instances of one role are used for both when
those of the other are lost. Prompts of `stream_from` tokens and more are pushed while they are computed, so their
decode instance is named, and its pages are reserved, before: that is Splitwise's (section IV-C), which streams long
prompts only.
"""

import math

from pdjax.latency import saturating_tokens
from pdjax.schedulers.base import (
    Ask,
    ClusterView,
    InstanceView,
    Place,
    Plan,
    Traits,
    Wait,
    decoders,
    prefillers,
    take_prompts,
)

SPARE = 0.05  # of an instance's pages


class Disaggregated:
    """See the module's text.

    Args:
        stream_from: prompts of at least so many tokens are streamed; None: all are pulled.
        batch_tokens: prompts share a pass up to so many tokens; 0: up to what saturates the instance.
    """

    traits = Traits(prefill_decodes=False, decode_prefills=False, steady=True)

    def __init__(self, stream_from: int | None = None, batch_tokens: int = 0) -> None:
        check_stream_from(stream_from)
        if batch_tokens < 0:
            raise ValueError(f"batch_tokens is {batch_tokens}; allowed: tokens >= 0")
        self._stream_from = stream_from
        self._batch_tokens = batch_tokens

    def place(self, ask: Ask, cluster: ClusterView) -> Place | Wait:
        sources, targets = prefillers(cluster.instances), decoders(cluster.instances)
        if not sources or not targets:
            return Wait("no living instance of a role")
        source = shortest_queue(sources)
        index, reason = source.spec.index, f"shortest prefill queue: {source.pending_tokens} tokens"
        if index in [view.spec.index for view in targets]:  # the others of a role are lost
            return Place(index, index, "whole", f"{reason}; it decodes too")
        if self._stream_from is None or ask.context_tokens < self._stream_from:
            return Place(index, None, "whole", f"{reason}; pulled when a decode instance has room")
        target = least_loaded(targets)
        return Place(index, target.spec.index, "stream", f"{reason}; streamed to the least loaded")

    def hand_off(self, ask: Ask, cluster: ClusterView) -> int | None:
        targets = decoders(cluster.instances)
        if targets and has_room(best := least_loaded(targets), ask):
            return best.spec.index  # nearly always: nobody else has to be asked
        targets = [view for view in targets if has_room(view, ask)]
        return least_loaded(targets).spec.index if targets else None

    def iterate(self, instance: InstanceView, cluster: ClusterView) -> Plan:
        if not instance.prefills:
            return Plan(decode=instance.rows > 0)
        limit = self._batch_tokens or saturating_tokens(instance.latency, instance.spec)
        return Plan(take_prompts(instance, limit), decode=instance.rows > 0)


def check_stream_from(stream_from: int | None) -> None:
    """ValueError if it is no number of tokens from which on prompts are streamed."""
    if stream_from is not None and stream_from < 1:
        raise ValueError(f"stream_from is {stream_from}; allowed: tokens >= 1, or None")


def shortest_queue(views: list[InstanceView]) -> InstanceView:
    """The instance with the fewest prompt tokens not issued yet; ties by what is under way, then by number."""
    tokens = [view.pending_tokens for view in views]  # which decides nearly always; the rest costs more
    fewest = min(tokens)
    ties = [view for view, pending in zip(views, tokens, strict=True) if pending == fewest]
    soonest, least_s = ties[0], math.inf
    for view in ties if len(ties) > 1 else ():
        if (busy_s := view.busy_s) < least_s:
            soonest, least_s = view, busy_s
            if not busy_s:
                break  # nobody is free sooner
    return soonest


def least_loaded(views: list[InstanceView]) -> InstanceView:
    """The decode instance with the fewest rows, running, on their way or promised; ties by context, then by number."""
    due = [view.rows_due for view in views]  # as above
    fewest = min(due)
    ties = [view for view, rows in zip(views, due, strict=True) if rows == fewest]
    return ties[0] if len(ties) == 1 else min(ties, key=lambda view: (view.context_tokens, view.spec.index))


def has_room(view: InstanceView, ask: Ask) -> bool:
    """Whether an instance takes a row: `SPARE` of its pages are left to the rows that it has, for their answers. A full
    instance would preempt the latest, and its prompt would be computed again."""
    left = view.free_pages - view.spec.pages_for(ask.context_tokens + 1)
    if left < SPARE * view.spec.usable_pages and view.rows + view.incoming:
        return False  # first what says so most often in a full cluster
    return view.room_for(ask)
