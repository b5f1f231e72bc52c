"""The ratio of the pools, by hand."""

import pytest

from pdjax.latency import LatencyModel
from pdjax.messages import Role
from pdjax.pd_ratio import Side, between, curve, point
from pdjax.testing import spec

SIDE = Side(prefill_s=0.100, prompts=1, output_tokens=501)


def test_without_batches_it_is_one_to_125():
    one = point(SIDE, 0.025, rows=1)
    assert one.decodes_per_prefill == pytest.approx(125) and one.text == "1:125"


def test_a_step_that_takes_no_longer_with_more_rows_divides_it():
    assert point(SIDE, 0.025, rows=25).decodes_per_prefill == pytest.approx(5)


def test_prompts_that_share_a_pass_multiply_it():
    assert point(Side(0.100, 4, 501), 0.025, rows=1).decodes_per_prefill == pytest.approx(500)


def test_where_prefill_needs_more_it_is_told_the_other_way_round():
    assert point(Side(1.0, 1, 5), 0.1, rows=1).text == "2.5:1"


def test_constant_steps_give_the_usual_ratios_from_16_to_41_rows():
    points = curve(SIDE, lambda rows: 0.025, range(1, 65))
    assert between(points, 3, 8) == (16, 41)


def test_a_range_that_no_batch_reaches_is_none():
    assert between(curve(SIDE, lambda rows: 0.025 * rows, range(1, 65)), 3, 8) is None


def test_the_balance_is_what_the_rates_say():
    """As many prompts per second as answers, with steps of a latency model."""
    model, one = LatencyModel((0.01, 0.001, 0, 0.002, 0, 0)), spec(0, Role.MIXED)
    side = Side(model.prefill_s(one, 16), 1, 11)
    (only,) = curve(side, lambda rows: model.decode_s(one, rows, 0, 0), [4])
    prompts_per_s, answers_per_s = 1 / side.prefill_s, 4 / (10 * only.decode_s)
    assert prompts_per_s == pytest.approx(only.decodes_per_prefill * answers_per_s)
