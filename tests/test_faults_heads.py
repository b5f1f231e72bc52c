"""Heads between meshes: for every pair of sizes, replicated heads included, KV arrives bit for bit, and what arrives is
an array of the destination's mesh, whatever the source's mesh was called and however often it went back and forth."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pdjax.compiles import compiled
from pdjax.models.config import ModelConfig
from pdjax.models.sharding import make_mesh
from pdjax.transfer.device_put import DevicePut, move

TOKENS, HEAD_DIM = 16, 4
SPEC = PartitionSpec(None, None, None, "kv")  # of a unit, [layers, 2, T, K, H]


def sharding(kv_heads, group, tp, first=0):
    """Of an instance on `tp` devices; the last ones if there are not enough behind `first`."""
    devices = jax.devices()[min(first, 8 - tp) :][:tp]
    return NamedSharding(make_mesh(ModelConfig(8, 8, 8, 1, kv_heads * group, kv_heads, HEAD_DIM), devices), SPEC)


def values(kv_heads):
    return np.random.default_rng(kv_heads).standard_normal((2, 2, TOKENS, kv_heads, HEAD_DIM)).astype(np.float32)


@pytest.mark.parametrize(
    ("kv_heads", "group", "sizes"),
    [(1, 8, (1, 2, 4, 8)), (2, 4, (1, 2, 4, 8)), (4, 2, (1, 2, 4, 8)), (8, 1, (1, 2, 4, 8)), (3, 2, (1, 2, 3, 6)),
     (5, 1, (1, 5))],
)  # fmt: skip
def test_every_pair_of_mesh_sizes_moves_every_head_bit_for_bit(kv_heads, group, sizes):
    kv = values(kv_heads)
    for src_tp in sizes:
        for dst_tp in sizes:
            src, dst = sharding(kv_heads, group, src_tp), sharding(kv_heads, group, dst_tp, first=src_tp)
            moved = move(jax.device_put(kv, src), src, dst)
            assert moved.sharding == dst
            for shard in moved.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), kv[shard.index], f"{src_tp} -> {dst_tp}")


def test_kv_that_goes_back_and_forth_is_taken_by_the_same_programs_without_a_copy_in_between():
    sides = sharding(2, 4, 2), sharding(2, 4, 4, first=4)
    programs = [jax.jit(lambda x: x * 2, in_shardings=side, out_shardings=side) for side in sides]
    kv = values(2)
    here = programs[0](jax.device_put(kv, sides[0]))
    for turn in range(6):
        src, dst = sides[turn % 2], sides[(turn + 1) % 2]
        there = move(here, src, dst)
        assert there.sharding == dst and there.committed
        here = programs[(turn + 1) % 2](there)
        if turn == 0:
            before = compiled()[0]
    assert compiled()[0] == before
    np.testing.assert_array_equal(np.asarray(here), kv * 2**7)


@pytest.mark.parametrize("explicit", ["source", "destination"])
def test_explicit_axis_types_of_one_mesh_do_not_follow_the_array_to_the_other(explicit):
    src, dst = sharding(2, 4, 2), sharding(2, 4, 4, first=4)
    named = src if explicit == "source" else dst
    retyped = NamedSharding(Mesh(named.mesh.devices, named.mesh.axis_names, axis_types=(AxisType.Explicit,) * 2), SPEC)
    src, dst = (retyped, dst) if explicit == "source" else (src, retyped)
    kv = values(2)
    moved = move(jax.device_put(kv, src), src, dst)
    assert moved.sharding == dst
    np.testing.assert_array_equal(jax.jit(lambda x: x * 2, out_shardings=dst)(moved), kv * 2)


def test_a_mesh_with_other_axis_names_is_refused_before_anything_moves():
    good = sharding(2, 4, 2)
    other = NamedSharding(Mesh(good.mesh.devices, ("model", "copy")), PartitionSpec(None, None, None, "model"))
    with pytest.raises(ValueError, match=r"shardings\[1\] has .*; allowed: "):
        DevicePut([[good], [other]])
