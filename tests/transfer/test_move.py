"""`move`: every value arrives where the destination's sharding says, and no program is compiled for it."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from pdjax.models.config import ModelConfig
from pdjax.models.sharding import make_mesh
from pdjax.transfer.device_put import move
from pdjax.transfer.shards import SPEC

# (kv heads, query heads per kv head, source tp, destination tp); up to 8 devices together, else they overlap.
PAIRS = [
    (1, 8, 1, 4),
    (1, 8, 8, 1),
    (2, 4, 1, 4),
    (2, 4, 2, 4),
    (2, 4, 4, 1),
    (2, 4, 4, 2),
    (2, 4, 8, 8),
    (3, 3, 1, 3),
    (3, 3, 3, 1),
    (3, 2, 2, 6),
    (3, 2, 6, 2),
    (4, 2, 1, 1),
    (4, 2, 2, 4),
    (4, 2, 4, 1),
    (4, 2, 8, 4),
    (5, 1, 5, 1),
    (5, 1, 1, 5),
    (6, 1, 2, 3),
    (8, 1, 4, 8),
]


def sides(kv_heads, group, src_tp, dst_tp):
    config = ModelConfig(8, 8, 8, 1, kv_heads * group, kv_heads, 4)
    devices = jax.devices()
    meshes = make_mesh(config, devices[:src_tp]), make_mesh(config, devices[8 - dst_tp : 8])
    return tuple(NamedSharding(mesh, SPEC) for mesh in meshes)


def values(kv_heads, tokens, dtype=np.float32, seed=0):
    kv = np.random.default_rng(seed).standard_normal((2, 2, tokens, kv_heads, 4))
    return kv.astype(dtype)


@contextlib.contextmanager
def compile_events():
    """The names of JAX's tracing and compiling events while it is open."""
    seen = []

    def listen(name, *_, **__):
        if "/compile/" in name or "jaxpr" in name:
            seen.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("kv_heads, group, src_tp, dst_tp", PAIRS)
def test_every_shard_holds_the_values_of_its_heads(kv_heads, group, src_tp, dst_tp):
    src, dst = sides(kv_heads, group, src_tp, dst_tp)
    kv = values(kv_heads, tokens=16)
    moved = move(jax.device_put(kv, src), src, dst)
    assert moved.sharding == dst and moved.shape == kv.shape and moved.dtype == kv.dtype
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), kv[shard.index])


def test_bfloat16_arrives_bit_for_bit():
    for pair in ((2, 4, 4, 1), (2, 4, 1, 4), (4, 2, 4, 4)):
        src, dst = sides(*pair)
        kv = values(pair[0], tokens=16, dtype=jnp.bfloat16)
        moved = move(jax.device_put(kv, src), src, dst)
        assert moved.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(moved).view(np.uint16), kv.view(np.uint16))


def test_a_shape_never_seen_before_compiles_nothing():
    with compile_events() as control:
        jax.block_until_ready(jax.jit(lambda x: x + 1)(np.zeros(3)))
    assert control, "the listener hears no compilation at all"
    for tokens, pair in enumerate(PAIRS, start=33):
        src, dst = sides(*pair)
        kv = jax.device_put(values(pair[0], tokens), src)
        with compile_events() as seen:
            jax.block_until_ready(move(kv, src, dst))
        assert not seen, (pair, seen)


def test_the_moved_array_stays_whole_when_the_source_is_deleted():
    # A joined or cut shard may share host memory with what it was made from; it must keep that memory alive.
    for pair in PAIRS:
        src, dst = sides(*pair)
        kv = values(pair[0], tokens=16)
        source = jax.device_put(kv, src)
        moved = jax.block_until_ready(move(source, src, dst))
        if pair[2] + pair[3] <= 8:
            source.delete()
        del source
        np.testing.assert_array_equal(np.asarray(moved), kv)


def test_the_moved_array_is_taken_by_a_program_of_the_destination():
    src, dst = sides(4, 2, 2, 4)
    kv = values(4, tokens=16)
    program = jax.jit(lambda x: x * 2, in_shardings=dst, out_shardings=dst)
    np.testing.assert_array_equal(program(move(jax.device_put(kv, src), src, dst)), kv * 2)
