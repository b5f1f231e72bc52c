"""Remaining capacity of instances whose numbers one can follow, and of a cluster at work."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.capacity import Gauge, Remaining, queued_prompt_tokens, remaining, strictest
from pdjax.latency import LatencyModel
from pdjax.messages import Role
from pdjax.request import SLO
from pdjax.testing import Collector, World, spec
from tests.views import Ask, View
from tests.worlds import POLICIES, crowd, policy, specs

LIMITS = SLO(ttft_ms=100.5, tpot_ms=20.1)  # a little more than what is used up


def view(role=Role.MIXED, *, max_rows=8, **state):
    """10 ms a pass, 1 ms a prompt token, 2 ms a row, 0.01 ms a token of context; chunks of at most 16."""
    return View(spec(0, role, max_rows=max_rows), latency=LatencyModel((0.010, 0.001, 0, 0.002, 1e-5, 0)), **state)


def test_prompt_tokens_fill_the_ttft_limit_with_whole_passes_and_a_rest():
    # 100 ms: 3 passes of 10 + 16 ms, and 22 ms for one of 12 tokens
    assert remaining(view(), LIMITS).prefill_tokens == 3 * 16 + 12


def test_prompt_tokens_that_wait_are_taken_off():
    busy = view(prefills=[Ask(0, 30), Ask(1, 20, prefilled=10)])
    assert remaining(busy, LIMITS).prefill_tokens == 60 - 40


def test_rows_beside_the_prompts_make_every_pass_longer():
    # 5 rows of 200 tokens in all: 12 ms more. 2 passes of 38 ms, and 24 ms for one of 2 tokens.
    assert remaining(view(rows=5, context_tokens=200, attended_tokens=250), LIMITS).prefill_tokens == 2 * 16 + 2


def test_rows_of_the_mean_context_join_up_to_the_tpot_limit():
    # A step of n rows of 50 tokens: 10 + 2.5 n ms; 20 ms hold 4 of them.
    assert remaining(view(rows=1, context_tokens=50, attended_tokens=50), LIMITS).rows == 3


def test_rows_on_their_way_count_as_if_they_were_there():
    assert remaining(view(rows=1, incoming=2, context_tokens=50, attended_tokens=50), LIMITS).rows == 1


def test_without_rows_half_of_the_longest_request_stands_in_for_the_mean():
    # 128 tokens: 10 + 3.28 n ms
    assert remaining(view(), LIMITS).rows == 3


def test_never_more_rows_than_slots():
    assert remaining(view(max_rows=2), LIMITS).rows == 2
    assert remaining(view(rows=1, incoming=1), SLO()).rows == 6


def test_pages_are_those_that_are_free():
    assert remaining(view(free_pages=17), LIMITS).pages == 17


def test_without_limits_prompts_have_none_and_rows_their_slots():
    assert remaining(view(), SLO()) == Remaining(None, 8, 64)


def test_an_instance_without_chunks_or_rows_has_room_for_none():
    assert remaining(view(max_rows=0), LIMITS).rows == 0
    no_chunks = view()
    no_chunks.spec = dataclasses.replace(no_chunks.spec, max_chunk=0)
    assert remaining(no_chunks, SLO()).prefill_tokens == 0


def test_a_dead_instance_has_no_capacity():
    assert remaining(view(alive=False), LIMITS) == Remaining(0, 0, 0)


@settings(derandomize=True, deadline=None)
@given(
    rows=st.integers(0, 8),
    incoming=st.integers(0, 8),
    context=st.integers(0, 2000),
    waiting=st.integers(0, 500),
    ttft=st.floats(0.01, 1e4),
    tpot=st.floats(0.01, 1e3),
)
def test_nothing_is_ever_negative_and_a_looser_limit_never_leaves_less(rows, incoming, context, waiting, ttft, tpot):
    state = view(rows=rows, incoming=incoming, context_tokens=context, attended_tokens=context)
    state.prefills = [Ask(0, waiting)]
    tight, loose = remaining(state, SLO(ttft, tpot)), remaining(state, SLO(2 * ttft, 2 * tpot))
    assert min(dataclasses.astuple(tight)) >= 0
    assert loose.prefill_tokens >= tight.prefill_tokens and loose.rows >= tight.rows


def test_the_strictest_of_several_slos_has_the_smallest_of_each_limit():
    assert strictest([SLO(ttft_ms=5), SLO(ttft_ms=3, e2e_ms=9), SLO()]) == SLO(ttft_ms=3, e2e_ms=9)


# --- a cluster at work ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_queued_prompt_tokens_are_the_sum_of_what_waits_at_any_time(name):
    w = World(specs(name, num_pages=33), policy(name))
    w.add(*crowd(seed=3, count=15))
    seen = []
    while w.step():
        books = w.controller.books
        waiting = {live.id: live for lane in books.instances for live in lane.prefills} | {
            live.id: live for live in books.queue
        }
        assert queued_prompt_tokens(books) == sum(live.context_tokens - live.prefilled for live in waiting.values())
        seen.append(queued_prompt_tokens(books))
    assert max(seen) > 0 and seen[-1] == 0


class Sampler(Collector):
    """Samples as an engine does."""

    def __init__(self):
        super().__init__()
        self.gauge, self.world = Gauge(LIMITS), None

    def iteration(self, record):
        self.gauge.sample(self.world.controller.books, record.instance)


def test_a_gauge_tells_the_least_and_the_last_of_each_instance_that_ran():
    sampler = Sampler()
    sampler.world = w = World([spec(0, Role.MIXED), spec(1, Role.MIXED)], policy("colocated"), sink=sampler)
    w.add(*crowd(seed=1, count=12))
    w.run()
    told = sampler.gauge.summary()
    assert [entry["instance"] for entry in told["instances"]] == [0, 1]
    for entry in told["instances"]:
        idle = dataclasses.asdict(remaining(w.controller.books.instances[entry["instance"]], LIMITS))
        assert entry["last"]["prefill_tokens"] == idle["prefill_tokens"]
        assert all(entry["least"][name] < idle[name] for name in idle)
    assert told["queued_prompt_tokens_max"] > 0
