"""Shards of a unit: which pieces of the source's make one of the destination's, and how they are cut and joined.

Enters: single-device arrays of one side and the shardings of both. Leaves: pieces, whole shards, an array on the
destination's mesh. Called by the transports. Compiles nothing: cutting and joining is numpy, which on CPU is a view of
the source and one copy; elsewhere it goes through the host.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pdjax.transfer.plan import Piece, head_plan

SPEC = PartitionSpec(None, None, None, "kv")  # of [layers, 2, T, K, H] over a ("kv", "rep") mesh
_AXES = ("kv", "rep")


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """How a mesh cuts the kv heads; see `pdjax.transfer.plan.HeadSplit`."""

    kv: int
    rep: int


def is_wire(sharding: NamedSharding) -> bool:
    """Whether a sharding is `SPEC` over a ("kv", "rep") mesh."""
    return sharding.mesh.axis_names == _AXES and sharding.spec == SPEC


def split_of(sharding: NamedSharding) -> Split:
    return Split(sharding.mesh.shape["kv"], sharding.mesh.shape["rep"])


@functools.lru_cache
def pieces_by_shard(kv_heads: int, src: Split, dst: Split) -> tuple[tuple[Piece, ...], ...]:
    """The head plan, one group of pieces per destination shard, in the order of the destination's devices."""
    pieces = head_plan(kv_heads, src, dst)
    return tuple(tuple(p for p in pieces if p.dst_shard == shard) for shard in range(dst.kv * dst.rep))


def shards_of(kv: jax.Array, sharding: NamedSharding) -> list[jax.Array]:
    """The single-device arrays of `kv`, in the order of the mesh's devices."""
    shards = {shard.device: shard.data for shard in kv.addressable_shards}
    return [shards[device] for device in sharding.mesh.devices.flat]


def cut(source: jax.Array, piece: Piece) -> np.ndarray:
    """The heads of a piece out of its source shard."""
    return np.asarray(source)[:, :, :, piece.src_offset : piece.src_offset + piece.heads]


def join(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates along the heads, in memory that a CPU device takes over without a copy (64-byte aligned)."""
    if len(parts) == 1:
        return parts[0]
    shape = (*parts[0].shape[:3], sum(part.shape[3] for part in parts), parts[0].shape[4])
    joined = aligned(shape, parts[0].dtype)
    return np.concatenate(parts, axis=3, out=joined)


def aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An array that is still to be filled, in memory that a CPU device takes over without a copy (64-byte aligned)."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + nbytes].view(dtype).reshape(shape)


def place(shape: tuple[int, ...], shards: Sequence[Any], dst: NamedSharding) -> jax.Array:
    """One array on `dst` of a shard (device or host array) for each of its devices."""
    placed = jax.device_put(list(shards), list(dst.mesh.devices.flat))
    return jax.make_array_from_single_device_arrays(shape, dst, placed)
