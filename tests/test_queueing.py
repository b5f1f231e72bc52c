"""Mean TTFT in closed form."""

import math

import pytest

from pdjax import queueing


def test_equations_1_to_3_at_a_load_of_a_half():
    assert queueing.single_s(5.0, 0.1) == pytest.approx(0.1 + 5 * 0.01 / (2 * 0.5))
    assert queueing.pipelined_s(5.0, 0.1) == pytest.approx(0.1 + 5 * 0.01 / (4 * 1.5))
    assert queueing.sharded_s(5.0, 0.1, 1.5) == pytest.approx(0.1 / 1.5 + 5 * 0.01 / (2 * 1.5 * 1.0))


def test_one_stage_or_no_speedup_is_equation_1():
    assert queueing.pipelined_s(5.0, 0.1, stages=1) == queueing.single_s(5.0, 0.1) == queueing.sharded_s(5.0, 0.1, 1.0)


@pytest.mark.parametrize("speedup", [1.05, 1.3, 1.6, 1.9])
def test_shards_win_below_the_crossover_and_stages_above_it(speedup):
    rate = queueing.crossover_rate(0.1, speedup)
    assert queueing.sharded_s(rate, 0.1, speedup) == pytest.approx(queueing.pipelined_s(rate, 0.1))
    assert queueing.sharded_s(0.9 * rate, 0.1, speedup) < queueing.pipelined_s(0.9 * rate, 0.1)
    assert queueing.sharded_s(1.05 * rate, 0.1, speedup) > queueing.pipelined_s(1.05 * rate, 0.1)


def test_a_perfect_speedup_wins_at_any_rate_that_can_be_served_and_none_at_no_rate():
    assert queueing.crossover_rate(0.1, 2.0) == pytest.approx(2 / 0.1)
    assert queueing.crossover_rate(0.1, 1.0) == pytest.approx(0.0)


def test_a_queue_without_end_waits_for_ever():
    assert queueing.single_s(10.0, 0.1) == math.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: queueing.single_s(0.0, 0.1), r"rate is 0.0; allowed"),
        (lambda: queueing.single_s(1.0, math.nan), r"pass_s is nan; allowed"),
        (lambda: queueing.pipelined_s(1.0, 0.1, 0), r"stages is 0; allowed"),
        (lambda: queueing.sharded_s(1.0, 0.1, 0.0), r"speedup is 0.0; allowed"),
        (lambda: queueing.crossover_rate(0.1, 2.5), r"speedup is 2.5; allowed: 1 to 2"),
        (lambda: queueing.crossover_rate(-1.0, 1.5), r"pass_s is -1.0; allowed"),
    ],
)
def test_what_is_no_rate_or_time_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
