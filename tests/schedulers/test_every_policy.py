"""What every registered policy must keep, and a user's own: one suite for all, so that a new one breaks no other."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.messages import Role
from pdjax.request import State
from pdjax.schedulers import SCHEDULERS
from pdjax.schedulers.base import traits_of
from pdjax.testing import World, fake_tokens, spec
from tests.worlds import RoundRobin, ask, crowd

FACTORIES = {
    **{f"{name}{suffix}": (make, way) for name, make in SCHEDULERS.items() for suffix, way in (("", None), ("+", 1))},
    "own": (lambda stream_from: RoundRobin(), None),
}
EVERY_POLICY = pytest.mark.parametrize("name", FACTORIES)
APART = [name for name, (make, way) in FACTORIES.items() if not traits_of(make(way)).colocated]


def policy(name):
    make, stream_from = FACTORIES[name]
    return make(stream_from)


def world(name, **changes):
    """Two instances with the roles that an engine would give them."""
    roles = (Role.MIXED, Role.MIXED) if traits_of(policy(name)).colocated else (Role.PREFILL, Role.DECODE)
    return World([spec(index, role, **changes) for index, role in enumerate(roles)], policy(name))


def right(w, *requests):
    """Every request has finished with the tokens of its context."""
    for request in requests:
        record = w.collected.records[request.id]
        assert (record.state, record.token_ids) == (State.FINISHED, fake_tokens(request)), record


@EVERY_POLICY
def test_a_crowd_is_served_with_the_right_tokens(name):
    w, requests = world(name), crowd(seed=8, count=25)
    w.add(*requests)
    w.run()
    right(w, *requests)


@EVERY_POLICY
def test_two_requests_that_together_need_more_pages_than_there_are_both_end(name):
    """Seven pages; A needs 4 and one more to go on, B needs 3 and one more."""
    w = world(name, num_pages=8)
    requests = ask(0, prompt=15, tokens=5), ask(1, prompt=11, tokens=5)
    w.add(*requests)
    w.run()
    right(w, *requests)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(FACTORIES)),
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8), st.floats(0, 0.2)), min_size=1, max_size=8),
)
def test_whatever_fits_alone_is_served_in_any_company(name, sizes):
    w = world(name, num_pages=8)  # 28 tokens
    requests = [ask(n, prompt, tokens, at_s) for n, (prompt, tokens, at_s) in enumerate(sizes)]
    w.add(*requests)
    w.run()
    right(w, *requests)


@pytest.mark.parametrize("name", APART)
def test_while_the_decode_side_is_full_requests_wait_and_nothing_raises(name):
    decode = spec(1, Role.DECODE, max_rows=1, num_pages=17, max_model_len=64)
    w = World([spec(0, Role.PREFILL), decode], policy(name))
    requests = [ask(n, prompt=9, tokens=12) for n in range(6)]
    w.add(*requests)
    most = 0
    while w.step():
        lane = w.controller.books.instances[1]
        most = max(most, lane.rows + lane.incoming)
        lane.pool.check()
    assert most == 1
    right(w, *requests)


@pytest.mark.parametrize("name", APART)
def test_a_request_that_just_fits_is_let_in(name):
    """16 prompt tokens and the first answer need 5 pages, and there are 5."""
    decode = spec(1, Role.DECODE, num_pages=6, max_model_len=20)
    w = World([spec(0, Role.PREFILL), decode], policy(name))
    w.add(ask(0, prompt=16, tokens=4))
    w.run()
    right(w, ask(0, prompt=16, tokens=4))


@EVERY_POLICY
def test_a_stream_of_long_prompts_never_stops_a_running_row_for_more_than_five_passes(name):
    w = world(name, num_pages=257)
    w.add(ask(0, prompt=2, tokens=20), *(ask(i, prompt=60, tokens=2, at_s=0.01 * i) for i in range(1, 15)))
    collected = w.run()
    where = collected.records[0].decode_instance
    passes = [record for record in collected.iterations if record.instance == where]
    steps = [number for number, record in enumerate(passes) if record.rows]
    assert max(late - early for early, late in itertools.pairwise(steps)) <= 5


@EVERY_POLICY
def test_the_same_policy_can_serve_one_run_after_another(name):
    requests = crowd(seed=2, count=12)
    first = world(name)
    first.add(*requests)
    first.run()
    again = World(first.cluster.specs, first.controller._scheduler)
    again.add(*requests)
    again.run()
    right(again, *requests)


@EVERY_POLICY
def test_every_placement_has_a_reason(name):
    w = world(name)
    w.add(*crowd(seed=5, count=10))
    assert all(record.reason for record in w.run().records.values())


@settings(deadline=None, derandomize=True)
@given(tokens=st.integers(0, 10_000), size=st.integers(1, 128))
def test_pages_for_tokens_are_never_negative_and_just_enough(tokens, size):
    pages = spec(0, Role.DECODE, page_size=size).pages_for(tokens)
    assert pages >= 0 and tokens <= pages * size < tokens + size
