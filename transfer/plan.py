"""The head plan: which shard of one instance feeds which shard of another.

Enters: the number of kv heads and how each side splits them. Leaves: pieces, one per (source shard, destination
shard) pair that shares heads. Called by transports. Pure: no jax, no devices.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Protocol


class HeadSplit(Protocol):
    """How one side cuts its kv heads: `kv` equal parts, each held by `rep` shards (`pdjax.models.sharding.Split`)."""

    @property
    def kv(self) -> int: ...
    @property
    def rep(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """The kv heads [start, stop) that one source shard gives to one destination shard.

    Attributes:
        src_shard, dst_shard: shard numbers, kv_index * rep + rep_index: the order of devices in a ("kv", "rep") mesh.
        start, stop: global head numbers.
        src_offset, dst_offset: where head `start` lies inside the source and the destination shard.
    """

    src_shard: int
    dst_shard: int
    start: int
    stop: int
    src_offset: int
    dst_offset: int

    @property
    def heads(self) -> int:
        return self.stop - self.start


def head_plan(kv_heads: int, src: HeadSplit, dst: HeadSplit) -> tuple[Piece, ...]:
    """Every destination shard's heads, each once, from source shards that hold them; sorted by destination and head.

    Where the source has replicas, each piece comes from the one that has given least so far: all links are used, and
    no two differ by more than a piece.

    Raises:
        ValueError: a side's `kv` does not divide the heads, or `rep` is below 1.
    """
    for side, parts in (("src", src), ("dst", dst)):
        if parts.kv < 1 or parts.rep < 1 or kv_heads % parts.kv:
            raise ValueError(
                f"{side} is a split of kv {parts.kv}, rep {parts.rep}; "
                f"allowed: kv a divisor of the {kv_heads} kv heads, rep >= 1"
            )
    src_heads, dst_heads = kv_heads // src.kv, kv_heads // dst.kv
    given: Counter[int] = Counter()  # source shard -> heads it sends
    pieces = []
    for dst_shard in range(dst.kv * dst.rep):
        first = dst_shard // dst.rep * dst_heads
        start = first
        while start < first + dst_heads:
            part = start // src_heads
            stop = min((part + 1) * src_heads, first + dst_heads)
            src_shard = min(range(part * src.rep, (part + 1) * src.rep), key=lambda shard: given[shard])
            given[src_shard] += stop - start
            pieces.append(Piece(src_shard, dst_shard, start, stop, start - part * src_heads, start - first))
            start = stop
    return tuple(pieces)


def wire_bytes(pieces: Iterable[Piece], layers: int, tokens: int, head_dim: int, itemsize: int) -> int:
    """Bytes of K and V that cross for `tokens` tokens, every replica on the destination counted."""
    return sum(piece.heads for piece in pieces) * layers * 2 * tokens * head_dim * itemsize
