"""What admission answers, on views whose numbers one can follow.

An iteration takes 10 ms, 1 ms a prompt token and 2 ms a row: a prompt of 10 takes 20 ms, a step of one row 12 ms. KV of
10 tokens moves in 1.01 ms.
"""

import pytest

from pdjax.messages import Role
from pdjax.record import Predicted
from pdjax.request import SLO, SLOClass
from pdjax.schedulers import Colocated, Disaggregated, Dynamic, Place, Reject, Splitwise, Wait
from pdjax.schedulers.admission import PATIENCE_S, Admission, DropLate, guarded
from pdjax.schedulers.base import Drop, Row, traits_of
from pdjax.testing import spec
from pdjax.traffic import Traffic
from tests.views import Ask, Cluster, View, views


def traffic(prompt=16, output=8):
    seen = Traffic()
    seen.arrived(0.0, prompt, None)
    seen.finished(output)
    return seen


def apart(queued=0, rows=(), **ask):
    """One instance of each role; `queued` prompts of 16 tokens wait, 26 ms each."""
    prefill, decode = views(Role.PREFILL, Role.DECODE)
    prefill.prefills = [Ask(100 + number, 16) for number in range(queued)]
    decode.running, decode.rows, decode.context_tokens = list(rows), len(rows), 10 * len(rows)
    return Cluster([prefill, decode], traffic=traffic())


def row(number=50, left=7, **limits):
    """A row of 8 tokens, of which `left` are still to come; its first came at 0."""
    return Row(Ask(number, 10, slo=SLO(**limits)), 8 - left, 8 - left, 8, 0.0)


def crowded(*rows, index=0, **changes):
    """A mixed instance with these rows."""
    return View(spec(index, Role.MIXED), rows=len(rows), context_tokens=10 * len(rows), running=list(rows), **changes)


def answer(cluster, policy=None, **ask):
    return Admission(policy or Disaggregated()).place(Ask(**ask), cluster)


# --- admit ----------------------------------------------------------------------------------------------------------


def test_a_request_that_can_be_kept_goes_where_the_policy_says_with_what_is_expected_of_it():
    place = answer(apart(queued=2), slo=SLO(ttft_ms=100, tpot_ms=22, itl_p99_ms=50, e2e_ms=230))
    assert isinstance(place, Place) and (place.prefill, place.decode, place.slo_class) == (0, None, "")
    # Two prompts of 26 ms and its own 20; both are rows when it joins: steps of 16 ms, and before them the move and
    # two steps of 14 ms that are in flight then.
    assert place.predicted == Predicted(pytest.approx(72), pytest.approx(16 + (1.01 + 2 * 14) / 7))
    assert "admitted 0->1 TTFT 72 TPOT 20.1 ITL 45 E2E 213 ms" in place.reason
    assert "shortest prefill queue: 32 tokens" in place.reason


@pytest.mark.parametrize(
    ("limits", "broken"),
    [
        ({"ttft_ms": 74}, "TTFT 72 + 5% > 74 ms"),  # kept in reserve
        ({"tpot_ms": 20, "ttft_ms": 80}, "TPOT 20.1 + 5% > 20 ms"),
        ({"itl_p99_ms": 46, "e2e_ms": 230}, "ITL 45.0 + 5% > 46 ms"),
        ({"e2e_ms": 220}, "E2E 213 + 5% > 220 ms"),
    ],
)
def test_each_limit_counts_and_the_reason_of_a_rejection_says_which(limits, broken):
    reject = answer(apart(queued=2), slo=SLO(**limits))
    assert isinstance(reject, Reject)
    assert reject.reason.endswith(f"0->1 TTFT 72 TPOT 20.1 ITL 45 E2E 213 ms: {broken}")


def test_the_reason_says_what_the_reserve_is_a_part_of():
    cluster = apart(queued=2)
    cluster.now = 0.05
    reject = answer(cluster, slo=SLO(ttft_ms=124))
    assert isinstance(reject, Reject) and reject.reason.endswith("TTFT 122 + 5% of 72 > 124 ms")


def test_without_limits_a_long_queue_is_no_reason_to_wait():
    assert isinstance(answer(apart(queued=50)), Place)


def test_rows_that_end_before_the_prompt_is_computed_do_not_count():
    slo = SLO(tpot_ms=14)
    assert isinstance(answer(apart(rows=[row(left=1)] * 3), slo=slo), Place)  # steps of 16 ms, a prompt of 20
    assert isinstance(answer(apart(rows=[row(left=7)] * 3), slo=slo), Wait)


# --- elsewhere ------------------------------------------------------------------------------------------------------


def test_where_a_row_would_miss_its_limit_the_request_goes_elsewhere():
    tight = crowded(row(tpot_ms=13))  # 7 x (13 - 12) = 7 ms to spare
    busier = View(spec(1, Role.MIXED), [Ask(9, 4)])
    place = answer(Cluster([tight, busier], traffic=traffic()), Colocated())
    assert isinstance(place, Place) and (place.prefill, place.decode) == (1, 1)
    assert "elsewhere on 1" in place.reason and "(not: on 0" in place.reason


def test_where_the_policy_names_who_decodes_so_does_elsewhere():
    class Named(Splitwise):
        def place(self, ask, cluster):
            return Place(0, 2, "whole", "named")

    busy, idle, decode = views(Role.PREFILL, Role.PREFILL, Role.DECODE)
    busy.prefills = [Ask(9, 16)]  # 26 ms, and 20 of its own
    place = answer(Cluster([busy, idle, decode], traffic=traffic()), Named(), slo=SLO(ttft_ms=30))
    assert isinstance(place, Place) and "elsewhere" in place.reason
    assert (place.prefill, place.decode) == (1, 2)


def test_only_pairs_that_the_policy_is_built_for_are_looked_at():
    cluster = apart(queued=2)
    reject = answer(cluster, slo=SLO(ttft_ms=30))  # the decode instance is idle, but takes no prompts
    assert isinstance(reject, Reject) and "on 1" not in reject.reason


def test_where_instances_that_decode_prefill_nothing_they_are_not_looked_at():
    cluster = apart(queued=2)  # 52 ms, and 20 of its own
    reject = answer(cluster, DropLate(Dynamic(decode_chunk=0)), slo=SLO(ttft_ms=30))
    assert isinstance(reject, Reject) and "on 1" not in reject.reason
    assert isinstance(answer(cluster, DropLate(Dynamic()), slo=SLO(ttft_ms=30)), Place)


# --- queue ----------------------------------------------------------------------------------------------------------


def test_it_waits_where_rows_that_it_would_break_end_in_time():
    cluster = Cluster([crowded(row(tpot_ms=13))], traffic=traffic())
    wait = answer(cluster, Colocated(), slo=SLO(ttft_ms=200))
    assert isinstance(wait, Wait) and wait.aside
    assert "it can be kept after 84 ms" in wait.reason and "with 7 ms to spare" in wait.reason
    assert isinstance(answer(cluster, Colocated(), slo=SLO(ttft_ms=100)), Reject)  # 84 + 20, and 5 %


def test_it_waits_for_those_whose_prompts_come_before_its_own_to_have_decoded():
    wait = answer(apart(queued=2), slo=SLO(ttft_ms=200, tpot_ms=14))
    assert isinstance(wait, Wait) and "it can be kept after 148 ms" in wait.reason  # 2 x 26, and 8 steps of 12


def test_prompts_that_will_decode_beside_it_are_not_broken_either():
    """Prompts are computed in order: who decodes where it was prefilled pays for those behind it."""
    before = Ask(7, 10, slo=SLO(tpot_ms=14))  # 7 x (14 - 12) = 14 ms to spare, when it is a row
    view = View(spec(0, Role.MIXED), [before])
    assert isinstance(answer(Cluster([view], traffic=traffic()), Colocated(), slo=SLO(ttft_ms=50)), Reject)
    before.slo = SLO(tpot_ms=20)
    assert isinstance(answer(Cluster([view], traffic=traffic()), Colocated(), slo=SLO(ttft_ms=50)), Place)


def test_who_waits_steps_aside_until_its_patience_ends():
    cluster = Cluster([crowded(row(tpot_ms=13))], traffic=traffic())
    assert answer(cluster, Colocated(), arrival_s=0.1 - PATIENCE_S).aside
    assert not answer(cluster, Colocated(), arrival_s=-PATIENCE_S).aside


def test_an_answer_stands_for_half_of_the_wait():
    cluster, policy, waiting = Cluster([crowded(row(tpot_ms=13))], traffic=traffic()), Admission(Colocated()), Ask()
    assert isinstance(policy.place(waiting, cluster), Wait)
    cluster.instances = [crowded(row())]
    cluster.now = 0.041
    assert isinstance(policy.place(waiting, cluster), Wait)
    cluster.now = 0.043
    assert isinstance(policy.place(waiting, cluster), Place)


def test_an_answer_stands_no_longer_when_nothing_is_left_that_could_end():
    cluster, policy, waiting = Cluster([crowded(row(tpot_ms=13))], traffic=traffic()), Admission(Colocated()), Ask()
    assert isinstance(policy.place(waiting, cluster), Wait)
    cluster.instances = [View(spec(0, Role.MIXED))]  # no event would follow: it would wait until it is given up
    assert isinstance(policy.place(waiting, cluster), Place)


def test_a_prompt_that_comes_back_does_not_break_those_behind_it():
    cluster = apart()
    cluster.now = 0.05
    cluster.instances[0].prefills = [Ask(7, 10, arrival_s=0.04, slo=SLO(ttft_ms=45))]  # 25 ms are left, it takes 20
    reject = answer(cluster, arrival_s=0.0, slo=SLO(ttft_ms=95))
    assert isinstance(reject, Reject) and "break the TTFT of a prompt behind it" in reject.reason
    assert isinstance(answer(cluster, arrival_s=0.045, slo=SLO(ttft_ms=95)), Place)


# --- degrade, reject ------------------------------------------------------------------------------------------------

BATCH = SLOClass("batch", SLO(ttft_ms=100))


def test_it_is_put_into_the_first_laxer_class_that_can_be_kept():
    laxer = (SLOClass("slow", SLO(ttft_ms=60)), BATCH, SLOClass("any", SLO()))
    place = answer(apart(queued=2), slo=SLO(ttft_ms=50), laxer=laxer)
    assert isinstance(place, Place) and place.slo_class == "batch"
    assert "as batch" in place.reason


def test_a_rejection_names_the_classes_that_were_tried():
    reject = answer(apart(queued=9), slo=SLO(ttft_ms=50), laxer=(BATCH,))
    assert isinstance(reject, Reject) and "nor of batch" in reject.reason and "> 100 ms" in reject.reason


def test_what_an_idle_cluster_cannot_keep_is_rejected_at_once():
    assert isinstance(answer(apart(), slo=SLO(tpot_ms=11)), Reject)


# --- drop, and the wrappers -----------------------------------------------------------------------------------------


def test_prompts_that_are_late_at_the_front_of_a_queue_are_dropped():
    cluster = apart()
    cluster.now = 1.0
    limits = [SLO(ttft_ms=1019), SLO(e2e_ms=1019), SLO(ttft_ms=1021), SLO(ttft_ms=1)]
    cluster.instances[0].prefills = [Ask(number, 10, slo=slo) for number, slo in enumerate(limits)]
    drops = DropLate(Disaggregated()).revise(cluster)
    assert [drop.ask.id for drop in drops] == [0, 1]  # the last is seen when it comes to the front
    assert all(isinstance(drop, Drop) for drop in drops)
    assert drops[0].reason == "TTFT would be 1020 > 1019 ms at best"


def test_prompts_that_have_begun_and_those_without_limits_stay():
    cluster = apart()
    cluster.now = 1.0
    cluster.instances[0].prefills = [Ask(0, 10, prefilled=5, slo=SLO(ttft_ms=1)), Ask(1, 10)]
    cluster.queue = [Ask(2, 10, slo=SLO(ttft_ms=500))]
    assert [drop.ask.id for drop in DropLate(Disaggregated()).revise(cluster)] == [2]


@pytest.mark.parametrize("inner", [Colocated(), Disaggregated()])
def test_wrappers_have_the_traits_of_the_policy_but_are_asked_at_every_step(inner):
    for policy in (Admission(inner), DropLate(inner), guarded(inner, admission=True, drop_late=True)):
        assert not traits_of(policy).steady
        assert traits_of(policy).colocated == traits_of(inner).colocated
    assert guarded(inner, admission=False, drop_late=False) is inner
