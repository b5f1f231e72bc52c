"""Prefill and decode on the same instance, the two baselines that disaggregation is measured against.

`Colocated` runs prompts before decode steps (prefill-first, as in continuous batching); a long prompt then stalls
every running row. `ChunkedColocated` puts the decode rows first and fills the rest of a token budget with prompt
parts, in one fused pass (Sarathi-Serve, section 4; Dynamic SplitFuse): the stall shrinks to one pass of that budget.
"""

import math

from pdjax.latency import chunk_sizes, saturating_tokens
from pdjax.messages import Role
from pdjax.schedulers.base import Ask, ClusterView, InstanceView, Place, Plan, Traits, Wait, able, take_chunks

MAX_STREAK = 4  # prefill iterations in a row while rows wait: prompts must not starve running requests for ever


class Colocated:
    """Prefill-first; requests go to the instance with the least work."""

    traits = Traits(colocated=True, steady=True)
    rows_ride = False  # in passes of prompts: they stand still, which admission reckons with

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
    """Decode rows first, then parts of one or more prompts that fill the pass exactly.

    Args:
        budget: tokens of a pass, rows and prompt parts together. 0: found for each pass by the latency model. It is
            the compiled size of prompt parts that saturates mixed passes, or the largest below it with which the pass
            keeps the strictest limit of its rows on the time between tokens, as Sarathi-Serve chooses its budget
            (section 4.3); at least the smallest, so that prompts move. TPOT, a mean, sets no limit on a pass: shorter
            passes are more passes, each with its rows' step to pay, and attainment of both limits fell. Rows are
            padded for themselves, so they come on top of that size, where they cost the prompt nothing.
    """

    rows_ride = True

    def __init__(self, budget: int = 0) -> None:
        if budget < 0:
            raise ValueError(f"budget is {budget}; allowed: tokens >= 0")
        self._budget = budget

    def iterate(self, instance: InstanceView, cluster: ClusterView) -> Plan:
        if not instance.prefills:
            return Plan(decode=instance.rows > 0)
        if not self._budget:
            return Plan(_largest(instance), decode=instance.rows > 0)
        # Rows alone may fill the budget; a prompt must still move, or a full batch would keep it waiting for ever.
        room = max(self._budget - instance.rows, 1)
        return Plan(take_chunks(instance, room), decode=instance.rows > 0)


def _largest(instance: InstanceView) -> tuple[tuple[Ask, int], ...]:
    """The prompt parts of the next pass."""
    spec, limit_s = instance.spec, _limit_s(instance)
    most = saturating_tokens(instance.latency, spec, beside_rows=True)
    sizes = chunk_sizes(spec, beside_rows=True) or (most // 8, most // 4, most // 2, most)
    chunks: tuple[tuple[Ask, int], ...] = ()
    for size in sorted({max(size, 1) for size in sizes if size <= most}, reverse=True):
        chunks = take_chunks(instance, size)
        load = instance.load.beside(*((tokens, ask.prefilled) for ask, tokens in chunks))
        if instance.latency.iteration_s(spec, load) <= limit_s:
            break
    return chunks


def _limit_s(instance: InstanceView) -> float:
    """The strictest limit of the rows on a gap between tokens, and so on a pass that they ride in, seconds."""
    return float(instance.table.pass_s.min(initial=math.inf))
