"""The head plan on every pair of splits that tensor parallelism can give."""

import itertools
from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pdjax.models.config import ModelConfig
from pdjax.models.sharding import make_mesh, split
from pdjax.transfer.plan import head_plan, wire_bytes


def config(kv_heads, group):
    return ModelConfig(8, 8, 8, 1, kv_heads * group, kv_heads, 4)


def grid():
    """(kv heads, source split, destination split): every tp that divides some number of query heads, up to 24."""
    for kv_heads in (1, 2, 3, 4, 5, 8):
        splits = {
            split(config(kv_heads, g), tp) for g in (1, 2, 3, 4, 8) for tp in range(1, 25) if not kv_heads * g % tp
        }
        for src, dst in itertools.product(sorted(splits, key=str), repeat=2):
            yield kv_heads, src, dst


def held(kv_heads, parts, shard):
    """The heads that a shard holds, from the definition of a split."""
    each = kv_heads // parts.kv
    return range(shard // parts.rep * each, (shard // parts.rep + 1) * each)


def test_every_destination_shard_gets_exactly_its_heads_each_once():
    for kv_heads, src, dst in grid():
        plan = head_plan(kv_heads, src, dst)
        for shard in range(dst.tp):
            got = [head for p in plan if p.dst_shard == shard for head in range(p.start, p.stop)]
            assert got == list(held(kv_heads, dst, shard)), (kv_heads, src, dst, shard)


def test_every_piece_lies_inside_the_shards_it_names():
    for kv_heads, src, dst in grid():
        for p in head_plan(kv_heads, src, dst):
            assert 0 <= p.src_shard < src.tp
            for parts, shard, offset in ((src, p.src_shard, p.src_offset), (dst, p.dst_shard, p.dst_offset)):
                heads = held(kv_heads, parts, shard)
                assert list(heads[offset : offset + p.heads]) == list(range(p.start, p.stop))


def test_replicas_of_a_source_share_the_work_to_within_a_piece():
    for kv_heads, src, dst in grid():
        plan = head_plan(kv_heads, src, dst)
        given = Counter({shard: 0 for shard in range(src.tp)})
        for p in plan:
            given[p.src_shard] += p.heads
        for first in range(0, src.tp, src.rep):
            loads = [given[shard] for shard in range(first, first + src.rep)]
            assert max(loads) - min(loads) <= max(p.heads for p in plan)


def test_shards_are_numbered_and_cut_as_named_shardings_cut_them():
    for kv_heads, group, tp in [(1, 8, 4), (2, 4, 8), (3, 3, 3), (4, 2, 8), (5, 1, 5), (8, 1, 4), (3, 2, 6), (2, 4, 2)]:
        mesh = make_mesh(config(kv_heads, group), jax.devices()[:tp])
        sharding = NamedSharding(mesh, PartitionSpec(None, None, None, "kv"))
        indices = sharding.devices_indices_map((2, 2, 16, kv_heads, 4))
        parts = split(config(kv_heads, group), tp)
        for p in head_plan(kv_heads, parts, parts):
            # Equal splits: each shard's only piece is all it holds.
            assert range(kv_heads)[indices[mesh.devices.flat[p.dst_shard]][3]] == range(p.start, p.stop)
            assert held(kv_heads, parts, p.src_shard) == range(p.start, p.stop)


def test_wire_bytes_are_the_bytes_of_the_destination_replicas_included():
    for kv_heads, src, dst in grid():
        plan = head_plan(kv_heads, src, dst)
        one = np.zeros((3, 2, 7, kv_heads, 16), np.float32).nbytes
        assert wire_bytes(plan, layers=3, tokens=7, head_dim=16, itemsize=4) == one * dst.rep


def test_more_shards_than_heads_send_from_distinct_replicas():
    two_heads = config(2, 4)
    plan = head_plan(2, split(two_heads, 4), split(two_heads, 4))
    assert sorted(p.src_shard for p in plan) == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", ["src", "dst"])
def test_a_split_that_does_not_divide_the_heads_is_refused_by_name(bad):
    good, odd = split(config(3, 1), 3), split(config(2, 1), 2)
    sides = (odd, good) if bad == "src" else (good, odd)
    with pytest.raises(ValueError, match=rf"^{bad} .*kv 2.*divisor of the 3 kv heads"):
        head_plan(3, *sides)
