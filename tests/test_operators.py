"""Latency from operators' tables: values between measured sizes by hand, and passes that are sums of them."""

import numpy as np
import pytest

from pdjax import fleet
from pdjax.latency import Load
from pdjax.messages import Role
from pdjax.operators import Operators, Table


def table(*axes, seconds):
    return Table(tuple(axes), np.asarray(seconds, float))


def make(**changed):
    """Tokens cost 1 each, sequences 0.1; attention of a prompt part: tokens + prior, of rows: rows * context."""
    parts = {
        "tokens": table((1, 100), seconds=[1, 100]),
        "sequences": table((1, 10), seconds=[0.1, 1]),
        "prefill": table((1, 100), (0, 100), seconds=[[1, 101], [100, 200]]),
        "decode": table((1, 10), (1, 100), seconds=[[1, 100], [10, 1000]]),
    }
    return Operators(**(parts | changed))


def spec(pp=1):
    return fleet.build([fleet.Pool(Role.MIXED, 1, make(), 1000, 1, devices=pp, pp=pp)]).specs[0]


def test_a_table_goes_straight_between_sizes_stays_below_them_and_grows_in_proportion_above():
    line = table((2, 4, 8), seconds=[1, 3, 5])
    assert [line.at(size) for size in (1, 2, 3, 4, 6, 8, 16)] == [1, 1, 2, 3, 4, 5, 10]


def test_a_table_of_two_axes_is_straight_along_each():
    grid = table((0, 10), (0, 10), seconds=[[0, 10], [20, 50]])
    assert (grid.at(5, 0), grid.at(0, 5), grid.at(5, 5)) == (10, 5, 20)


@pytest.mark.parametrize(
    ("axes", "seconds", "message"),
    [
        (((1,),), [1], r"axes\[0\] is \(1,\); allowed: at least two"),
        (((1, 2), (3, 3)), [[1, 1], [1, 1]], r"axes\[1\]"),
        (((1, 2),), [1, 2, 3], r"shape \(3,\); allowed: \(2,\)"),
        (((1, 2),), [1, -1], "negative"),
        (((1, 2),), [1, np.nan], "allowed: numbers >= 0"),
    ],
)
def test_a_table_that_is_none_is_refused(axes, seconds, message):
    with pytest.raises(ValueError, match=message):
        table(*axes, seconds=seconds)


def test_a_pass_is_the_sum_of_its_operators():
    model = make()
    assert model.iteration_s(spec(), Load()) == 0
    assert model.iteration_s(spec(), Load(((50, 20),))) == pytest.approx(50 + 0.1 + 70)
    assert model.iteration_s(spec(), Load((), 4, 4 * 30, 4 * 30)) == pytest.approx(4 + 0.4 + 120)
    assert model.iteration_s(spec(), Load(((50, 20),), 4, 120, 120)) == pytest.approx(54 + 0.5 + 70 + 120)


def test_rows_of_unequal_contexts_cost_a_share_of_the_way_to_the_longest():
    load = Load((), 4, 4 * 30, 4 * 80)
    assert make(skew=0.25).iteration_s(spec(), load) == pytest.approx(4.4 + 120 + 0.25 * (320 - 120))


def test_prompts_of_a_pass_share_the_call_that_the_smallest_of_all_takes():
    assert make().iteration_s(spec(), Load(((50, 20), (10, 0)))) == pytest.approx(60 + 0.2 + 70 + 10 - 1)


def test_beside_rows_the_prompt_that_attends_to_most_is_in_the_table_of_both():
    mixed = table((1, 100), (0, 100), (1, 10), (1, 100), seconds=np.full((2, 2, 2, 2), 500.0))
    load = Load(((10, 0), (50, 20)), 4, 120, 120)
    assert make(mixed=mixed).iteration_s(spec(), load) == pytest.approx(64 + 0.6 + 500 + 10 - 1)


def test_captured_graphs_save_their_share_up_to_their_size():
    model, plain = make(graph_tokens=10, graph_decode_s=0.5, graph_mixed_s=0.25), make()
    for load, saved in (
        (Load((), 10, 10, 10), 0.5),
        (Load((), 11, 11, 11), 0),
        (Load(((9, 0),), 1, 1, 1), 0.25),
        (Load(((10, 0),), 1, 1, 1), 0),
    ):
        assert plain.iteration_s(spec(), load) - model.iteration_s(spec(), load) == pytest.approx(saved)


def test_rows_of_a_pipeline_step_in_as_many_groups_as_it_has_stages():
    assert make().iteration_s(spec(pp=2), Load((), 8, 240, 240)) == make().iteration_s(spec(), Load((), 4, 120, 120))


def test_steps_are_to_the_last_bit_what_each_iteration_says():
    rng = np.random.default_rng(0)
    random = rng.random
    model = make(
        skew=0.0543,
        decode=table((1, 3, 10), (16, 33, 100), seconds=random((3, 3))),
        mixed=table((1, 7, 100), (0, 9), (1, 5), (16, 40, 100), seconds=random((3, 2, 2, 3))),
    )
    for number in range(60):
        rows = int(rng.integers(1, 14))
        context = int(rng.integers(rows, 90 * rows))
        longest = int(rng.integers(context // rows, 130))
        chunks = ((int(rng.integers(1, 150)), int(rng.integers(0, 20))),) if number % 2 else ()
        at = spec(pp=1 + number % 3)
        found = model.steps_s(at, Load(chunks, rows, context, rows * longest), 80)
        assert found.tolist() == [
            model.iteration_s(at, Load(chunks, rows, context + step * rows, rows * (longest + step)))
            for step in range(80)
        ]


def test_models_are_looked_up_by_identity():
    one, other = make(), make()
    assert one != other and len({one: 1, other: 2}) == 2


def test_a_transfer_takes_alpha_and_its_bytes():
    assert make(alpha_s=1.0, bytes_per_s=10.0).transfer_s(50) == 6.0
