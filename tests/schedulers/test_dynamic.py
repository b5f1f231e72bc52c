"""What the dynamic policy decides, by hand: an iteration takes 10 ms, 1 ms a prompt token, 2 ms a row."""

import dataclasses

import pytest

from pdjax import metrics
from pdjax.messages import Role
from pdjax.request import SLO
from pdjax.schedulers import Colocated, Dynamic, Move, Place, Traits
from pdjax.schedulers.base import Row
from pdjax.testing import World, spec
from pdjax.traffic import Traffic
from tests.views import SIMPLE, Ask, Cluster, View, views
from tests.worlds import ask as request


def row(number=0, issued=1, most=11, first_s=0.0, tpot_ms=None):
    return Row(Ask(number, slo=SLO(tpot_ms=tpot_ms)), issued, issued, most, first_s)


def decoding(rows, **changes):
    return View(spec(1, Role.DECODE), rows=len(rows), running=rows, **changes)


def chosen(cluster, ask, **options) -> Place:
    place = Dynamic(**options).place(ask, cluster)
    assert isinstance(place, Place)
    return place


def test_a_prompt_goes_where_its_first_token_comes_first():
    cluster = Cluster(views(Role.PREFILL, Role.DECODE))
    cluster.instances[0].prefills = [Ask(7, 200)]
    place = chosen(cluster, Ask(context_tokens=10))
    assert (place.prefill, place.decode) == (1, 1)


def test_a_prompt_does_not_wait_for_rows_that_can_spare_nothing():
    # 10 steps of 12 ms at 13 ms each: 10 ms to spare, and 120 ms until the row ends. The prompt before takes 90 ms.
    cluster = Cluster([View(spec(0, Role.PREFILL), prefills=[Ask(7, 50)]), decoding([row(tpot_ms=13)])])
    cluster.traffic = Traffic(prompt_tokens=50)
    place = chosen(cluster, Ask(context_tokens=10))
    assert (place.prefill, place.decode) == (0, None)


def test_a_prompt_shares_with_rows_that_can_spare_the_time():
    cluster = Cluster([View(spec(0, Role.PREFILL), prefills=[Ask(7, 50)]), decoding([row(tpot_ms=20)])])
    place = chosen(cluster, Ask(context_tokens=10))
    assert (place.prefill, place.decode) == (1, 1)


def test_long_prompts_that_move_are_streamed_to_the_instance_with_the_fewest_rows():
    cluster = Cluster(views(Role.PREFILL, Role.DECODE, Role.DECODE))
    for view, rows in zip(cluster.instances[1:], (3, 2), strict=True):
        view.rows, view.busy_s = rows, 1.0
    place = chosen(cluster, Ask(context_tokens=10), stream_from=10)
    assert (place.prefill, place.decode, place.mode) == (0, 2, "stream")
    assert chosen(cluster, Ask(context_tokens=9), stream_from=10).mode == "whole"


def test_rows_stay_where_they_were_prefilled_while_decode_instances_are_full():
    cluster = Cluster([View(spec(0, Role.PREFILL)), View(spec(1, Role.DECODE), rows=7, busy_s=1.0)])
    place = chosen(cluster, Ask(context_tokens=10))
    assert (place.prefill, place.decode) == (0, 0)


def test_a_prompt_waits_for_a_slot_where_its_row_would_stay():
    rows = [row(number, most=6 + number) for number in range(8)]
    cluster = Cluster([View(spec(0, Role.PREFILL), busy_s=0.05), decoding(rows)])
    # The first of eight rows ends after 5 steps of 26 ms.
    place = chosen(cluster, Ask(context_tokens=10))
    assert place.prefill == 0 and "all on 1 TTFT 150 ms" in place.reason


def test_the_reason_names_the_choice_and_the_alternatives_with_their_times():
    cluster = Cluster(views(Role.PREFILL, Role.DECODE))
    cluster.instances[1].busy_s = 0.005
    place = chosen(cluster, Ask(context_tokens=10))
    assert place.reason == "dynamic: 0->1 TTFT 20 ms TPOT 12.0 ms (not: all on 1 TTFT >= 25 ms TPOT 12.0 ms)"
    assert place.predicted.ttft_ms == pytest.approx(20) and place.predicted.tpot_ms == pytest.approx(12)


def test_a_prompt_that_will_be_late_is_told_so():
    place = chosen(Cluster(views(Role.PREFILL, Role.DECODE)), Ask(context_tokens=10, slo=SLO(ttft_ms=19)))
    assert place.reason.startswith("dynamic: too late, the earliest is 0->1 TTFT 20 ms")


@pytest.mark.parametrize(("decode_chunk", "rows", "prefill"), [(5, 0, 1), (5, 2, 0), (2, 0, 0)])
def test_short_chunks_on_decode_instances_make_a_prompt_late_there(decode_chunk, rows, prefill):
    # Behind 5 tokens: 15 + 20 ms. In passes of 5 beside rows: 2 of 15 or 19 ms; in passes of 2: 5 of 12 ms.
    cluster = Cluster([View(spec(0, Role.PREFILL), prefills=[Ask(7, 5)]), decoding([row()] * rows)])
    cluster.traffic = Traffic(prompt_tokens=5)
    assert chosen(cluster, Ask(context_tokens=10), decode_chunk=decode_chunk).prefill == prefill


def test_without_chunks_on_decode_instances_it_is_disaggregated():
    cluster = Cluster(views(Role.PREFILL, Role.DECODE))
    cluster.instances[0].prefills = [Ask(7, 200)]
    place = chosen(cluster, Ask(context_tokens=10), decode_chunk=0)
    assert (place.prefill, place.decode) == (0, None)


def test_without_chunks_on_decode_instances_they_prefill_when_nobody_else_is_left():
    w = World([spec(0, Role.PREFILL), spec(1, Role.DECODE)], Dynamic(decode_chunk=0))
    w.add(request(0, prompt=20, tokens=5, at_s=1.0))
    w.cluster.lose(0, "gone", 0.5)
    assert w.run().records[0].prefill_instance == 1


def test_with_mixed_instances_it_is_colocated():
    assert Dynamic(mixed=True).traits == Traits(colocated=True)
    w = World([spec(0, Role.MIXED), spec(1, Role.MIXED)], Dynamic(mixed=True))
    w.add(*(request(number, prompt=20, tokens=5, at_s=0.001 * number) for number in range(12)))
    collected = w.run()
    assert not collected.transfers
    assert {record.prefill_instance for record in collected.records.values()} == {0, 1}


# --- passes ---------------------------------------------------------------------------------------------------------


def taken(view, policy=None):
    plan = (policy or Dynamic()).iterate(view, Cluster([view]))
    return [(ask.id, tokens) for ask, tokens in plan.chunks], plan.decode


def test_rows_ride_with_a_chunk():
    assert taken(decoding([row()], prefills=[Ask(7, 30)])) == ([(7, 16)], True)


def test_rows_that_are_padded_beside_a_chunk_wait_for_it_where_that_takes_less():
    # Beside a chunk a row costs as much as eight: 10 + 16 + 16 ms together, 26 + 12 ms apart; of 1 ms each, 34 and 37.
    padded = dataclasses.replace(spec(1, Role.DECODE), row_buckets=(1, 8), chunk_buckets=(16,))
    view = View(padded, [Ask(7, 30)], rows=1, running=[row()])
    assert taken(view) == ([(7, 16)], False)
    view.latency = dataclasses.replace(SIMPLE, iteration=(0.010, 0.001, 0, 0.001, 0, 0))
    assert taken(view) == ([(7, 16)], True)


@pytest.mark.parametrize(("tpot_ms", "chunk"), [(14.3, []), (15.9, [(7, 8)]), (16.1, [(7, 16)])])
def test_the_largest_chunk_runs_that_all_rows_can_spare_and_two_steps(tpot_ms, chunk):
    # 10 steps of 12 ms at the limit leave 23, 39 or 41 ms: 24 for two steps, the rest for 1, 2, 4, 8 or 16 tokens.
    assert taken(decoding([row(tpot_ms=tpot_ms), row(1)][:1], prefills=[Ask(7, 30)])) == (chunk, True)


def test_a_row_that_has_missed_its_limit_holds_up_no_prompt():
    assert taken(decoding([row(tpot_ms=1)], prefills=[Ask(7, 30)])) == ([(7, 16)], True)


def test_nothing_is_issued_behind_long_work_while_prompts_wait():
    view = decoding([row()], prefills=[Ask(7, 30)], busy_s=0.05)
    assert taken(view) == ([], False)
    view.prefills = []
    assert taken(view) == ([], True)


def test_prompts_that_can_still_be_in_time_come_before_those_that_cannot():
    lost, good = Ask(0, 10, slo=SLO(ttft_ms=19)), Ask(1, 10, slo=SLO(ttft_ms=21))
    view = View(spec(0, Role.PREFILL), [lost, good])
    assert taken(view) == ([(1, 10), (0, 6)], False)


def test_a_prompt_that_waits_too_long_comes_first_again():
    lost, good = Ask(0, 10, slo=SLO(ttft_ms=19)), Ask(1, 10, arrival_s=0.19, slo=SLO(ttft_ms=21))
    view = View(spec(0, Role.PREFILL), [lost, good])
    plan = Dynamic().iterate(view, Cluster([view], now=0.19))
    assert [ask.id for ask, _ in plan.chunks] == [0, 1]


# --- rows that move -------------------------------------------------------------------------------------------------


def moved(cluster):
    policy = Dynamic()
    return [change for _ in cluster.instances for change in policy.revise(cluster)]


def test_the_longest_answer_leaves_a_decode_instance_without_pages():
    full = decoding([row(0, 5), row(1, 9), row(2, 3)], free_pages=3)
    assert [(move.ask.id, move.to) for move in moved(Cluster([View(spec(0, Role.PREFILL)), full]))] == [(1, 0)]
    full.free_pages = 4  # of 64: 93.75 % are taken
    assert not moved(Cluster([View(spec(0, Role.PREFILL)), full]))


def test_one_row_leaves_at_a_time():
    full = decoding([row(0, 5), row(1, 9)], free_pages=3)
    assert not moved(Cluster([View(spec(0, Role.PREFILL), incoming=1), full]))
    assert not moved(Cluster([View(spec(0, Role.PREFILL), assigned=[Ask(7)]), full]))


def prefilling(tpot_ms, **changes):
    return View(
        spec(0, Role.PREFILL), rows=1, running=[row(most=101, tpot_ms=tpot_ms)], prefills=[Ask(7, 30)], **changes
    )


def test_a_row_without_time_to_spare_leaves_a_prefill_instance():
    # 100 steps of 12 ms; at 12.4 ms a token 40 ms to spare, 3 % of the limit.
    moves = moved(Cluster([prefilling(12.4), View(spec(1, Role.DECODE))]))
    assert [type(move) for move in moves] == [Move] and moves[0].to == 1
    assert not moved(Cluster([prefilling(13.0), View(spec(1, Role.DECODE))]))


def test_a_row_without_a_limit_stays():
    assert not moved(Cluster([prefilling(None), View(spec(1, Role.DECODE))]))


def test_a_row_stays_if_it_cannot_afford_the_move():
    assert not moved(Cluster([prefilling(12.4), View(spec(1, Role.DECODE), busy_s=0.05)]))
    assert not moved(Cluster([prefilling(12.4, busy_s=0.05), View(spec(1, Role.DECODE))]))


def test_rows_move_nowhere_without_room():
    assert not moved(Cluster([prefilling(12.4), View(spec(1, Role.DECODE), full=True)]))


@pytest.mark.parametrize(("field", "value"), [("stream_from", 0), ("decode_chunk", -1)])
def test_options_out_of_range_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}; allowed:"):
        Dynamic(**{field: value})


@pytest.mark.parametrize(("policy", "kept"), [(Dynamic(mixed=True), True), (Colocated(), False)])
def test_its_rows_keep_a_limit_that_prefill_first_breaks(policy, kept):
    """39 steps of 12 ms; five prompts of 100 ms each in the middle are more than a limit of 18 ms leaves."""
    w = World([spec(0, Role.MIXED, num_pages=257)], policy, SIMPLE)
    row = dataclasses.replace(request(0, prompt=4, tokens=40), slo=SLO(tpot_ms=18))
    w.add(row, *(request(number, prompt=60, tokens=1, at_s=0.05) for number in range(1, 6)))
    assert metrics.met(w.run().records[0]) is kept
