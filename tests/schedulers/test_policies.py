"""What each policy decides, on views whose numbers one can follow."""

import dataclasses
import itertools

import pytest

from pdjax.latency import LatencyModel
from pdjax.messages import Role
from pdjax.request import SLO
from pdjax.schedulers import ChunkedColocated, Colocated, Disaggregated, Dynamic, Place, Traits, Wait, take_chunks
from pdjax.schedulers.base import Row, traits_of
from pdjax.testing import World, spec
from tests.views import Ask, Cluster, View, views
from tests.worlds import ask as request

# --- packing --------------------------------------------------------------------------------------------------------


def test_chunks_fill_the_budget_exactly_in_queue_order():
    view = View(spec(0, Role.MIXED), [Ask(0, 10, prefilled=4), Ask(1, 3), Ask(2, 20)])
    assert [(ask.id, n) for ask, n in take_chunks(view, 12)] == [(0, 6), (1, 3), (2, 3)]


def test_a_prompt_without_pages_is_not_overtaken():
    view = View(spec(0, Role.MIXED), [Ask(0, 4), Ask(1, 4), Ask(2, 4)], blocked=(1,))
    assert [ask.id for ask, _ in take_chunks(view, 16)] == [0]


def test_no_more_prompts_than_an_iteration_takes():
    view = View(spec(0, Role.MIXED, max_chunks=2), [Ask(i, 2) for i in range(5)])
    assert len(take_chunks(view, 16)) == 2


# --- colocated ------------------------------------------------------------------------------------------------------


def test_colocated_goes_where_the_fewest_prompt_tokens_wait():
    cluster = Cluster(views(Role.MIXED, Role.MIXED))
    cluster.instances[0].prefills = [Ask(7, 30)]
    place = Colocated().place(Ask(), cluster)
    assert isinstance(place, Place) and (place.prefill, place.decode) == (1, 1)


def test_colocated_runs_prompts_before_rows():
    view = View(spec(0, Role.MIXED), [Ask(0, 5)], rows=3)
    plan = Colocated().iterate(view, Cluster([view]))
    assert plan.chunks and not plan.decode


def test_colocated_lets_rows_step_after_four_prefills_in_a_row():
    view = View(spec(0, Role.MIXED), [Ask(0, 5)], rows=3, prefill_streak=4)
    plan = Colocated().iterate(view, Cluster([view]))
    assert plan.decode and not plan.chunks


def test_a_stream_of_long_prompts_never_stops_a_running_row_for_more_than_five_iterations():
    w = World([spec(0, Role.MIXED, num_pages=257)], Colocated())
    w.add(request(0, prompt=2, tokens=20), *(request(i, prompt=60, tokens=2, at_s=0.01 * i) for i in range(1, 15)))
    iterations = w.run().iterations
    steps = [index for index, iteration in enumerate(iterations) if iteration.rows]
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 5


def test_chunked_puts_rows_first_and_fills_the_budget_exactly():
    view = View(spec(0, Role.MIXED), [Ask(0, 50)], rows=3)
    plan = ChunkedColocated(budget=12).iterate(view, Cluster([view]))
    assert plan.decode and [n for _, n in plan.chunks] == [9]


def test_chunked_finds_its_budget_where_mixed_passes_saturate():
    """10 ms, 1 ms a token, 16 ms for rows padded to 8: passes of 128, 256, 512 tokens do 0.83, 0.91, 0.95 per ms, and
    0.95 of that is 0.904."""
    sizes = {"chunk_buckets": (128, 256, 512), "row_buckets": (8,)}
    view = View(spec(0, Role.MIXED, max_chunk=512, **sizes), [Ask(0, 900)], rows=3)
    plan = ChunkedColocated().iterate(view, Cluster([view]))
    assert plan.decode and [n for _, n in plan.chunks] == [256]


def limited(prompts, *limits, **changes):
    """Prompt tokens of a pass beside rows with these limits on gaps: 10 ms, 1 ms a token and 16 ms the rows, 64 tokens
    saturating: 90, 58, 42 and 34 ms with 64, 32, 16 and 8 tokens."""
    view = View(spec(0, Role.MIXED, max_chunk=64), [Ask(i, n) for i, n in enumerate(prompts)], **changes)
    view.running = [Row(Ask(slo=SLO(itl_p99_ms=limit, tpot_ms=1)), 1, 1, 8, 0.0) for limit in limits]
    view.rows = 8
    return [n for _, n in ChunkedColocated().iterate(view, Cluster([view])).chunks]


def test_chunked_takes_the_largest_size_that_keeps_the_strictest_limit_of_its_rows():
    assert limited([100], None, 90) == [64]
    assert limited([100], None, 89, 60) == [32]
    assert limited([100], None) == [64]


def test_chunked_takes_the_smallest_size_where_no_limit_can_be_kept():
    assert limited([100], 1) == [8]


def test_chunked_fills_a_size_from_several_prompts():
    assert limited([5, 30, 100]) == [5, 30, 29]
    assert limited([5, 30, 100], 60) == [5, 27]


def test_chunked_moves_a_prompt_even_when_rows_fill_the_budget():
    view = View(spec(0, Role.MIXED), [Ask(0, 50)], rows=8)
    assert [n for _, n in ChunkedColocated(budget=8).iterate(view, Cluster([view])).chunks] == [1]


def test_chunked_stalls_rows_less_than_prefill_first():
    def worst_gap(policy) -> float:
        w = World([spec(0, Role.MIXED, num_pages=257, max_chunk=64)], policy)
        w.add(request(0, prompt=2, tokens=30), request(1, prompt=60, tokens=2, at_s=0.02))
        times = w.run().records[0].timeline.token_s
        return max(b - a for a, b in itertools.pairwise(times))

    assert worst_gap(ChunkedColocated(budget=16)) < worst_gap(Colocated()) / 2


# --- disaggregated --------------------------------------------------------------------------------------------------


def test_prompts_go_to_the_shortest_prefill_queue():
    cluster = Cluster(views(Role.PREFILL, Role.PREFILL, Role.DECODE))
    cluster.instances[0].prefills = [Ask(7, 30)]
    place = Disaggregated().place(Ask(), cluster)
    assert isinstance(place, Place) and (place.prefill, place.decode, place.mode) == (1, None, "whole")


def test_rows_go_to_the_least_loaded_decode_instance_with_room():
    cluster = Cluster(views(Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE))
    cluster.instances[1].rows = 3
    cluster.instances[2].rows, cluster.instances[2].incoming = 1, 1
    cluster.instances[3].full = True
    assert Disaggregated().hand_off(Ask(), cluster) == 2


def test_of_two_queues_without_pending_tokens_the_one_that_is_done_first_is_shorter():
    cluster = Cluster(views(Role.PREFILL, Role.PREFILL, Role.DECODE))
    cluster.instances[0].busy_s = 0.5
    assert Disaggregated().place(Ask(), cluster).prefill == 1


def test_a_burst_of_streamed_requests_spreads_over_the_decode_instances():
    """Nothing of them is on its way yet when the last one is placed."""
    roles = Role.PREFILL, Role.DECODE, Role.DECODE
    w = World([spec(index, role) for index, role in enumerate(roles)], Disaggregated(stream_from=1))
    w.add(*(request(number, prompt=30) for number in range(6)))
    decoders = [record.decode_instance for record in w.run().records.values()]
    assert sorted(decoders) == [1, 1, 1, 2, 2, 2]


def test_nothing_is_handed_off_while_no_decode_instance_has_room():
    cluster = Cluster(views(Role.PREFILL, Role.DECODE))
    cluster.instances[1].full = True
    assert Disaggregated().hand_off(Ask(), cluster) is None


def test_disaggregated_leaves_pages_to_the_rows_that_are_there():
    cluster = Cluster(views(Role.PREFILL, Role.DECODE))  # 64 pages of 4 tokens; the row needs 3
    decoder = cluster.instances[1]
    decoder.rows, decoder.free_pages = 1, 6
    assert Disaggregated().hand_off(Ask(), cluster) is None
    decoder.free_pages = 7  # 4 are left, a twentieth of 64 and more
    assert Disaggregated().hand_off(Ask(), cluster) == 1
    decoder.rows, decoder.free_pages = 0, 3
    assert Disaggregated().hand_off(Ask(), cluster) == 1


def taken(prompts, *, batch_tokens=0, **changes):
    """How many tokens of each prompt share the next pass; the sizes make 32 tokens the saturating length."""
    sizes = {"max_chunk": 64, "max_chunks": 9, "chunk_buckets": (16, 32, 48, 64)}
    view = View(spec(0, Role.PREFILL, **(sizes | changes)), [Ask(i, n) for i, n in enumerate(prompts)])
    view.latency = LatencyModel((0.0015, 0.001, 0, 0, 0, 0))  # 0.914, 0.955, 0.970, 0.977 tokens per ms
    policy = Disaggregated(batch_tokens=batch_tokens)
    return [tokens for _, tokens in policy.iterate(view, Cluster([view])).chunks]


def test_prompts_share_a_pass_up_to_the_saturating_length():
    assert taken([10, 10, 12, 1]) == [10, 10, 12]


def test_a_prompt_that_would_pass_the_saturating_length_is_left_for_the_next_pass():
    assert taken([20, 20, 1]) == [20]


def test_a_longer_prompt_goes_alone_in_chunks():
    assert taken([64, 1]) == [64]
    assert taken([100, 1]) == [64]


def test_what_fits_into_the_padding_of_a_longer_prompt_joins_it():
    assert taken([40, 8, 1]) == [40, 8]  # padded to 48
    assert taken([40, 8, 1], chunk_buckets=()) == [40]


def test_a_length_that_is_given_replaces_the_saturating_one():
    assert taken([10, 10, 12, 1], batch_tokens=10) == [10]
    assert taken([20, 20, 1], batch_tokens=64) == [20, 20, 1]


@pytest.mark.parametrize(("tokens", "mode"), [(7, "whole"), (8, "stream")])
def test_only_prompts_from_the_threshold_on_are_streamed(tokens, mode):
    place = Disaggregated(stream_from=8).place(Ask(context_tokens=tokens), Cluster(views(Role.PREFILL, Role.DECODE)))
    assert isinstance(place, Place) and place.mode == mode


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("policy", [Disaggregated(stream_from=1), Dynamic(stream_from=1)])
def test_the_last_instance_takes_both_roles(policy, lost):
    cluster = Cluster(views(Role.PREFILL, Role.DECODE))
    cluster.instances[lost].alive = False
    place = policy.place(Ask(), cluster)
    assert isinstance(place, Place) and place.prefill == place.decode == 1 - lost


@pytest.mark.parametrize(("lost", "lacks"), [(0, {"max_chunk": 0}), (1, {"max_rows": 0})])
def test_an_instance_takes_no_role_that_it_was_not_built_for(lost, lacks):
    cluster = Cluster(views(Role.PREFILL, Role.DECODE))
    cluster.instances[lost].alive = False
    cluster.instances[1 - lost].spec = dataclasses.replace(cluster.instances[1 - lost].spec, **lacks)
    assert all(isinstance(policy.place(Ask(), cluster), Wait) for policy in (Disaggregated(), Dynamic()))


# --- all ------------------------------------------------------------------------------------------------------------


def test_a_policy_that_says_nothing_gets_instances_that_can_do_all():
    assert traits_of(object()) == Traits(colocated=False, prefill_decodes=True, decode_prefills=True)


def test_traits_of_another_kind_are_refused():
    class Odd(Colocated):
        traits = "colocated"

    with pytest.raises(ValueError, match=r"Odd\.traits is 'colocated'"):
        traits_of(Odd())


@pytest.mark.parametrize(
    ("kind", "field"), [(ChunkedColocated, "budget"), (Disaggregated, "stream_from"), (Disaggregated, "batch_tokens")]
)
def test_options_out_of_range_are_named(kind, field):
    with pytest.raises(ValueError, match=f"{field} is -1; allowed:"):
        kind(**{field: -1})
