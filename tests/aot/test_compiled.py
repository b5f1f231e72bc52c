"""What is read from a compiled program: by hand where a text is enough, on CPU where a compiler has to answer."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdjax.aot import compiled
from pdjax.catalogue import Program
from pdjax.messages import Role

HLO = """\
HloModule jit_group, is_scheduled=true, input_output_alias={ {2}: (7, {}, may-alias), {3, 0}: (8, {}, must-alias) }, \
entry_computation_layout={(f32[8]{0:T(256)})->f32[8]{0:T(256)}}, num_partitions=4

%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %all-reduce.2 = f32[8]{0} all-reduce(%p), replica_groups={{0,1}}
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %all-reduce-start.1 = (f32[8]{0}, f32[8]{0}) all-reduce-start(%a), to_apply=%add
  %all-reduce-done.1 = f32[8]{0} all-reduce-done(%all-reduce-start.1)
  ROOT %all-gather.3 = f32[32]{0} all-gather(%all-reduce-done.1), dimensions={0}
}
"""

SPLIT, WHOLE = PartitionSpec("x"), PartitionSpec()


def program(fn, *args, donate=()):
    return Program("group of 1", Role.DECODE, 0, jax.jit(fn, donate_argnums=donate), args)


def on_devices(n, *shapes):
    """Arrays of float32 in n parts along the first axis."""
    sharding = NamedSharding(Mesh(jax.devices()[:n], "x"), SPLIT)
    return [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in shapes]


def test_collectives_are_counted_once_each_wherever_they_start():
    assert compiled.collectives(HLO) == {"all-gather": 1, "all-reduce": 2}


def test_arguments_in_place_are_those_of_the_modules_own_map():
    assert compiled.aliases(HLO) == 2
    assert compiled.aliases(HLO.replace("input_output_alias", "another_map")) == 0


def test_a_pool_that_is_updated_in_place_is_seen_with_its_bytes():
    (pool,) = on_devices(2, (8, 4))
    fn = jax.jit(lambda pool, x: pool + x, donate_argnums=0, out_shardings=pool.sharding)
    x = jax.ShapeDtypeStruct((), jnp.float32)
    done = compiled.compile(Program("insert 1x4", Role.DECODE, 0, fn, (pool, x)))
    assert done.error is None and done.pool_aliased is True
    assert done.donated == done.memory.alias == 8 * 4 * 4 // 2
    assert done.memory.total == done.memory.argument + done.memory.output - done.memory.alias + done.memory.temp


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_pool_that_is_copied_is_seen():
    (pool,) = on_devices(1, (8, 4))
    assert compiled.compile(program(lambda pool: pool[:3] * 2, pool, donate=(0,))).pool_aliased is False


def test_a_program_that_donates_nothing_says_neither():
    (x,) = on_devices(1, (8,))
    assert compiled.compile(program(lambda x: x + 1, x)).pool_aliased is None


def test_sums_over_devices_are_found_in_what_the_compiler_made():
    mesh = Mesh(jax.devices()[:2], "x")
    total = jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=SPLIT, out_specs=WHOLE)
    assert compiled.compile(program(total, *on_devices(2, (8, 4)))).collectives == {"all-reduce": 1}


def test_what_is_refused_has_the_reason_and_no_memory():
    def refuse(x):
        raise NotImplementedError("no such\n  kernel")

    done = compiled.compile(program(refuse, *on_devices(1, (8,))))
    assert done.error == "NotImplementedError: no such kernel" and done.memory is None


def test_matrix_products_are_counted_by_what_one_device_multiplies():
    mesh = Mesh(jax.devices()[:2], "x")

    def local(x, w):  # [2, 3] by [3, 5], then once of two forms, then four times in a loop
        y = x @ w
        y = jax.lax.cond(y[0, 0] > 0, lambda y: y @ w.T, lambda y: (y @ w.T) * 2, y)
        return jax.lax.scan(lambda y, _: ((y @ w) @ w.T, None), y, length=4)[0]

    spread = jax.shard_map(local, mesh=mesh, in_specs=(SPLIT, WHOLE), out_specs=SPLIT, check_vma=False)
    traced = jax.jit(spread).trace(jnp.ones((4, 3)), jnp.ones((3, 5)))
    assert compiled.matmul_flops(traced.jaxpr.jaxpr) == (2 * 2 * 3 * 5) * (1 + 1 + 4 * 2)
