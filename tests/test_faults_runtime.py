"""What the runtime under a server gets wrong in silence: copies, compilations, comparisons that raise false alarms, and
settings that reach only one side."""

import contextlib
import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pdjax
from pdjax.build import scheduler_of, specs_of
from pdjax.models import source
from pdjax.schedulers import SCHEDULERS
from pdjax.schedulers.base import traits_of
from tests.engines import GREEDY, ids, sampled, settle, tokens
from tests.replicas import Driver, prompt, small, table

pytest_plugins = ["tests.shared_engines"]


def kv_of(driver, request, text):
    """The KV of a prompt as it lies in the pages."""
    driver.prefill(request, text)
    return driver.instance.read_kv(table(driver.instance, request), len(text))


def test_kv_computed_twice_in_one_place_is_bit_for_bit_equal():
    """The control for every test that compares KV after a transfer: without one, no bit differs either."""
    driver = Driver(small())
    text = prompt(1, 29)
    first = kv_of(driver, 0, text)
    for request in (1, 2):
        np.testing.assert_array_equal(kv_of(driver, request, text), first)


def test_serving_moves_no_array_between_devices_behind_our_back(streamed):
    """Arrays of another sharding would be copied in silence. (From the host, a pass takes one vector, on purpose.)"""
    prompts, each = [ids(seed, 5 + 7 * seed) for seed in range(8)], [GREEDY, sampled(1)] * 4
    want = tokens(streamed.generate(prompts, each))
    elsewhere = jax.jit(lambda x: x * 2, in_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[1]))
    here = jnp.ones(4)
    with guarded("device_to_device", "device_to_host"):
        with pytest.raises(Exception, match=r"Disallowed device-to-device transfer"):
            elsewhere(here)  # the guard is on
        assert tokens(streamed.generate(prompts, each)) == want
    settle(streamed)


@contextlib.contextmanager
def guarded(*ways):
    """Implicit transfers of these kinds raise, in every thread."""
    names = [f"jax_transfer_guard_{way}" for way in ways]
    before = {name: jax.config.values[name] for name in names}
    try:
        for name in names:
            jax.config.update(name, "disallow")
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_a_donation_that_came_to_nothing_fails_the_suite():
    """setup.cfg makes an error of JAX's warning: a donated pool that is copied would double memory and time."""
    wasted = jax.jit(lambda x: x[:1], donate_argnums=0)
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="donated buffers were not usable"):
        wasted.lower(jnp.ones((4, 4))).compile()


@pytest.mark.parametrize("level", [logging.DEBUG, logging.CRITICAL])
def test_no_log_level_changes_an_answer(pulled, caplog, level):
    with caplog.at_level(level, "pdjax"), caplog.at_level(level, "jax"):
        first, second = (tokens(pulled.generate([ids(1, 20)] * 3, GREEDY)) for _ in range(2))
    assert first == second == [first[0]] * 3


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_instance_has_the_same_limit_of_tokens(scheduler):
    """There is no configuration in which one side would accept what the other cannot hold."""
    config = pdjax.EngineConfig(
        model="tiny", scheduler=scheduler, max_model_len=100, prefill_num_pages=9, decode_num_pages=40, page_size=16
    )
    specs = specs_of(config, source.resolve("tiny").config, traits_of(scheduler_of(config)))
    assert {spec.max_model_len for spec in specs} == {100}
    assert all(spec.usable_pages * spec.page_size >= 100 for spec in specs)
