"""Splitwise: two pools joined by shortest queue, and a mixed pool between them that borrows from both.

Cluster level (section IV-A; details as in the authors' simulator): at its arrival a request gets the prompt machine
with the fewest pending tokens and the token machine with the fewest rows, running and promised (each is one pending
token). A prompt machine refuses if its queue is not empty and would grow over a threshold, a token machine if the
request's KV does not fit. Then the mixed pool is asked, and if it refuses too, a machine of the opposite pool is
borrowed into it (`revise`); that goes back to its origin when what it was borrowed for has drained. One machine of
each role always stays. If nobody can be borrowed, both phases go to the machine with the fewest pending tokens.

Machine level (section IV-B): prompts first, first come, first served, up to the length that saturates the machine
(there 2048 tokens); rows make their step in the same pass if there is room beside the prompts, and otherwise wait, but
never for more than MAX_STREAK passes. KV of long prompts is streamed, that of short ones follows the prompt (IV-C).

What is ours: the threshold is four of the machine's largest passes, as the simulator's 8192 tokens are four of 2048.
Whether KV fits is judged by the pages that are free now, less those of requests that were promised room.
"""

from collections.abc import Sequence

from pdjax.latency import saturating_tokens
from pdjax.messages import Role
from pdjax.schedulers.base import Ask, ClusterView, Flip, InstanceView, Place, Plan, Traits, Wait, able, take_prompts
from pdjax.schedulers.colocated import MAX_STREAK
from pdjax.schedulers.disaggregated import check_stream_from, least_loaded, shortest_queue

QUEUE_PASSES = 4  # of the largest size that may wait before others are asked


class Splitwise:
    """See the module's text.

    Args:
        stream_from: KV of prompts of at least so many tokens is streamed; None: of none.
        queue_tokens: pending tokens up to which a queue that is not empty takes prompts; 0: `QUEUE_PASSES` passes.
        batch_tokens: prompts share a pass up to so many tokens; 0: up to what saturates the instance.
    """

    traits = Traits(prefill_decodes=True, decode_prefills=True)

    def __init__(self, stream_from: int | None = None, queue_tokens: int = 0, batch_tokens: int = 0) -> None:
        check_stream_from(stream_from)
        for name, value in (("queue_tokens", queue_tokens), ("batch_tokens", batch_tokens)):
            if value < 0:
                raise ValueError(f"{name} is {value}; allowed: tokens >= 0")
        self._stream_from = stream_from
        self._queue_tokens = queue_tokens
        self._batch_tokens = batch_tokens

    def revise(self, cluster: ClusterView) -> Sequence[Flip]:
        return self._borrow(cluster.queue[0], cluster) if cluster.queue else _give_back(cluster)

    def place(self, ask: Ask, cluster: ClusterView) -> Place | Wait:
        source, target = self._source(ask, cluster), _target(ask, cluster)
        if source is None or target is None:
            return _both(cluster)
        index, to = source.spec.index, target.spec.index
        reason = (
            f"splitwise: {source.role.value} {index} has {source.pending_tokens} pending tokens, "
            f"{target.role.value} {to} {target.rows_due} rows"
        )
        streams = self._stream_from is not None and ask.context_tokens >= self._stream_from and index != to
        return Place(index, to, "stream" if streams else "whole", reason)

    def hand_off(self, ask: Ask, cluster: ClusterView) -> int | None:
        return None  # `place` has named the instance

    def iterate(self, instance: InstanceView, cluster: ClusterView) -> Plan:
        limit = self._batch_tokens or saturating_tokens(instance.latency, instance.spec)
        chunks = take_prompts(instance, limit)
        if not instance.rows:
            return Plan(chunks)
        beside = sum(tokens for _, tokens in chunks) + instance.rows <= limit
        return Plan(chunks, decode=not chunks or beside or instance.prefill_streak >= MAX_STREAK)

    def _source(self, ask: Ask, cluster: ClusterView) -> InstanceView | None:
        """Who computes the prompt: the shortest queue of the prompt pool, else of the mixed pool, if it accepts."""
        for role in (Role.PREFILL, Role.MIXED):
            if pool := able(cluster.instances, role):
                best = shortest_queue(pool)
                most = self._queue_tokens or QUEUE_PASSES * best.spec.max_chunk
                if not best.pending_tokens or best.pending_tokens + ask.context_tokens <= most:
                    return best
        return None

    def _borrow(self, ask: Ask, cluster: ClusterView) -> list[Flip]:
        flips = []
        lenders = [view for view in able(cluster.instances, Role.DECODE) if view.spec.max_chunk]
        if self._source(ask, cluster) is None and len(lenders) > 1:
            why = f"prompt queues have no room for {ask.context_tokens} tokens"
            flips.append(Flip(least_loaded(lenders).spec.index, Role.MIXED, f"borrowed: {why}"))
        lenders = [view for view in able(cluster.instances, Role.PREFILL) if view.spec.max_rows]
        if _target(ask, cluster) is None and len(lenders) > 1:
            why = f"token machines have no room for KV of {ask.context_tokens + ask.max_new_tokens} tokens"
            flips.append(Flip(shortest_queue(lenders).spec.index, Role.MIXED, f"borrowed: {why}"))
        return flips


def _target(ask: Ask, cluster: ClusterView) -> InstanceView | None:
    """Who decodes: the least loaded of the token pool, else of the mixed pool, if there is room for its KV."""
    for role in (Role.DECODE, Role.MIXED):
        if pool := able(cluster.instances, role):
            best = least_loaded(pool)
            pages = sum(_pages(best, other) for other in (*best.assigned, ask))
            if best.rows_due < best.spec.max_rows and pages <= best.free_pages:
                return best
    return None


def _pages(view: InstanceView, ask: Ask) -> int:
    """Pages of a request at its longest."""
    return view.spec.pages_for(ask.context_tokens + ask.max_new_tokens)


def _both(cluster: ClusterView) -> Place | Wait:
    """Both phases on one instance."""
    views = [view for view in able(cluster.instances, *Role) if view.spec.max_chunk and view.spec.max_rows]
    if not views:
        return Wait("no living instance can both prefill and decode")
    best = min(views, key=lambda view: (view.next_role is not None, _pending(view), view.spec.index))
    index = best.spec.index
    reason = f"splitwise: no queue accepts; both phases on {index}, with {_pending(best)} pending tokens"
    return Place(index, index, "whole", reason)


def _pending(view: InstanceView) -> int:
    """Tokens that an instance still has to compute in its next passes: those of prompts, and one per row."""
    return view.pending_tokens + view.rows_due


def _give_back(cluster: ClusterView) -> list[Flip]:
    """A borrowed instance whose mixed queue has drained, one at a time: so the others still do its work."""
    mixed = able(cluster.instances, Role.MIXED)
    for view in mixed:
        origin = view.spec.role
        drained = not view.prefills if origin is Role.DECODE else not view.rows_due
        missing = Role.PREFILL if origin is Role.DECODE else Role.DECODE  # the work that it stops doing
        others = len(mixed) > 1 or able(cluster.instances, missing)
        if origin is not Role.MIXED and drained and others:
            return [Flip(view.spec.index, origin, "its mixed queue has drained")]
    return []
