"""Which heads of a unit go from which rank to which: the head plan, rank by rank.

Enters: how both sides cut their kv heads, and over which ranks. Leaves: for each destination rank every head that its
shards need, once: replicas on one rank are filled from one copy. Called by the outbox and the inbox. Pure.
"""

import dataclasses
import functools
from collections import Counter

from pdjax.transfer.parcel import Side


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """The kv heads [start, stop) that one source rank gives to one destination rank."""

    src_rank: int
    dst_rank: int
    start: int
    stop: int


def heads_of(kv_heads: int, side: Side, rank: int) -> range:
    """The kv heads that a rank of an instance holds; its shards follow each other, so the heads do."""
    per_rank, per_part = side.kv * side.rep // len(side.ranks), kv_heads // side.kv
    first = side.ranks.index(rank) * per_rank
    last = first + per_rank - 1
    return range(first // side.rep * per_part, (last // side.rep + 1) * per_part)


@functools.lru_cache
def shares(kv_heads: int, src: Side, dst: Side) -> tuple[Share, ...]:
    """Sorted by destination rank and head. Where several source ranks hold a head, the one that has given least gives.

    Raises:
        ValueError: a side's `kv` does not divide the heads, or its ranks do not divide its shards.
    """
    for name, side in (("src", src), ("dst", dst)):
        if kv_heads % side.kv or side.kv * side.rep % len(side.ranks):
            raise ValueError(
                f"{name} is {side}; allowed: kv a divisor of the {kv_heads} kv heads, as many shards on every rank"
            )
    given: Counter[int] = Counter()  # source rank -> heads it sends
    out = []
    for dst_rank in dst.ranks:
        needed = heads_of(kv_heads, dst, dst_rank)
        start = needed.start
        while start < needed.stop:
            holders = [rank for rank in src.ranks if start in heads_of(kv_heads, src, rank)]
            src_rank = min(holders, key=lambda rank: given[rank])
            stop = min(heads_of(kv_heads, src, src_rank).stop, needed.stop)
            given[src_rank] += stop - start
            out.append(Share(src_rank, dst_rank, start, stop))
            start = stop
    return tuple(out)
