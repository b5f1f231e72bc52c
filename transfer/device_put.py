"""Moves KV between meshes of one process with `jax.device_put`, shard by shard along the head plan.

Enters: units on the source's devices. Leaves: the same units on the destination's devices. Called by the threads of
`pdjax.transfer.pairs`.

Why shard by shard: `jax.device_put` of a whole array onto a mesh of another size is fast for some pairs of meshes,
but for others (1 device to 4, say) it compiles a program for every new shape, and it keeps its caller until the array
is computed. Moving single-device arrays, or numpy views of them, does neither. Seen with jax 0.10.2 and 0.12.0.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from pdjax.transfer.base import Unit
from pdjax.transfer.pairs import TIMEOUT_S, Pairs
from pdjax.transfer.shards import cut, join, pieces_by_shard, place, shards_of, split_of


class DevicePut(Pairs):
    """The `Transport` of one process; arguments as of `pdjax.transfer.pairs.Pairs`, without `connect`."""

    def __init__(
        self,
        shardings: Sequence[Sequence[NamedSharding]],
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(shardings, lambda src, dst: _Direct(), timeout_s, clock)


class _Direct:
    """A `Link` without anything to connect."""

    def move(self, unit: Unit, src: NamedSharding, dst: NamedSharding) -> jax.Array:
        return move(unit.kv, src, dst)

    def close(self) -> None:
        pass


def move(kv: jax.Array, src: NamedSharding, dst: NamedSharding) -> jax.Array:
    """`kv` [layers, 2, T, K, H], sharded as `src`, onto `dst`, both `SPEC` over ("kv", "rep"). Compiles nothing.

    A shard that both sides cut alike goes from device to device; others are cut or joined on the way.
    """
    sources = shards_of(kv, src)
    heads = kv.shape[3] // dst.mesh.shape["kv"]
    joined: dict[int, np.ndarray] = {}  # first head -> host array: replicas are joined once
    shards: list[Any] = []
    for pieces in pieces_by_shard(kv.shape[3], split_of(src), split_of(dst)):
        source = sources[pieces[0].src_shard]
        if len(pieces) == 1 and source.shape[3] == heads:
            shards.append(source)
            continue
        if pieces[0].start not in joined:
            joined[pieces[0].start] = join([cut(sources[piece.src_shard], piece) for piece in pieces])
        shards.append(joined[pieces[0].start])
    return place(kv.shape, shards, dst)
