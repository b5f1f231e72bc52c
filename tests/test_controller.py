"""The controller on the simulated cluster: each test one rule, with tokens that prove which pages were used."""

import pytest

from pdjax.controller import MAX_FAILURES, STALL_S
from pdjax.latency import LatencyModel
from pdjax.messages import (
    Abort,
    AbortTransfer,
    Iteration,
    Role,
    StartTransfer,
    TransferAborted,
    TransferDone,
)
from pdjax.request import State
from pdjax.schedulers import Colocated, Disaggregated, Place, Plan, Wait
from pdjax.testing import World, fake_tokens, spec
from tests.worlds import POLICIES, ask, break_transfers, crowd, policy, run_until, specs

EVERY_POLICY = pytest.mark.parametrize("name", POLICIES)


def world(name: str, **changes: int) -> World:
    return World(specs(name, **changes), policy(name))


def watch(w: World) -> list:
    """Every command from now on, as submitted."""
    seen, submit = [], w.cluster.submit

    def spy(command):
        seen.append(command)
        submit(command)

    w.cluster.submit = spy
    return seen


@EVERY_POLICY
def test_every_policy_gives_the_tokens_of_the_context(name):
    w = world(name)
    requests = crowd(seed=1, count=30)
    w.add(*requests)
    records = w.run().records
    assert {r.id: records[r.id].token_ids for r in requests} == {r.id: fake_tokens(r) for r in requests}


@EVERY_POLICY
def test_scarce_pages_preempt_and_change_no_token(name):
    w = world(name, num_pages=26)
    requests = crowd(seed=2, count=30)
    w.add(*requests)
    records = w.run().records
    assert sum(record.preemptions for record in records.values()) > 0
    assert {r.id: records[r.id].token_ids for r in requests} == {r.id: fake_tokens(r) for r in requests}


@EVERY_POLICY
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_max_tokens_is_exact(name, tokens):
    w = world(name)
    w.add(ask(0, tokens=tokens))
    record = w.run().records[0]
    assert (len(record.token_ids), record.finish_reason) == (tokens, "length")


@pytest.mark.parametrize("name", ["pull", "stream"])
def test_a_single_token_needs_no_transfer_and_no_decode_instance(name):
    w = world(name)
    w.add(ask(0, tokens=1))
    seen = watch(w)
    w.run()
    assert {command.instance for command in seen} == {0}


def test_a_stop_on_the_first_token_ends_on_the_prefill_side():
    first = fake_tokens(ask(0))[0]
    w = world("pull")
    w.add(ask(0, stops=frozenset({first})))
    collected = w.run()
    assert collected.records[0].finish_reason == "stop"
    assert collected.records[0].token_ids == (first,)
    assert collected.transfers == []


@pytest.mark.parametrize("name", ["pull", "stream"])
def test_the_first_token_leaves_before_the_transfer_ends(name):
    w = world(name)
    w.add(ask(0))
    timeline = w.run().records[0].timeline
    assert timeline.first_token_s < timeline.transfer_end_s <= timeline.decode_start_s


def test_streamed_kv_overlaps_the_prefill_of_later_chunks():
    w = world("stream")
    w.add(ask(0, prompt=60))
    timeline = w.run().records[0].timeline
    assert timeline.transfer_start_s < timeline.prefill_end_s
    assert timeline.transfer_hidden_s > 0


def test_a_stop_is_seen_one_step_late_and_the_extra_token_dropped():
    want = fake_tokens(ask(0, tokens=10))
    stop = want[4]
    assert stop not in want[:4]
    w = world("colocated")
    w.add(ask(0, tokens=10, stops=frozenset({stop})))
    collected = w.run()
    assert collected.tokens[0] == list(want[:5])
    assert sum(record.rows for record in collected.iterations) == 5  # four that count and the extra one


def test_pages_of_a_stopped_row_stay_until_the_step_in_flight_is_done():
    stop = fake_tokens(ask(0, tokens=10))[4]
    w = world("colocated")
    w.add(ask(0, tokens=10, stops=frozenset({stop})))
    run_until(w, lambda: 0 in w.collected.records)
    lane = w.controller.books.instances[0]
    assert lane.in_flight and lane.free_pages < lane.spec.usable_pages
    w.run()


def test_an_ended_row_that_reached_max_tokens_makes_no_extra_step():
    w = world("colocated")
    w.add(ask(0, tokens=6))
    collected = w.run()
    assert sum(record.rows for record in collected.iterations) == 5


def test_never_more_iterations_in_flight_than_the_instance_takes():
    w = World([spec(0, Role.MIXED, max_in_flight=2)], Colocated())
    w.add(*crowd(seed=3, count=10))
    deepest = 0
    while w.step():
        deepest = max(deepest, len(w.controller.books.instances[0].in_flight))
    assert deepest == 2


def test_an_unchanged_batch_is_not_sent_again():
    w = World([spec(0, Role.MIXED, page_size=64)], Colocated())
    w.add(ask(0, tokens=20))
    seen = watch(w)
    w.run()
    steps = [command for command in seen if isinstance(command, Iteration) and command.decode]
    assert [bool(step.joins or step.leaves or step.grows) for step in steps] == [True] + [False] * 18


def test_a_request_that_holds_kv_is_never_stuck_behind_one_that_holds_none():
    """Seven pages; A needs 4 and one more to go on, B needs 3 and one more: both must end."""
    w = World([spec(0, Role.MIXED, num_pages=8)], Colocated())
    w.add(ask(0, prompt=15, tokens=5), ask(1, prompt=11, tokens=5))
    records = w.run().records
    assert [records[i].token_ids for i in (0, 1)] == [fake_tokens(ask(0, 15, 5)), fake_tokens(ask(1, 11, 5))]
    assert records[0].preemptions == 0 and records[1].preemptions > 0  # the latest arrival gives way


def test_every_preemption_raises_the_number_of_free_pages():
    w = world("colocated", num_pages=26)
    w.add(*crowd(seed=4, count=30))
    preempted = 0
    while w.step():
        for live in w.controller.books.live.values():
            if live.preemptions and live.state is State.WAITING:
                preempted += 1
                assert not any(lane.pool.pages(live.id) for lane in w.controller.books.instances)
    assert preempted


def test_kv_waits_on_the_prefill_side_until_decode_has_room():
    w = World([spec(0, Role.PREFILL), spec(1, Role.DECODE, max_rows=1)], Disaggregated())
    w.add(ask(0, tokens=20), ask(1, tokens=3))
    run_until(w, lambda: [live.id for live in w.controller.books.held] == [1])
    assert w.controller.books.instances[0].pool.pages(1)
    assert [w.run().records[i].finish_reason for i in (0, 1)] == ["length", "length"]


def test_a_prompt_computed_elsewhere_is_not_computed_again():
    w = world("pull")
    w.add(ask(0, prompt=30))
    collected = w.run()
    assert [record.chunk_tokens for record in collected.iterations if record.instance == 1] == [0, 0, 0]


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("name", ["chunked", "pull", "stream"])
def test_lengths_at_the_edges_of_pages_and_chunks(name, prompt):
    w = world(name)
    w.add(ask(0, prompt=prompt, tokens=9))
    assert w.run().records[0].token_ids == fake_tokens(ask(0, prompt=prompt, tokens=9))


# --- aborts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pull", "stream"])
@pytest.mark.parametrize("state", [State.WAITING, State.PREFILLING, State.MIGRATING, State.DECODING])
def test_an_abort_in_any_state_frees_everything_and_disturbs_nobody(name, state):
    w = world(name)
    others = crowd(seed=5, count=12)
    w.add(*others, ask(99, prompt=60, tokens=30, at_s=0.25))
    run_until(w, lambda: 99 in w.controller.books.live and w.controller.books.live[99].state is state)
    w.cluster.post(Abort(99))
    records = w.run().records
    assert records[99].state is State.ABORTED
    assert {r.id: records[r.id].token_ids for r in others} == {r.id: fake_tokens(r) for r in others}


def test_an_abort_after_the_end_does_nothing():
    w = world("colocated")
    w.add(ask(0))
    w.cluster.post(Abort(0), at_s=5.0)
    assert w.run().records[0].state is State.FINISHED


def test_pages_of_an_aborted_transfer_are_quarantined_until_the_acknowledgement():
    w = world("pull")
    w.add(ask(0))
    run_until(w, lambda: any(live.transfer for live in w.controller.books.live.values()))
    key = w.controller.books.live[0].transfer
    commands = w.controller.handle(Abort(0), w.cluster.now())
    assert AbortTransfer(key) in commands
    assert all(lane.free_pages < lane.spec.usable_pages for lane in w.controller.books.instances)
    w.controller.handle(TransferAborted(key), w.cluster.now())
    assert all(lane.free_pages == lane.spec.usable_pages for lane in w.controller.books.instances)


def test_a_transfer_that_ends_before_its_abort_arrives_frees_once():
    w = world("pull")
    w.add(ask(0))
    run_until(w, lambda: any(live.transfer for live in w.controller.books.live.values()))
    key = w.controller.books.live[0].transfer
    w.controller.handle(Abort(0), w.cluster.now())
    w.controller.handle(TransferDone(key, 0, 0.0, 0.0), w.cluster.now())
    for lane in w.controller.books.instances:
        lane.pool.check()
        assert lane.free_pages == lane.spec.usable_pages
    assert w.controller.books.live == {}


# --- lost transfers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pull", "stream"])
def test_a_failed_transfer_costs_time_but_no_token_and_repeats_none(name):
    w = world(name)
    w.add(ask(0, prompt=20, tokens=8))
    break_transfers(w, 1)
    record = w.run().records[0]
    assert record.token_ids == fake_tokens(ask(0, prompt=20, tokens=8))
    assert record.restarts == 1


def test_a_transfer_that_always_fails_ends_the_request_with_the_reason():
    w = world("pull")
    w.add(ask(0, tokens=10))
    break_transfers(w, 1000)
    record = w.run().records[0]
    assert record.state is State.FAILED and record.restarts == MAX_FAILURES
    assert "the wire broke" in record.reason


def test_a_transfer_without_an_answer_is_given_up_at_its_deadline():
    w = World(specs("pull"), policy("pull"), transfer_timeout_s=2.0)
    w.add(ask(0))
    submit, lost = w.cluster.submit, []

    def wrapped(command):
        if isinstance(command, StartTransfer) and not lost:
            lost.append(command)
        elif isinstance(command, AbortTransfer) and command.key == lost[0].key:
            w.cluster.post(TransferAborted(command.key))
        else:
            submit(command)

    w.cluster.submit = wrapped
    record = w.run().records[0]
    assert record.token_ids == fake_tokens(ask(0)) and record.restarts == 1
    assert record.timeline.finished_s > 2.0


# --- decisions ------------------------------------------------------------------------------------------------------


def test_the_same_events_give_the_same_commands():
    w = world("dynamic_stream")
    w.add(*crowd(seed=7, count=20))
    log, handle = [], w.controller.handle

    def logged(event, now):
        commands = handle(event, now)
        log.append((event, now, list(commands)))
        return commands

    w.controller.handle = logged
    w.run()
    fresh = world("dynamic_stream").controller
    assert all(fresh.handle(event, now) == commands for event, now, commands in log)


def test_a_policy_that_names_no_instance_is_told_so():
    class Lost(Colocated):
        def place(self, ask, cluster):
            return Place(7, 7, "whole", "")

    w = World([spec(0, Role.MIXED)], Lost())
    w.add(ask(0))
    with pytest.raises(ValueError, match=r"Lost\.place named instance 7"):
        w.run()


@pytest.mark.parametrize("target", [-1, 7, "1"])
def test_a_hand_off_to_no_instance_is_told_so(target):
    class Odd(Disaggregated):
        def hand_off(self, ask, cluster):
            return target

    w = World(specs("pull"), Odd())
    w.add(ask(0))
    with pytest.raises(ValueError, match=r"Odd\.hand_off is .*; allowed: a living instance, or None"):
        w.run()


def test_a_plan_with_a_request_of_another_queue_is_told_so():
    class Thief(Disaggregated):
        def iterate(self, instance, cluster):
            return Plan(tuple((one, 1) for one in cluster.instances[0].prefills))

    w = World(specs("2p2d"), Thief())
    w.add(ask(0, prompt=9), ask(1, prompt=9))
    with pytest.raises(ValueError, match=r"Thief\.iterate: request \d is not in the queue it was shown"):
        w.run()


def test_a_policy_that_lets_requests_wait_for_ever_is_given_up():
    class Never(Colocated):
        def place(self, ask, cluster):
            return Wait("never")

    w = World([spec(0, Role.MIXED)], Never())
    w.add(ask(0))
    record = w.run().records[0]
    assert record.state is State.FAILED and "Never let it wait" in record.reason
    assert w.cluster.now() == STALL_S

    late = next(at_s for at_s in range(1, 1000) if (at_s / 7 + STALL_S) - at_s / 7 < STALL_S) / 7  # by rounding
    w = World([spec(0, Role.MIXED)], Never())
    w.add(ask(0, at_s=late))
    assert not all(w.step() for _ in range(9))


def test_the_marks_of_a_request_are_those_of_a_hand_made_clock():
    """An iteration takes 1 s, a transfer 0.25 s + 1 s per 1000 bytes (one token)."""
    latency = LatencyModel((1.0, 0, 0, 0, 0, 0), transfer_alpha_s=0.25, transfer_bytes_per_s=1000.0)
    w = World(specs("pull"), policy("pull"), latency)
    w.add(ask(0, prompt=2, tokens=3, at_s=10.0))
    timeline = w.run().records[0].timeline
    assert (timeline.arrival_s, timeline.prefill_start_s, timeline.prefill_end_s) == (10.0, 10.0, 11.0)
    assert (timeline.transfer_start_s, timeline.transfer_end_s, timeline.transfer_bytes) == (11.0, 13.25, 2000)
    assert (timeline.decode_start_s, timeline.token_s) == (13.25, [11.0, 14.25, 15.25])
