"""Predictions of TTFT, TPOT and spare time, by hand: an iteration takes 10 ms, 1 ms a prompt token, 2 ms a row."""

import dataclasses
import math

import numpy as np
import pytest

from pdjax.books import Books
from pdjax.messages import Role
from pdjax.request import SLO
from pdjax.schedulers import predict
from pdjax.schedulers.base import Row
from pdjax.testing import spec
from pdjax.traffic import Traffic
from tests.views import SIMPLE, Ask, Cluster, View


def row(issued=1, most=11, first_s=0.0, **limits):
    return Row(Ask(slo=SLO(**limits)), issued, issued, most, first_s)


def traffic(prompt=0, output=0):
    return Traffic(prompt_tokens=prompt, output_tokens=output)


def spares(*rows, coming=(), now=0.0, of=None):
    view = View(spec(0, Role.DECODE), rows=len(rows), running=list(rows), coming=list(coming))
    return predict.spares(view, Cluster([view], now=now, traffic=of or traffic()))


def test_spare_time_is_what_tpot_allows_for_the_rest_less_the_steps_it_needs():
    # 10 steps of 12 ms are left at 0.1 s: until 0.22 s; 10 gaps of 30 ms end at 0.3 s.
    found = spares(row(tpot_ms=30), now=0.1)
    assert found.seconds == pytest.approx([0.08]) and found.left_s == pytest.approx([0.12])


def test_a_row_that_cannot_keep_its_limit_any_more_has_less_than_nothing():
    assert spares(row(tpot_ms=30), now=0.2).seconds == pytest.approx([-0.02])


def test_the_end_of_an_answer_counts_from_its_arrival():
    assert spares(row(e2e_ms=200), now=0.05).seconds == pytest.approx([0.2 - 0.05 - 0.12])


def test_without_limits_there_is_any_amount_of_time():
    found = spares(row(), row(most=1), now=5.0)
    assert found.seconds.tolist() == [math.inf] * 2 and found.pass_s.tolist() == [math.inf] * 2


def test_a_limit_on_gaps_limits_each_pass():
    assert spares(row(itl_p99_ms=40)).pass_s == pytest.approx([0.04])


def test_a_row_without_a_token_has_all_its_time_before_it():
    assert spares(coming=[row(first_s=math.inf, tpot_ms=30)], now=7.0).seconds == pytest.approx([0.3 - 0.12])


def test_rows_end_when_others_did_on_average():
    asked = Row(Ask(slo=SLO(tpot_ms=30), open_ended=True), 1, 1, 11, 0.0)
    # 4 gaps instead of 10
    assert spares(asked, of=traffic(output=5)).seconds == pytest.approx([4 * 0.018])


@pytest.mark.parametrize(
    ("there", "open_ended", "mean", "tokens"),
    [(1, False, 5, 20), (1, True, 0, 20), (1, True, 5, 5), (4, True, 5, 8), (15, True, 5, 20)],
)
def test_answers_are_as_long_as_asked_for_or_as_others_were(there, open_ended, mean, tokens):
    assert predict.answer_tokens(20, there, open_ended, traffic(output=mean)) == tokens


def given(*rows):
    """Spare times of rows as (seconds, left_s)."""
    seconds, left_s = np.array(rows).T
    return predict.Spares(seconds, np.full(len(rows), math.inf), left_s)


def test_rows_that_miss_their_limits_anyhow_hold_up_nobody():
    found = given((-1.0, 9.0), (0.5, 3.0), (0.2, 2.0))
    assert found.least() == 0.2 and given((-1.0, 9.0)).least() == math.inf
    assert [found.held_up_s(work_s) for work_s in (0.1, 0.3, 0.6)] == [0.0, 2.0, 3.0]


def test_rows_that_end_before_are_left_out():
    assert given((0.5, 3.0), (0.2, 2.0)).after(2.0).seconds.tolist() == [0.5]


def test_steps_are_as_long_as_with_the_rows_that_are_on_their_way():
    # Steps of 14 ms: 0.3 - 0.14 for each.
    found = spares(row(tpot_ms=30), coming=[row(first_s=math.inf, tpot_ms=30)])
    assert found.seconds == pytest.approx([0.16] * 2)


def test_ttft_is_behind_what_is_issued_and_queued():
    view = View(spec(0, Role.PREFILL), prefills=[Ask(0, 16)], busy_s=0.1)
    (work_s,) = predict.works_s(Ask(1, 20), [view], traffic(prompt=8))
    # Two prompts of 8 take 18 ms each, the prompt of 20 passes of 16 and 4 tokens.
    assert predict.ttft_s(view, work_s, predict.NO_ROWS) == pytest.approx(0.1 + 0.036 + 0.026 + 0.014)


def test_instances_of_one_make_differ_by_their_queues_and_their_models():
    small = spec(2, Role.PREFILL, max_chunk=8)
    slow = dataclasses.replace(SIMPLE, scale=(2.0, 1.0, 1.0))
    views = [
        View(spec(0, Role.PREFILL)),
        View(spec(1, Role.PREFILL), prefills=[Ask(0, 16)]),
        View(small),
        View(spec(3, Role.PREFILL), latency=slow),
    ]
    # 16 tokens are one pass of 26 ms, or two of 18 where a pass has 8; 16 that are queued take two of 18 ms.
    assert predict.works_s(Ask(1, 16), views, traffic(prompt=8)) == pytest.approx([0.026, 0.062, 0.036, 0.052])


def test_a_twin_has_the_same_sizes():
    sizes = [spec(0, Role.PREFILL), spec(1, Role.DECODE), spec(2, Role.PREFILL, max_chunk=8), spec(3, Role.PREFILL)]
    books = Books(sizes, [SIMPLE] * 4, transfer_timeout_s=1.0)
    assert [lane.twin for lane in books.instances] == [0, 0, 2, 0]


def test_ttft_is_behind_rows_that_cannot_spare_so_much_time():
    view, rows = View(spec(0, Role.DECODE)), given((0.01, 0.5), (1.0, 9.0))
    assert predict.ttft_s(view, 0.02, rows) == pytest.approx(0.5 + 0.02)


def test_tpot_is_a_step_of_all_rows_and_a_share_of_the_queue():
    view = View(spec(0, Role.DECODE), prefills=[Ask(0, 10)], rows=1, incoming=1)
    # A step of 3 rows takes 16 ms; 20 ms of prefill over 7 gaps.
    assert predict.tpot_s(Ask(1), view, traffic(prompt=10)) == pytest.approx(0.016 + 0.020 / 7)


def test_prompts_beside_rows_do_not_break_their_limit():
    view = View(spec(0, Role.DECODE), prefills=[Ask(0, 10)], rows=1, incoming=1)
    assert predict.tpot_s(Ask(1, slo=SLO(tpot_ms=17)), view, traffic(prompt=10)) == pytest.approx(0.017)
