"""How fast a machine was during a run: passes by hand."""

import pytest

from pdjax.experiments import gauge
from pdjax.record import IterationRecord


def iteration(instance: int = 0, seconds: float = 1.0, predicted: float = 1.0, **sizes: int) -> IterationRecord:
    sizes = {"chunk_tokens": 8, "rows": 0} | sizes
    return IterationRecord(instance, 1, started_s=0.0, finished_s=seconds, predicted_s=predicted, **sizes)


def test_passes_are_summed_by_instance_and_kind() -> None:
    ran = [
        iteration(seconds=3.0),
        iteration(seconds=1.0),
        iteration(1, seconds=2.0, rows=4),
        iteration(1, seconds=6.0, chunk_tokens=0, rows=4, steps=5),  # what was predicted is of one step
        iteration(2),
    ]
    found = gauge.passes(ran, lambda one: one.instance < 2)
    assert found == {(0, 0): (4.0, 2.0), (1, 2): (2.0, 1.0), (1, 1): (6.0, 5.0)}


def test_an_instance_is_as_slow_as_its_passes_of_a_kind() -> None:
    known = {(0, 0): (2.2, 2.0), (0, 1): (3.0, 2.0), (1, 0): (2.0, 2.0)}
    (first, second) = gauge.scales(known, 2)
    assert first == pytest.approx((1.1, 1.5, 7.2 / 6))  # no mixed pass is known: as all were
    assert second == pytest.approx((1.0, 1.5, 7.2 / 6))  # nor a step of this one: as those of the others


def test_few_passes_tell_nothing() -> None:
    short = gauge.LEAST_S / 2
    assert gauge.scales({(0, 0): (9.0, short)}, 1) == ((1.0, 1.0, 1.0),)
    assert gauge.drift({(0, 0): (9.0, short)}, {(0, 0): (9.0, 9.0)}) == {}


def test_drift_is_that_of_all_instances() -> None:
    before = {(0, 0): (2.0, 2.0), (1, 0): (2.0, 2.0), (0, 1): (5.0, 4.0)}
    after = {(0, 0): (2.1, 2.0), (1, 0): (2.0, 2.0), (0, 1): (5.0, 4.0)}
    found = gauge.drift(before, after)
    assert found == pytest.approx({"prefill": 0.025, "decode": 0.0})
    assert gauge.steady(found) and not gauge.steady({"decode": -0.06})


def test_both_parts_of_a_run_tell_how_fast_it_was() -> None:
    assert gauge.both({(0, 0): (1.0, 1.0)}, {(0, 0): (2.0, 1.0), (0, 1): (1.0, 1.0)}) == {
        (0, 0): (3.0, 2.0),
        (0, 1): (1.0, 1.0),
    }
