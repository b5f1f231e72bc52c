"""Datasheets by name."""

import dataclasses
import math

import pytest

from pdjax import hardware, published


def test_a_name_that_is_not_known_is_told_the_names_there_are():
    with pytest.raises(ValueError, match=r"'h1000'; allowed: a100-80g, h100, "):
        hardware.get("h1000")


def test_published_latencies_name_hardware_that_is_known():
    assert {published.get(name).hardware for name in published.names()} <= set(hardware.names())


def test_equal_power_and_equal_cost_are_those_of_splitwise():
    a100, h100 = hardware.get("a100-80g"), hardware.get("h100")
    assert 70 * a100.watts == 40 * h100.watts
    assert 86 * a100.price_per_hour == pytest.approx(40 * h100.price_per_hour, rel=0.01)
    assert h100.memory_bytes_per_s / a100.memory_bytes_per_s == pytest.approx(1.64, abs=0.01)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_users_price_has_to_be_a_number(value):
    with pytest.raises(ValueError, match=r"price_per_hour of 'h100' is .*; allowed: a finite number > 0"):
        dataclasses.replace(hardware.get("h100"), price_per_hour=value)
