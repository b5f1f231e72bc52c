"""Prefill instances prefill, decode instances decode; KV moves between them.

Prompts go first come, first served to the prefill instance with the least pending tokens, rows to the decode instance
with the least load (DistServe, section 4.3; Splitwise's join-shortest-queue, section 4). Prompts share a pass up to the
length that saturates the instance: more would only delay the first tokens of all. KV is pushed while the prompt
is computed ("stream": decode pages are reserved first) or pulled afterwards, when a decode instance has room: until
then it stays on the prefill side, which is the backpressure.
"""

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


class Disaggregated:
    """See the module's text.

    Args:
        stream_from: prompts of at least so many tokens are streamed; None: all are pulled.
        batch_tokens: prompts share a pass up to so many tokens; 0: up to what saturates the instance.
    """

    traits = Traits(prefill_decodes=False, decode_prefills=False, steady=True)

    def __init__(self, stream_from: int | None = None, batch_tokens: int = 0) -> None:
        if stream_from is not None and stream_from < 1:
            raise ValueError(f"stream_from is {stream_from}; allowed: tokens >= 1, or None")
        if batch_tokens < 0:
            raise ValueError(f"batch_tokens is {batch_tokens}; allowed: tokens >= 0")
        self._stream_from = stream_from
        self._batch_tokens = batch_tokens

    def place(self, ask: Ask, cluster: ClusterView) -> Place | Wait:
        sources, targets = prefillers(cluster.instances), decoders(cluster.instances)
        if not sources or not targets:
            return Wait("no living instance of a role")
        source = min(sources, key=lambda view: (view.pending_tokens, view.spec.index))
        index, reason = source.spec.index, f"shortest prefill queue: {source.pending_tokens} tokens"
        if index in [view.spec.index for view in targets]:  # the others of a role are lost
            return Place(index, index, "whole", f"{reason}; it decodes too")
        if self._stream_from is None or ask.context_tokens < self._stream_from:
            return Place(index, None, "whole", f"{reason}; pulled when a decode instance has room")
        target = least_loaded(targets)
        return Place(index, target.spec.index, "stream", f"{reason}; streamed to the least loaded")

    def hand_off(self, ask: Ask, cluster: ClusterView) -> int | None:
        targets = [view for view in decoders(cluster.instances) if view.room_for(ask)]
        return least_loaded(targets).spec.index if targets else None

    def iterate(self, instance: InstanceView, cluster: ClusterView) -> Plan:
        if not instance.prefills:
            return Plan(decode=instance.rows > 0)
        limit = self._batch_tokens or saturating_tokens(instance.latency, instance.spec)
        return Plan(take_prompts(instance, limit), decode=instance.rows > 0)


def least_loaded(views: list[InstanceView]) -> InstanceView:
    """The decode instance with the fewest rows, running or on their way; ties by context, then by number."""
    return min(views, key=lambda view: (view.rows + view.incoming, view.context_tokens, view.spec.index))
