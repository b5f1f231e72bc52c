"""Runs: one iteration for many decode steps gives the timeline of one iteration for every step."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.latency import LatencyModel
from pdjax.messages import Abort, Iteration, Role
from pdjax.request import Request, SamplingParams, State
from pdjax.schedulers import ChunkedColocated, Colocated, Disaggregated, Place, Plan, take_chunks
from pdjax.schedulers.dynamic import Dynamic
from pdjax.simulated import Timing
from pdjax.testing import World, spec

LATENCY = LatencyModel((1.03e-3, 1.7e-4, 1.1e-7, 2.3e-4, 1.3e-6, 1.9e-6), 1.1e-3, 1.3e7)
POLICIES = {
    "colocated": (Colocated, (Role.MIXED, Role.MIXED)),
    "chunked": (ChunkedColocated, (Role.MIXED, Role.MIXED)),
    "streamed": (lambda: Disaggregated(1), (Role.PREFILL, Role.DECODE, Role.DECODE)),
    "pulled": (Disaggregated, (Role.PREFILL, Role.DECODE)),
    "dynamic": (lambda: Dynamic(8), (Role.PREFILL, Role.DECODE, Role.DECODE)),
}


def play(
    policy, max_steps, seed, *, pages=65, in_flight=2, rate=40.0, aborts=0.0, lost=False, requests=25, pp=1, late_s=0.0
):
    """The records of a random workload, and how many iterations were issued."""
    make, roles = POLICIES[policy]
    specs = [spec(i, role, num_pages=pages, max_in_flight=in_flight, pp=pp) for i, role in enumerate(roles)]
    latency = dataclasses.replace(LATENCY, reporting=late_s)
    world = World(specs, make(), latency, machine=lambda _: Timing(), max_steps=max_steps)
    rng, time_s, issued = random.Random(seed), 0.0, 0
    for number in range(requests):
        time_s += rng.expovariate(rate)
        tokens = rng.randint(1, 40)
        deadline = time_s + rng.uniform(0.01, 1.0) if rng.random() < aborts else None
        sampling = SamplingParams(max_tokens=rng.randint(1, 120))
        world.add(Request(number, tuple(range(tokens)), sampling, arrival_s=time_s, deadline_s=deadline))
        if rng.random() < aborts:
            world.cluster.post(Abort(number), time_s + rng.expovariate(5.0))
    if lost:
        world.cluster.lose(len(specs) - 1, "gone", rng.uniform(0.1, 0.6))
    submit = world.cluster.submit

    def count(command):
        nonlocal issued
        issued += isinstance(command, Iteration)
        submit(command)

    world.cluster.submit = count
    return world.run().records, issued


def same(policy, seed, **changes):
    one, steps = play(policy, 1, seed, **changes)
    many, runs = play(policy, 10**6, seed, **changes)
    assert {number: dataclasses.asdict(record) for number, record in one.items()} == {
        number: dataclasses.asdict(record) for number, record in many.items()
    }
    assert runs <= steps
    return one, steps, runs


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6), in_flight=st.integers(1, 4), rate=st.sampled_from([5.0, 40.0, 400.0]))
def test_runs_give_the_timeline_of_single_steps(policy, seed, in_flight, rate):
    same(policy, seed, in_flight=in_flight, rate=rate)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10**6), pp=st.integers(2, 3), rate=st.sampled_from([40.0, 400.0]))
def test_runs_give_the_timeline_of_single_steps_in_a_pipeline_of_stages(policy, seed, pp, rate):
    same(policy, seed, pp=pp, in_flight=pp + 1, rate=rate)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10**6), pages=st.sampled_from([65, 66, 80]))
def test_aborts_deadlines_and_full_pools_in_the_middle_of_a_run_change_nothing(policy, seed, pages):
    same(policy, seed, pages=pages, rate=200.0, aborts=0.4)


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_lost_instance_in_the_middle_of_a_run_changes_nothing(seed):
    same("streamed", seed, lost=True)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    in_flight=st.integers(1, 4),
    max_steps=st.sampled_from([1, 10**6]),
    late_s=st.sampled_from([1e-4, 2e-3, 3e-2]),
    aborts=st.sampled_from([0.0, 0.4]),
)
def test_passes_that_are_heard_of_late_lose_no_request_and_no_token(policy, seed, in_flight, max_steps, late_s, aborts):
    records, _ = play(policy, max_steps, seed, in_flight=in_flight, late_s=late_s, aborts=aborts)
    assert len(records) == 25
    for record in records.values():
        marks = record.timeline.token_s
        assert list(marks) == sorted(marks) and len(marks) == len(record.token_ids)
        assert record.state is State.FINISHED or aborts


def test_the_loss_of_an_instance_finds_requests_that_are_about_to_wait_again():
    specs = [spec(index, Role.MIXED, num_pages=17, max_model_len=64) for index in range(2)]
    for lost_s in [number * 5e-3 for number in range(25, 40)]:  # while rows are being preempted
        world = World(specs, Colocated(), machine=lambda _: Timing())
        world.add(*(Request(number, (5,) * 20, SamplingParams(max_tokens=40)) for number in range(12)))
        world.cluster.lose(0, "gone", lost_s)
        while world.step():
            pass
        assert all(len(record.token_ids) == 40 for record in world.collected.records.values()), lost_s


def test_a_quiet_batch_takes_far_fewer_iterations():
    _, steps, runs = same("pulled", 1, requests=4, rate=1.0)
    assert runs < steps / 8


def test_rows_are_preempted_and_finish_alike():
    records, *_ = same("colocated", 3, pages=65, rate=1000.0, requests=60)
    assert sum(record.preemptions for record in records.values()) > 0
    assert {record.state for record in records.values()} == {State.FINISHED}


class Polite:
    """Rows of instance 1 stand still while prompts wait on instance 0: what it answers hangs on another instance."""

    def place(self, ask, cluster):
        index = 0 if ask.id else 1
        return Place(index, index, "whole", "")

    def hand_off(self, ask, cluster):
        return None

    def iterate(self, instance, cluster):
        chunks = take_chunks(instance, 16)
        still = instance.spec.index == 1 and cluster.instances[0].pending_tokens > 0
        return Plan(chunks, decode=instance.rows > 0 and not still)


def test_a_policy_that_does_not_call_itself_steady_is_asked_at_every_step():
    def ends(max_steps):
        specs = [spec(0, Role.MIXED), spec(1, Role.MIXED)]
        world = World(specs, Polite(), machine=lambda _: Timing(), max_steps=max_steps)
        world.add(Request(0, (5,) * 4, SamplingParams(max_tokens=100)))
        world.add(*(Request(n, (5,) * 200, SamplingParams(max_tokens=2), arrival_s=0.01) for n in (1, 2)))
        return [record.timeline.finished_s for record in world.run().records.values()]

    assert ends(1) == ends(4096)


def test_a_machine_that_computes_tokens_gets_no_runs():
    with pytest.raises(ValueError, match="max_steps is 64; allowed with a FakeMachine"):
        World([spec(0, Role.MIXED)], Colocated(), max_steps=64)
