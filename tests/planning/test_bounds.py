"""What an instance carries at most, against numbers computed by hand."""

import math

import pytest

from pdjax.planning import bounds
from pdjax.planning.mix import Mix
from pdjax.request import SLO
from tests.planning.toys import curves, pool

ALIKE = Mix(((100, 11),), SLO(ttft_ms=50, tpot_ms=20))  # alone: 20 ms of prefill; steps of 10 + 0.1 per row


def test_a_prompt_costs_its_tokens_and_its_part_of_the_pass():
    assert bounds.alone_s(pool(), ALIKE) == pytest.approx(0.020)
    assert bounds.prompt_s(pool(max_chunk=400), ALIKE) == pytest.approx((0.010 + 4 * 0.010) / 4)
    assert bounds.prompt_s(pool(max_chunk=100), ALIKE) == pytest.approx(0.020)
    assert bounds.prompt_s(pool(max_chunk=100, devices=2, pp=2), ALIKE) == pytest.approx(0.010)


def test_rows_are_limited_by_steps_by_memory_and_by_slots():
    assert bounds.most_rows(pool(), ALIKE, 0.0151) == 51
    assert bounds.most_rows(pool(kv_tokens=1000), ALIKE, math.inf) == int(1000 / 106)
    assert bounds.most_rows(pool(max_rows=7), ALIKE, math.inf) == 7
    assert bounds.most_rows(pool(), ALIKE, 0.001) == 0


def test_a_decode_instance_ends_so_many_answers_as_its_rows_have_steps():
    rows = bounds.most_rows(pool(), ALIKE, 0.020)
    assert rows == 100
    assert bounds.decode_rate(pool(), ALIKE) == pytest.approx(100 / (10 * 0.020))


def test_an_instance_that_does_both_has_time_for_both():
    rate = bounds.mixed_rate(pool(max_chunk=100), ALIKE)
    share = 1 - rate * 0.020  # of the time is left to steps, which makes them longer; rows are whole numbers
    rows = bounds.most_rows(pool(), ALIKE, share * 0.020)
    assert rate == pytest.approx(share * rows / (10 * bounds.step_s(pool(), rows, ALIKE)), rel=0.1)


def test_limits_that_nobody_keeps_alone_leave_nothing():
    late = Mix(ALIKE.lengths, SLO(ttft_ms=19, tpot_ms=20))
    slow = Mix(ALIKE.lengths, SLO(ttft_ms=50, tpot_ms=10))
    assert (
        bounds.prefill_rate(pool(), late) == bounds.mixed_rate(pool(), late) == bounds.prefill_guess(pool(), late) == 0
    )
    assert bounds.decode_rate(pool(), slow) == bounds.mixed_rate(pool(), slow) == 0


def test_the_guess_of_a_prefill_instance_is_below_its_bound_and_grows_with_the_limit():
    only = pool(latency=curves(), max_chunk=100)
    guesses = [bounds.prefill_guess(only, Mix(ALIKE.lengths, SLO(ttft_ms=limit))) for limit in (25, 50, 200)]
    assert sorted(guesses) == guesses and guesses[-1] < bounds.prefill_rate(only, ALIKE)


def test_requests_longer_than_an_instance_holds_are_not_served():
    assert bounds.decode_rate(pool(kv_tokens=100), ALIKE) == 0


def test_an_instance_ends_no_more_answers_than_its_full_batch():
    full = pool(max_rows=50)
    assert bounds.capacity(full, ALIKE) == pytest.approx(50 / (10 * 0.015))
    assert bounds.capacity(full, ALIKE) >= bounds.decode_rate(full, ALIKE)
