"""Which part of a prompt has its KV from earlier prompts, told by the ids of its blocks. Enter: block ids, prompt by
prompt; equal ids stand for equal tokens behind equal prefixes. Leaves: how many blocks need not be computed. Called by
`pdjax.experiments.papers.mooncake`, and by users who replay traces with block ids (`pdjax.traces.Row.blocks`).

Nothing is stored here but ids: it says what a cache would hold, not what is in it.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

# FLOPs of a layer for n tokens behind p others: 4 * ((p + n)^2 - p^2) * d + 22 * n * d^2; the paper's constants for the
# shape of LLaMA3-70B (Mooncake, FAST'25, section 3).
ATTENTION_FLOPS, TOKEN_FLOPS = 4.0, 22.0


class BlockCache:
    """Blocks of prompts, the one that was not used for longest goes first (LRU).

    Args:
        capacity: blocks that it holds; None: all that come.

    Raises:
        ValueError: a capacity below one block.
    """

    def __init__(self, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity is {capacity!r}; allowed: blocks >= 1, or None")
        self._capacity = capacity
        self._blocks: dict[int, None] = {}  # the least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are here, up to the first that is not. It does not count as a use."""
        for count, block in enumerate(blocks):
            if block not in self._blocks:
                return count
        return len(blocks)

    def add(self, blocks: Iterable[int]) -> None:
        """All blocks of a prompt are used, those that were not here are put here."""
        held = self._blocks
        for block in blocks:
            held.pop(block, None)
            held[block] = None
        if self._capacity is not None:
            while len(held) > self._capacity:
                del held[next(iter(held))]


@dataclasses.dataclass(frozen=True, slots=True)
class Hits:
    """Blocks of all prompts, and those among them whose KV was there."""

    blocks: int
    reused: int

    @property
    def rate(self) -> float:
        """NaN without blocks."""
        return self.reused / self.blocks if self.blocks else math.nan


def hits(prompts: Iterable[Sequence[int]], capacity: int | None = None) -> Hits:
    """Prefixes found in one cache by prompts that come one after the other (Mooncake, arXiv 2407.00079, table 1, LRU).

    Raises:
        ValueError: as `BlockCache`.
    """
    cache, blocks, reused = BlockCache(capacity), 0, 0
    for prompt in prompts:
        blocks += len(prompt)
        reused += cache.match(prompt)
        cache.add(prompt)
    return Hits(blocks, reused)


def prefill_flops(tokens: float, prior: float, *, layers: int, hidden: int) -> float:
    """Of `tokens` prompt tokens behind `prior` ones that are reused (Mooncake, FAST'25, section 3)."""
    pairs = tokens * (tokens + 2 * prior)
    return layers * (ATTENTION_FLOPS * pairs * hidden + TOKEN_FLOPS * tokens * hidden**2)


def alone_tokens(flops: float, *, layers: int, hidden: int) -> float:
    """Tokens of a prompt without a reused prefix that takes so many FLOPs: the inverse of `prefill_flops`."""
    square, linear = layers * ATTENTION_FLOPS * hidden, layers * TOKEN_FLOPS * hidden**2
    return (math.sqrt(linear**2 + 4 * square * flops) - linear) / (2 * square)


def reuse_pays_bytes_per_s(
    prior: int, flops_per_s: float, *, hidden: int, queries_per_kv: int, element_bytes: int = 2
) -> float:
    """The bandwidth from which on it is faster to load the KV of a prefix than to compute it (Mooncake, FAST'25,
    section 3): B / G = 2 d s / (gqa * (a p d + b d^2)).

    Args:
        prior: tokens of the prefix, p.
        flops_per_s: that prefill reaches, G.
        hidden: the model's dimension, d.
        queries_per_kv: query heads of each KV head, gqa.
        element_bytes: of one number of the KV, s.
    """
    kv_bytes = 2 * hidden * element_bytes / queries_per_kv  # of a token and a layer
    return flops_per_s * kv_bytes * prior / prefill_flops(prior, 0, layers=1, hidden=hidden)
