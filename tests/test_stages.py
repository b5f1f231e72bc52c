"""Instances of several pipeline stages: the tokens of one stage, KV from any stages to any others, chunks in a pipe."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pdjax.compiles import compiled
from pdjax.messages import Iteration, StartTransfer
from pdjax.request import SamplingParams
from tests.replicas import Driver, prompt, small, table

LONG, SHORT = prompt(1, 29), prompt(2, 5)
ONE_SIZE = {"chunk_buckets": (16,), "row_buckets": (2,)}


@pytest.fixture(scope="module")
def alone():
    """What LONG and SHORT give on one device: 12 tokens."""
    driver = Driver(small(max_chunk=32))
    return {len(text): driver.generate(text, 12) for text in (LONG, SHORT)}


@pytest.fixture(scope="module")
def staged():
    """Two stages, of two layers and of one."""
    return small(pp=2, devices=2, **ONE_SIZE)


@pytest.fixture(scope="module")
def warm():
    """A stage for each of the three layers, warm."""
    instance = small(pp=3, devices=3, **ONE_SIZE)
    instance.warmup()
    return instance


def test_tokens_are_those_of_one_stage(alone, staged):
    assert Driver(staged, chunk=7).generate(LONG, 12) == alone[29]


def test_steps_are_issued_before_the_last_stage_has_the_tokens_of_the_one_before(alone, staged):
    driver = Driver(staged)
    first, step = driver.prefill(0, SHORT), Iteration(0, 0, decode=True)
    pending = [staged.run(dataclasses.replace(step, joins=(driver.join(0, len(SHORT)),)), driver.units.append)]
    pending += [staged.run(step, driver.units.append) for _ in range(10)]
    driver.run(leaves=(0,))
    assert [first] + [dict(p.wait().rows)[0] for p in pending] == alone[5]


def test_the_first_stage_computes_the_next_chunk_before_the_second_is_done_with_this_one(alone, staged, monkeypatch):
    second, given = staged._stages[1], []

    @jax.jit
    def late(x):  # the same, after half a second of work: a chunk takes milliseconds
        weights = jnp.eye(64)
        worked = lax.fori_loop(0, 40_000, lambda _, y: jnp.tanh(y @ weights), jnp.zeros((64, 64)))
        return x + worked[0, 0]

    def carry(x, plain=second.carry):
        given.append(x)
        return late(plain(x))

    carry(jnp.zeros((16, staged.config.hidden_size)))  # compiled
    monkeypatch.setattr(second, "carry", carry)
    driver = Driver(staged)
    chunks = [driver.part(0, LONG, start, 16) for start in (0, 16)]
    this, following = (staged.run(Iteration(0, i, chunks=(c,)), driver.units.append) for i, c in enumerate(chunks))
    jax.block_until_ready(given[2])
    assert not this.done.is_ready()
    assert this.wait().firsts == () and dict(following.wait().firsts) == {0: alone[29][0]}


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "devices"), [(2, 4), (3, 9)])
def test_tokens_are_those_of_one_stage_when_stages_have_several_devices(alone, pp, devices):
    assert Driver(small(pp=pp, devices=devices, **ONE_SIZE), chunk=7).generate(LONG, 12) == alone[29]


@pytest.mark.slow
def test_a_prompt_prefilled_beside_a_decoding_row_disturbs_neither(alone, warm):
    driver = Driver(warm)
    out, joins = [driver.prefill(0, SHORT)], (driver.join(0, len(SHORT)),)
    for start in range(0, len(LONG), 10):
        done = driver.run(chunks=(driver.part(1, LONG, start, 10),), joins=joins, decode=True)
        out.append(dict(done.rows)[0])
        joins = ()
    driver.run(leaves=(0,))
    assert out == alone[5][:4] and dict(done.firsts) == {1: alone[29][0]}


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [(3, 1), (1, 3)])
def test_kv_moves_between_instances_of_other_stages(alone, warm, source, target):
    def made(pp):
        return warm if pp == 3 else small(pp=pp, devices=pp, first_device=3, max_chunk=32)

    give, take = Driver(made(source)), Driver(made(target))
    out, pages = [give.prefill(1, LONG)], table(take.instance, 0)
    command = StartTransfer(9, 1, 0, 0, 1, table(give.instance, 1), pages, len(LONG), "whole")
    for unit in give.instance.extract(command):
        kv = jax.device_put(unit.kv, take.instance.kv_shardings[unit.header.layer])
        take.instance.insert(dataclasses.replace(unit, kv=kv), pages)
    joins = (take.join(0, len(LONG), token=out[0]),)
    for _ in range(3):
        out.append(dict(take.run(joins=joins, decode=True).rows)[0])
        joins = ()
    take.run(leaves=(0,))
    assert out == alone[29][:4]
    sent = give.instance.read_kv(command.src_pages, len(LONG))
    np.testing.assert_array_equal(take.instance.read_kv(pages, len(LONG)), sent)


@pytest.mark.slow
def test_every_layer_is_streamed_from_its_stage(warm):
    driver = Driver(warm)
    driver.run(chunks=(driver.part(0, SHORT, 0, 5, stream=4), driver.part(1, LONG, 0, 9, stream=5)))
    assert [(unit.header.key, unit.header.layer) for unit in driver.units] == [(k, i) for i in range(3) for k in (4, 5)]
    for unit in driver.units:
        assert unit.kv.sharding.is_equivalent_to(warm.kv_shardings[unit.header.layer], unit.kv.ndim)
    want = warm.read_kv(table(warm, 1), 9)
    np.testing.assert_array_equal([np.asarray(unit.kv)[0, :, :9] for unit in driver.units[1::2]], want)


@pytest.mark.slow
def test_nothing_compiles_after_warm_up(warm):
    before, _ = compiled()
    driver = Driver(warm, sampling=SamplingParams(temperature=1.0, seed=3, logprobs=True))
    driver.generate(LONG, 3)
    driver.run(chunks=(driver.part(0, SHORT, 0, 5, 1), driver.part(1, SHORT, 0, 5, 2)), joins=(driver.join(1, 5, 3),))
    driver.run(leaves=(1,))
    assert compiled()[0] == before


@pytest.mark.slow
def test_an_iteration_without_tokens_is_over_when_the_last_stage_has_computed_it(warm):
    driver = Driver(warm)
    pending = warm.run(Iteration(0, 0, chunks=(driver.part(0, LONG, 0, 9),)), driver.units.append)
    assert pending.wait() == ((), (), ())
    (device,) = pending.done.devices()
    assert pending.done.is_ready() and device == jax.devices()[2]
