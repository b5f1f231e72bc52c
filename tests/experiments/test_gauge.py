"""How fast a machine was during a run: passes by hand."""

import pytest

from pdjax.experiments import gauge
from pdjax.record import IterationRecord


def iteration(kind: str, seconds: float, predicted: float = 1.0, instance: int = 0, steps: int = 1) -> IterationRecord:
    sizes = {"prefill": (8, 0), "decode": (0, 4), "mixed": (8, 4)}[kind]
    return IterationRecord(instance, 1, *sizes, 0.0, seconds, steps=steps, predicted_s=predicted)


def test_passes_are_summed_with_all_their_steps() -> None:
    assert gauge.times([iteration("prefill", 3.0), iteration("prefill", 1.0)]) == 2.0
    assert gauge.times([iteration("mixed", 2.0)]) == 2.0
    assert gauge.times([iteration("decode", 6.0, steps=5)]) == 6.0 / 5.0  # what was predicted is of one step


def test_an_instance_is_as_slow_as_its_passes_of_a_kind() -> None:
    known = [iteration("prefill", 2.2, 2.0), iteration("decode", 3.0, 2.0), iteration("prefill", 2.0, 2.0, instance=1)]
    (first, second) = gauge.scales(known, 2)
    assert first == pytest.approx((1.1, 1.5, 7.2 / 6))  # no mixed pass is known: as all were
    assert second == pytest.approx((1.0, 1.5, 7.2 / 6))  # nor a step of this one: as those of the others


def test_few_passes_tell_nothing() -> None:
    short = [iteration("prefill", 9.0, gauge.LEAST_S / 2)]
    assert gauge.scales(short, 1) == ((1.0, 1.0, 1.0),)
    assert gauge.drift(short, [iteration("prefill", 9.0, 9.0)]) == {}


def test_drift_is_that_of_all_instances() -> None:
    same = [iteration("prefill", 2.0, 2.0, instance=1), iteration("decode", 5.0, 4.0)]
    found = gauge.drift([iteration("prefill", 2.0, 2.0), *same], [iteration("prefill", 2.1, 2.0), *same])
    assert found == pytest.approx({"prefill": 0.025, "decode": 0.0})
    assert gauge.unrest(found) == pytest.approx(0.025)
    assert gauge.unrest({"prefill": 0.02, "decode": -0.06}) == 0.06 and gauge.unrest({}) == 0.0
