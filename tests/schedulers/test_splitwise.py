"""Splitwise: join shortest queue in two pools, a mixed pool that borrows and gives back, prompts first within bounds.

A prompt queue takes 40 tokens here unless it is empty; rows are 8, pages 64 of 4 tokens.
"""

import pytest

from pdjax.messages import Role
from pdjax.request import State
from pdjax.schedulers import Place, Splitwise, Wait
from pdjax.schedulers.base import Flip
from pdjax.testing import World, fake_tokens, spec
from tests.views import Ask, Cluster, View, views
from tests.worlds import ask as request

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


def cluster(*roles, queue=()):
    return Cluster(views(*roles), queue=list(queue))


def placed(there, ask=None, stream_from=None):
    place = Splitwise(stream_from, queue_tokens=40).place(ask or Ask(), there)
    assert isinstance(place, Place)
    return place.prefill, place.decode, place.mode


def revised(there):
    return [(flip.instance, flip.role) for flip in Splitwise(queue_tokens=40).revise(there)]


# --- join shortest queue --------------------------------------------------------------------------------------------


def test_both_instances_are_named_at_the_arrival_each_with_the_shortest_queue():
    there = cluster(P, P, D, D)
    there.instances[0].prefills = [Ask(7, 5)]
    there.instances[2].rows = 1
    assert placed(there) == (1, 3, "whole")


def test_of_two_queues_without_pending_tokens_the_one_that_is_done_first_is_shorter():
    there = cluster(P, P, D)
    there.instances[0].busy_s = 0.5
    assert placed(there)[0] == 1


def test_rows_that_were_promised_count():
    there = cluster(P, D, D)
    there.instances[1].assigned = [Ask(7)]
    assert placed(there)[1] == 2


@pytest.mark.parametrize(("tokens", "mode"), [(7, "whole"), (8, "stream")])
def test_only_long_prompts_are_streamed(tokens, mode):
    assert placed(cluster(P, D), Ask(context_tokens=tokens), stream_from=8) == (0, 1, mode)


# --- the mixed pool -------------------------------------------------------------------------------------------------


def test_a_prompt_that_a_queue_refuses_goes_to_the_mixed_pool():
    there = cluster(P, M, D)
    there.instances[0].prefills = [Ask(7, 35)]
    assert placed(there, Ask(context_tokens=5)) == (0, 2, "whole")
    assert placed(there, Ask(context_tokens=6)) == (1, 2, "whole")


def test_unless_told_otherwise_a_queue_takes_four_passes_of_sixteen_tokens():
    there = cluster(P, M, D)
    there.instances[0].prefills = [Ask(7, 59)]
    places = [Splitwise().place(Ask(context_tokens=tokens), there) for tokens in (5, 6)]
    assert [place.prefill for place in places if isinstance(place, Place)] == [0, 1]


def test_an_empty_queue_takes_a_prompt_of_any_length():
    assert placed(cluster(P, M, D), Ask(context_tokens=50))[0] == 0


def test_a_row_that_does_not_fit_goes_to_the_mixed_pool():
    there = cluster(P, M, D)
    there.instances[2].free_pages = 4
    assert placed(there, Ask(context_tokens=10, max_new_tokens=6)) == (0, 2, "whole")
    there.instances[2].assigned = [Ask(7, 1, max_new_tokens=1)]  # one of the four pages is promised
    assert placed(there, Ask(context_tokens=10, max_new_tokens=6)) == (0, 1, "whole")


def test_a_decode_instance_without_a_slot_left_refuses():
    there = cluster(P, M, D)
    there.instances[2].rows, there.instances[2].incoming, there.instances[2].assigned = 5, 2, [Ask(7)]
    assert placed(there)[1] == 1


def test_both_phases_on_one_mixed_instance_move_nothing():
    there = cluster(P, M, D)
    there.instances[0].prefills = [Ask(7, 40)]
    there.instances[2].free_pages = 0
    assert placed(there, stream_from=1) == (1, 1, "whole")


def test_a_decode_instance_is_borrowed_when_no_queue_takes_the_prompt():
    there = cluster(P, D, D, queue=[Ask(context_tokens=6)])
    there.instances[0].prefills = [Ask(7, 35)]
    there.instances[1].rows = 1
    assert revised(there) == [(2, M)]


def test_a_prefill_instance_is_borrowed_when_no_instance_has_room_for_the_row():
    there = cluster(P, P, D, queue=[Ask()])
    there.instances[0].prefills = [Ask(7, 5)]
    there.instances[2].free_pages = 0
    assert revised(there) == [(1, M)]


@pytest.mark.parametrize("roles", [(P, D), (P, P, D)])
def test_the_last_decode_instance_is_not_lent(roles):
    there = cluster(*roles, queue=[Ask(context_tokens=6)])
    for view in there.instances[:-1]:
        view.prefills = [Ask(7, 35)]
    assert revised(there) == []


def test_where_nobody_can_be_borrowed_both_phases_go_to_the_fewest_pending_tokens():
    there = cluster(P, D)
    there.instances[0].prefills = [Ask(7, 35)]
    there.instances[1].rows = 3
    assert placed(there, Ask(context_tokens=6)) == (1, 1, "whole")


def borrowed(origin, **changes):
    """What is to become of a mixed instance that was another before, in company of a prefill and a decode instance."""
    there = cluster(P, origin, D)
    there.instances[1] = View(spec(1, origin), became=M, **changes)
    return revised(there)


def test_it_goes_back_when_the_prompts_that_it_was_borrowed_for_are_done():
    assert borrowed(D, prefills=[Ask(7, 5)]) == []
    assert borrowed(D, rows=3) == [(1, D)]


def test_it_goes_back_when_the_rows_that_it_was_borrowed_for_are_done():
    assert borrowed(P, rows=1) == borrowed(P, incoming=1) == borrowed(P, assigned=[Ask(7)]) == []
    assert borrowed(P, prefills=[Ask(7, 5)]) == [(1, P)]


@pytest.mark.parametrize(("origin", "other"), [(D, D), (P, P)])
def test_it_stays_where_nobody_else_could_do_the_work(origin, other):
    there = cluster(other, origin)
    there.instances[1].became = M
    assert revised(there) == []


def test_an_instance_that_was_mixed_from_the_start_stays():
    assert revised(cluster(P, M, D)) == []


# --- one instance ---------------------------------------------------------------------------------------------------


def plan(prompts, rows=0, streak=0, batch_tokens=0):
    """Tokens of each prompt, and whether rows step; the sizes make 64 tokens the saturating length."""
    view = View(spec(0, M, max_chunk=64, max_chunks=9), [Ask(i, n) for i, n in enumerate(prompts)])
    view.rows, view.prefill_streak = rows, streak
    answer = Splitwise(batch_tokens=batch_tokens).iterate(view, Cluster([view]))
    return [tokens for _, tokens in answer.chunks], answer.decode


def test_rows_ride_along_where_there_is_room_beside_the_prompts():
    assert plan([20, 20], rows=8) == ([20, 20], True)


def test_prompts_that_fill_the_pass_make_rows_wait():
    assert plan([60, 20], rows=8) == ([60], False)


def test_a_length_that_is_given_bounds_a_pass_of_several_prompts_and_of_rows_beside_them():
    assert plan([20, 20], rows=8, batch_tokens=30) == ([20], True)
    assert plan([20, 20], rows=8, batch_tokens=40) == ([20, 20], False)


def test_rows_that_have_waited_four_times_step_whatever_there_is():
    assert plan([60, 20], rows=8, streak=4) == ([60], True)


def test_an_instance_without_prompts_decodes_and_one_without_anything_idles():
    assert plan([], rows=3) == ([], True)
    assert plan([]) == ([], False)


# --- in a cluster ---------------------------------------------------------------------------------------------------


def test_a_burst_borrows_gives_back_and_loses_nothing():
    w = World([spec(index, role) for index, role in enumerate((P, D, D))], Splitwise(queue_tokens=40))
    requests = [request(number, prompt=30, tokens=10, at_s=0.001 * number) for number in range(12)]
    w.add(*requests)
    collected = w.run()
    assert all(collected.records[one.id].token_ids == fake_tokens(one) for one in requests)
    assert {(flip.before, flip.after) for flip in collected.flips} == {(D, M), (M, D)}
    assert [lane.role for lane in w.controller.books.instances] == [P, D, D]
    assert not any(lane.assigned for lane in w.controller.books.instances)


def test_rows_over_the_room_of_the_decode_side_borrow_a_prefill_instance():
    small = {"num_pages": 9, "max_model_len": 32}
    w = World([spec(0, P), spec(1, P), spec(2, D, **small)], Splitwise(stream_from=16))
    requests = [request(number, prompt=20, tokens=10, at_s=0.001 * number) for number in range(6)]
    w.add(*requests)
    collected = w.run()
    assert all(collected.records[one.id].token_ids == fake_tokens(one) for one in requests)
    assert {(flip.before, flip.after) for flip in collected.flips} == {(P, M), (M, P)}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_whoever_is_lost_in_the_middle_of_it_the_others_serve_all(lost):
    w = World([spec(index, role) for index, role in enumerate((P, D, D))], Splitwise(queue_tokens=40))
    requests = [request(number, prompt=30, tokens=10, at_s=0.001 * number) for number in range(12)]
    w.add(*requests)
    w.cluster.lose(lost, "gone", 0.2)
    assert {record.state for record in w.run().records.values()} == {State.FINISHED}


def test_without_anybody_alive_requests_wait():
    there = cluster(P, D)
    for view in there.instances:
        view.alive = False
    assert isinstance(Splitwise().place(Ask(), there), Wait) and Splitwise().revise(there) == []


def test_reasons_name_the_queues():
    there = cluster(P, D, D, queue=[Ask(context_tokens=6)])
    there.instances[0].prefills = [Ask(7, 35)]
    (flip,) = Splitwise(queue_tokens=40).revise(there)
    assert isinstance(flip, Flip) and flip.reason == "borrowed: prompt queues have no room for 6 tokens"
    place = Splitwise(queue_tokens=99).place(Ask(context_tokens=6), there)
    assert isinstance(place, Place)
    assert place.reason == "splitwise: prefill 0 has 35 pending tokens, decode 1 0 rows"


@pytest.mark.parametrize("field", ["stream_from", "queue_tokens", "batch_tokens"])
def test_options_out_of_range_are_named(field):
    with pytest.raises(ValueError, match=f"{field} is -1; allowed:"):
        Splitwise(**{field: -1})
