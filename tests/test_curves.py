"""Published forms: hand-computed passes, pipelines, and many steps at once as one by one."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.curves import Curves, Decode, Interpolated
from pdjax.latency import Load
from pdjax.messages import InstanceSpec, Role

SPEC = InstanceSpec(
    index=0,
    role=Role.MIXED,
    devices=4,
    max_rows=256,
    max_chunk=8192,
    max_chunks=64,
    page_size=16,
    num_pages=1000,
    max_model_len=4096,
    kv_bytes_per_token=1024,
)
TWO = dataclasses.replace(SPEC, pp=2)
CURVES = Curves(
    prefill=(10.0, 0.1, 0.001),
    decode=(Decode(0, 20.0, 0.01, 0.5), Decode(4, 30.0, 0.02, 0.25)),
    pass_s=1.0,
    token_s=0.01,
    stage_s=3.0,
)
TABLES = Interpolated(prefill=((100, 10.0), (200, 30.0), (400, 50.0)), decode=((1, 4.0), (3, 8.0)))


def test_nothing_takes_no_time():
    assert CURVES.iteration_s(SPEC, Load()) == TABLES.iteration_s(SPEC, Load()) == 0.0


def test_curves_add_up_by_hand():
    assert CURVES.iteration_s(SPEC, Load(((10, 0), (20, 0)))) == pytest.approx(1 + 0.3 + 10 + 3 + 0.001 * 500)
    assert CURVES.iteration_s(SPEC, Load((), 2, 50, 50)) == pytest.approx(1 + 0.02 + 20 + 0.01 * 50 + 0.5 * 2)
    assert CURVES.iteration_s(SPEC, Load((), 4, 50, 50)) == pytest.approx(1 + 0.04 + 30 + 0.02 * 50 + 0.25 * 4)


def test_chunks_of_a_prompt_cost_what_it_costs_whole_and_their_passes():
    whole, first, second = (CURVES.iteration_s(SPEC, Load((chunk,))) for chunk in ((300, 0), (100, 0), (200, 100)))
    assert first + second - whole == pytest.approx(1.0 + 10.0)


def test_rows_beside_a_long_prompt_cost_what_they_add_to_a_step():
    alone = CURVES.iteration_s(SPEC, Load(((100, 0),)))
    assert CURVES.iteration_s(SPEC, Load(((100, 0),), 2, 50, 50)) - alone == pytest.approx(0.02 + 0.5 + 1.0)


def test_a_few_prompt_tokens_beside_rows_cost_no_less_than_a_step():
    step = CURVES.iteration_s(SPEC, Load((), 2, 50, 50))
    assert CURVES.iteration_s(SPEC, Load(((10, 0),), 2, 50, 50)) == pytest.approx(step + 10 * 0.01)


def test_rows_of_a_pipeline_make_their_steps_in_groups():
    one = CURVES.iteration_s(SPEC, Load((), 4, 40, 40))
    assert CURVES.iteration_s(TWO, Load((), 4, 40, 40)) == pytest.approx(one - 0.4 - 0.5 + 3.0)
    assert TABLES.iteration_s(TWO, Load((), 4, 40, 40)) == TABLES.iteration_s(SPEC, Load((), 2, 20, 20)) == 6.0


def test_between_the_points_of_a_table_it_goes_straight_and_beyond_them_on():
    seconds = [TABLES.iteration_s(SPEC, Load(((tokens, 0),))) for tokens in (50, 100, 150, 200, 300, 400, 500)]
    assert seconds == pytest.approx([0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0])
    assert TABLES.iteration_s(SPEC, Load((), 5, 99, 99)) == pytest.approx(12.0)


def test_a_mixed_pass_of_tables_is_one_of_prompts_with_as_many_tokens_and_a_tenth_more():
    assert TABLES.iteration_s(SPEC, Load(((80, 0), (15, 5)), 5, 99, 99)) == pytest.approx(1.1 * 10.0)


@pytest.mark.parametrize("points", [((1, 2.0),), ((1, 2.0), (1, 3.0)), ((2, 2.0), (1, 3.0))])
def test_a_table_needs_two_points_in_order(points):
    with pytest.raises(ValueError, match=r"decode has points at \[.*\]; allowed: two or more, ascending"):
        Interpolated(prefill=TABLES.prefill, decode=points)


@pytest.mark.parametrize("latency", [CURVES, TABLES])
def test_transfers_cost_a_start_and_their_bytes(latency):
    assert latency.transfer_s(1e9) == 0.0
    assert dataclasses.replace(latency, alpha_s=0.5, bytes_per_s=1e9).transfer_s(2e9) == 2.5


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 10**6), st.integers(1, 40), st.sampled_from([1, 2, 3]), st.floats(1e-9, 9.0))
def test_many_steps_are_to_the_last_bit_each_of_them(rows, context, steps, pp, constant):
    spec = dataclasses.replace(SPEC, devices=pp, pp=pp)
    curves = dataclasses.replace(CURVES, decode=(Decode(0, 20.0, constant, math.pi), Decode(5, 9.0, constant / 3, 0.1)))
    for latency in (curves, dataclasses.replace(TABLES, decode=((1, constant), (3, 8.0), (7, math.pi)))):
        single = [
            latency.iteration_s(spec, Load((), rows, context + rows * step, context + rows * step))
            for step in range(steps)
        ]
        assert np.array_equal(latency.steps_s(spec, Load((), rows, context, context), steps), single)
