"""Prefill and decode on the same instance, the two baselines that disaggregation is measured against.

`Colocated` runs prompts before decode steps (prefill-first, as in continuous batching); a long prompt then stalls
every running row. `ChunkedColocated` puts the decode rows first and fills the rest of a token budget with prompt
parts, in one fused pass (Sarathi-Serve, section 4; Dynamic SplitFuse): the stall shrinks to one pass of that budget.
"""

from pdjax.latency import saturating_tokens
from pdjax.messages import Role
from pdjax.schedulers.base import Ask, ClusterView, InstanceView, Place, Plan, Traits, Wait, able, take_chunks

MAX_STREAK = 4  # prefill iterations in a row while rows wait: prompts must not starve running requests for ever


class Colocated:
    """Prefill-first; requests go to the instance with the least work."""

    traits = Traits(colocated=True, steady=True)

    def place(self, ask: Ask, cluster: ClusterView) -> Place | Wait:
        views = able(cluster.instances, *Role)
        if not views:
            return Wait("no instance is alive")
        best = min(views, key=lambda view: (view.pending_tokens, view.rows, view.spec.index))
        index = best.spec.index
        return Place(index, index, "whole", f"colocated: {best.pending_tokens} prompt tokens, {best.rows} rows there")

    def hand_off(self, ask: Ask, cluster: ClusterView) -> int | None:
        return None  # nothing ever migrates

    def iterate(self, instance: InstanceView, cluster: ClusterView) -> Plan:
        if instance.rows and instance.prefill_streak >= MAX_STREAK:
            return Plan(decode=True)
        chunks = take_chunks(instance, instance.spec.max_chunk)
        return Plan(chunks) if chunks else Plan(decode=instance.rows > 0)


class ChunkedColocated(Colocated):
    """Decode rows first, then prompt parts that fill the budget exactly.

    Args:
        budget: tokens of a pass, rows and prompt parts together. 0: the shortest pass that saturates the instance, by
            its latency model: a longer one makes rows wait and gains no throughput.
    """

    def __init__(self, budget: int = 0) -> None:
        if budget < 0:
            raise ValueError(f"budget is {budget}; allowed: tokens >= 0")
        self._budget = budget

    def iterate(self, instance: InstanceView, cluster: ClusterView) -> Plan:
        if not instance.prefills:
            return Plan(decode=instance.rows > 0)
        budget = self._budget or saturating_tokens(instance.latency, instance.spec, beside_rows=True)
        # Rows alone may fill the budget; a prompt must still move, or a full batch would keep it waiting for ever.
        room = max(budget - instance.rows, 1)
        return Plan(take_chunks(instance, room), decode=instance.rows > 0)
