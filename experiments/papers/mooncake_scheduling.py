"""Mooncake's figure 5 (FAST'25): TTFT of the conversation trace under four ways to choose a prefill instance. Rows of
the trace enter; a mean TTFT leaves. Called by `mooncake`.

The controller knows no reuse of KV between requests. So Mooncake's Conductor stands before it, as it does in the paper:
when a request arrives it looks at the caches, an LRU of blocks for each instance, chooses an instance (algorithm 1,
section 4.1), and hands on a prompt that takes as long without reuse as this one takes with it. The controller queues
and serves these prompts where the Conductor wants them.

What is left out: decoding, which has instances of its own; the time to load KV from an instance's own memory, which is
hidden behind the layers before it; that a block is there only when the prompt that brought it is computed.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from pdjax import fleet, traces
from pdjax.experiments.papers import mooncake_node as node
from pdjax.messages import Role
from pdjax.prefix import BlockCache
from pdjax.schedulers.base import Ask, ClusterView, InstanceView, Place, Plan, Traits, take_prompts
from pdjax.simulation import asks, serve
from pdjax.tally import Tally

CAPACITY = node.CACHE_TOKENS // traces.MOONCAKE_BLOCK  # blocks
POLICIES = ("random", "load balancing", "local cache-aware", "global cache-aware")


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One instance for one request.

    Attributes:
        instance: its number.
        wait_s: until it has done what it was given.
        work_s: to fetch and to prefill.
        reused, fetched: blocks whose KV is not computed, and those of them that come from another instance.
    """

    instance: int
    wait_s: float
    work_s: float
    reused: int
    fetched: int

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.work_s


class Conductor:
    """Chooses prefill instances; prompts that were routed are served in order, so it knows when each will be done.

    Args:
        policy: one of POLICIES.
        instances: how many.
        capacity: blocks that the cache of one holds.
        mfu: part of a node's peak that prefill reaches.
        seed: of the random policy.
    """

    def __init__(self, policy: str, instances: int, capacity: int, *, mfu: float = node.MFU, seed: int = 0) -> None:
        self._choose: Callable[[list[Option]], Option] = {
            "random": random.Random(seed).choice,
            "load balancing": lambda options: min(options, key=lambda option: option.wait_s),
        }.get(policy, lambda options: min(options, key=lambda option: option.ttft_s))
        self._fetches = policy == "global cache-aware"
        self._flops_per_s = mfu * node.A800_FLOPS
        self._caches = [BlockCache(capacity) for _ in range(instances)]
        self._free_s = [0.0] * instances

    def route(self, row: traces.Row, now: float) -> Option:
        """Where a request goes; its blocks will be in the cache there."""
        matches = [cache.match(row.blocks) for cache in self._caches]
        chosen = self._choose([self._option(row, now, number, matches) for number in range(len(matches))])
        self._free_s[chosen.instance] = now + chosen.ttft_s
        self._caches[chosen.instance].add(row.blocks)
        return chosen

    def _option(self, row: traces.Row, now: float, number: int, matches: list[int]) -> Option:
        """Without, and if it is quicker with, the blocks that only another instance has."""
        wait_s, own, best = max(self._free_s[number] - now, 0.0), matches[number], max(matches)
        option = Option(number, wait_s, self._prefill_s(row, own), own, 0)
        if self._fetches and best > own:
            fetch_s = (best - own) * traces.MOONCAKE_BLOCK * node.KV_BYTES_PER_TOKEN / node.NIC_BYTES_PER_S
            other = Option(number, wait_s, fetch_s + self._prefill_s(row, best), best, best - own)
            option = min(option, other, key=lambda option: option.work_s)
        return option

    def _prefill_s(self, row: traces.Row, reused: int) -> float:
        prior = min(reused * traces.MOONCAKE_BLOCK, row.input_tokens - 1)  # the last token is always computed
        return node.flops(row.input_tokens - prior, prior) / self._flops_per_s


class AsRouted:
    """A policy: prompts go where the Conductor wants them, one to a pass."""

    traits = Traits(prefill_decodes=False, steady=True)

    def __init__(self, where: dict[int, int]) -> None:
        self._where = where

    def place(self, ask: Ask, cluster: ClusterView) -> Place:
        return Place(self._where.pop(ask.id), None, "whole", "as the Conductor chose")

    def hand_off(self, ask: Ask, cluster: ClusterView) -> int | None:
        return None  # all answers have one token

    def iterate(self, instance: InstanceView, cluster: ClusterView) -> Plan:
        return Plan(take_prompts(instance, 1))


@dataclasses.dataclass(frozen=True, slots=True)
class Scheduled:
    """What came of a policy.

    Attributes:
        ttft_s, p90_s: of the requests, as the controller served them.
        expected_s: their mean TTFT as the Conductor expected it.
        reused, fetched: parts of all blocks.
    """

    policy: str
    ttft_s: float
    p90_s: float
    expected_s: float
    reused: float
    fetched: float


def scheduled(
    rows: Sequence[traces.Row],
    policy: str,
    *,
    instances: int = node.PREFILLERS,
    capacity: int = CAPACITY,
    seed: int = 0,
) -> Scheduled:
    """Serves the rows, in order of time, under a policy. Arguments as of `Conductor`."""
    conductor = Conductor(policy, instances, capacity, seed=seed)
    where: dict[int, int] = {}
    options: list[Option] = []

    def lengths() -> Iterator[tuple[int, int]]:
        for number, row in enumerate(rows):
            option = conductor.route(row, row.time_s or 0.0)
            where[number] = option.instance
            options.append(option)
            yield max(1, round(node.alone_tokens(option.work_s * node.MFU * node.A800_FLOPS))), 1

    tally = Tally()
    cluster = fleet.build([node.pool(Role.PREFILL, instances)])
    serve(cluster, asks(lengths(), (row.time_s or 0.0 for row in rows)), AsRouted(where), tally)
    blocks = sum(len(row.blocks) for row in rows)
    return Scheduled(
        policy,
        tally.ttft_ms.mean / 1e3,
        tally.ttft_ms.percentile(90) / 1e3,
        sum(option.ttft_s for option in options) / len(options),
        sum(option.reused for option in options) / blocks,
        sum(option.fetched for option in options) / blocks,
    )


def expected_s(rows: Iterable[traces.Row], policy: str, *, mfu: float, seed: int) -> float:
    """The mean TTFT that the Conductor expects: what `scheduled` finds, without serving anything."""
    conductor = Conductor(policy, node.PREFILLERS, CAPACITY, mfu=mfu, seed=seed)
    found = [conductor.route(row, row.time_s or 0.0).ttft_s for row in rows]
    return sum(found) / len(found)
