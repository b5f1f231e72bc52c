"""Predictions of TTFT, TPOT and spare time, by hand: an iteration takes 10 ms, 1 ms a prompt token, 2 ms a row."""

import math

import pytest

from pdjax.messages import Role
from pdjax.request import SLO
from pdjax.schedulers import predict
from pdjax.schedulers.base import Row
from pdjax.testing import spec
from pdjax.traffic import Traffic
from tests.views import Ask, Cluster, View


def row(issued=1, most=11, first_s=0.0, **limits):
    return Row(Ask(slo=SLO(**limits)), issued, issued, most, first_s)


def traffic(prompt=0, output=0):
    return Traffic(prompt_tokens=prompt, output_tokens=output)


def test_spare_time_is_what_tpot_allows_for_the_rest_less_the_steps_it_needs():
    # 10 steps of 12 ms are left at 0.1 s: until 0.22 s; 10 gaps of 30 ms end at 0.3 s.
    spare = predict.spare(row(tpot_ms=30), 0.1, 0.012, traffic())
    assert spare.seconds == pytest.approx(0.08) and spare.left_s == pytest.approx(0.12)


def test_a_row_that_cannot_keep_its_limit_any_more_has_less_than_nothing():
    assert predict.spare(row(tpot_ms=30), 0.2, 0.012, traffic()).seconds == pytest.approx(-0.02)


def test_the_end_of_an_answer_counts_from_its_arrival():
    assert predict.spare(row(e2e_ms=200), 0.05, 0.012, traffic()).seconds == pytest.approx(0.2 - 0.05 - 0.12)


def test_without_limits_there_is_any_amount_of_time():
    assert predict.spare(row(), 5.0, 0.012, traffic()) == predict.Spare(math.inf, math.inf, pytest.approx(0.12))


def test_a_limit_on_gaps_limits_each_pass():
    assert predict.spare(row(itl_p99_ms=40), 0.1, 0.012, traffic()).pass_s == pytest.approx(0.04)


def test_a_row_on_its_way_has_all_its_time_before_it():
    assert predict.spare(row(first_s=math.inf, tpot_ms=30), 7.0, 0.012, traffic()).seconds == pytest.approx(0.3 - 0.12)


@pytest.mark.parametrize(
    ("there", "open_ended", "mean", "tokens"),
    [(1, False, 5, 20), (1, True, 0, 20), (1, True, 5, 5), (4, True, 5, 8), (15, True, 5, 20)],
)
def test_answers_are_as_long_as_asked_for_or_as_others_were(there, open_ended, mean, tokens):
    assert predict.answer_tokens(20, there, open_ended, traffic(output=mean)) == tokens


def test_rows_that_miss_their_limits_anyhow_hold_up_nobody():
    spares = [predict.Spare(seconds, math.inf, 0.0) for seconds in (-1.0, 0.5, 0.2)]
    assert predict.least(spares) == 0.2 and predict.least(spares[:1]) == math.inf


def test_steps_are_as_long_as_with_the_rows_that_are_on_their_way():
    view = View(spec(0, Role.DECODE), rows=1, running=[row(tpot_ms=30)], expected=[row(first_s=math.inf, tpot_ms=30)])
    # Steps of 14 ms: 0.3 - 0.14 for each.
    assert [spare.seconds for spare in predict.spares(view, Cluster([view]))] == [pytest.approx(0.16)] * 2


def test_ttft_is_behind_what_is_issued_and_queued():
    view = View(spec(0, Role.PREFILL), prefills=[Ask(0, 16)], busy_s=0.1)
    cluster = Cluster([view], traffic=traffic(prompt=8))
    # Two prompts of 8 take 18 ms each, the prompt of 20 passes of 16 and 4 tokens.
    assert predict.ttft_s(Ask(1, 20), view, cluster, []) == pytest.approx(0.1 + 0.036 + 0.026 + 0.014)


def test_ttft_is_behind_rows_that_cannot_spare_so_much_time():
    view, spares = View(spec(0, Role.DECODE)), [predict.Spare(0.01, math.inf, 0.5), predict.Spare(1.0, math.inf, 9.0)]
    assert predict.ttft_s(Ask(1, 10), view, Cluster([view]), spares) == pytest.approx(0.5 + 0.02)


def test_tpot_is_a_step_of_all_rows_and_a_share_of_the_queue():
    view = View(spec(0, Role.DECODE), prefills=[Ask(0, 10)], rows=1, incoming=1)
    # A step of 3 rows takes 16 ms; 20 ms of prefill over 7 gaps.
    assert predict.tpot_s(Ask(1), view, traffic(prompt=10)) == pytest.approx(0.016 + 0.020 / 7)


def test_prompts_beside_rows_do_not_break_their_limit():
    view = View(spec(0, Role.DECODE), prefills=[Ask(0, 10)], rows=1, incoming=1)
    assert predict.tpot_s(Ask(1, slo=SLO(tpot_ms=17)), view, traffic(prompt=10)) == pytest.approx(0.017)
