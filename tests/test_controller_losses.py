"""Lost instances at any time, with a cluster that answers aborts late or reports broken transfers before the loss."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.controller import MAX_FAILURES
from pdjax.messages import (
    Abort,
    AbortTransfer,
    InstanceLost,
    IterationDone,
    Role,
    TransferAborted,
    TransferDone,
    TransferFailed,
)
from pdjax.request import State
from pdjax.schedulers import Colocated, Disaggregated, Dynamic, Place, decoders
from pdjax.testing import World, fake_tokens, spec
from tests.worlds import RoundRobin, ask, break_transfers, crowd, policy, run_until, specs

P, D = Role.PREFILL, Role.DECODE
ROLES = {"1P1D": (P, D), "2P1D": (P, P, D), "1P2D": (P, D, D), "2P2D": (P, P, D, D)}
POLICIES = {
    "pull": Disaggregated,
    "stream": lambda: Disaggregated(1),
    "dynamic": Dynamic,
    "dynamic_stream": lambda: Dynamic(1),
    "own": RoundRobin,
}


def answer_aborts_late(w: World, lag_s: float) -> None:
    """A transfer may still complete before its abort is heard."""
    submit = w.cluster.submit

    def wrapped(command):
        if isinstance(command, AbortTransfer):
            w.cluster._at(w.cluster.now() + lag_s, lambda: submit(command))
        else:
            submit(command)

    w.cluster.submit = wrapped


def break_transfers_of(w: World, instance: int, at_s: float) -> None:
    """Whoever exchanges KV with an instance sees that it is gone before its loss is reported."""

    def broken():
        for key, move in list(w.cluster._transfers.items()):
            if instance in (move.command.src, move.command.dst):
                del w.cluster._transfers[key]
                w.cluster.post(TransferFailed(key, "the other side is gone"))

    w.cluster._at(at_s, broken)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    roles=st.sampled_from(sorted(ROLES)),
    name=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 10_000),
    rows=st.sampled_from([1, 2, 8]),
    pages=st.sampled_from([24, 32, 65]),
    lag_s=st.sampled_from([0.0, 0.01, 0.2]),
    broken=st.booleans(),
    losses=st.permutations(range(4)),
    times=st.lists(st.floats(0, 1.0), min_size=1, max_size=3),
)
def test_while_an_instance_lives_every_request_is_served(roles, name, seed, rows, pages, lag_s, broken, losses, times):
    w = World([spec(i, r, max_rows=rows, num_pages=pages) for i, r in enumerate(ROLES[roles])], POLICIES[name]())
    requests = crowd(seed, count=12)
    w.add(*requests)
    lost = [index for index in losses if index < len(ROLES[roles])][: min(len(times), len(ROLES[roles]) - 1)]
    for index, at_s in zip(lost, times, strict=False):
        w.cluster.lose(index, "power", at_s)
        if broken:
            break_transfers_of(w, index, at_s - 1e-3)
    answer_aborts_late(w, lag_s)
    w.run()
    for request in requests:
        record = w.collected.records[request.id]
        assert (record.state, record.token_ids) == (State.FINISHED, fake_tokens(request)), record
        assert list(record.token_ids) == w.collected.tokens[request.id]
        assert record.restarts <= len(lost) * (1 + broken)


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_a_lost_instance_costs_time_but_no_answer(lost):
    w = World(specs("2p2d"), policy("2p2d"))
    requests = crowd(seed=6, count=20)
    w.add(*requests)
    w.cluster.lose(lost, "power", at_s=0.3)
    records = w.run().records
    assert {r.id: records[r.id].token_ids for r in requests} == {r.id: fake_tokens(r) for r in requests}
    assert sum(record.restarts for record in records.values()) > 0


@pytest.mark.parametrize("stream_from", [1, None])
def test_requests_bound_to_a_lost_instance_that_held_nothing_there_go_elsewhere(stream_from):
    w = World([spec(0, Role.PREFILL), spec(1, Role.DECODE), spec(2, Role.DECODE)], Disaggregated(stream_from))
    requests = [ask(i, prompt=40) for i in range(8)] + [ask(8, at_s=1.0)]
    w.add(*requests)
    w.cluster.lose(2, "power", at_s=0.002)
    records = w.run().records
    assert {r.id: records[r.id].token_ids for r in requests} == {r.id: fake_tokens(r) for r in requests}


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("name", ["pull", "stream", "dynamic", "dynamic_stream"])
def test_who_is_left_takes_over_the_role_of_the_lost(name, lost):
    w = World(specs(name), policy(name))
    requests = crowd(seed=6, count=20)
    w.add(*requests)
    for number, instance in enumerate({0} if lost == 0 else range(1, len(w.cluster.specs))):
        w.cluster.lose(instance, "power", at_s=0.2 + 0.1 * number)
    records = w.run().records
    assert {r.id: records[r.id].token_ids for r in requests} == {r.id: fake_tokens(r) for r in requests}
    left = {view.spec.index for view in w.controller.books.instances if view.alive}
    late = [record for record in records.values() if record.timeline.arrival_s > 0.35]
    assert late and all({record.prefill_instance, record.decode_instance} <= left for record in late)


def test_rows_of_other_instances_go_on_when_the_one_that_prefilled_them_is_lost():
    w = World(specs("stream"), policy("stream"))
    w.add(ask(0, tokens=60))
    w.cluster.lose(0, "power", at_s=0.1)
    record = w.run().records[0]
    assert record.timeline.decode_start_s < 0.1 < record.timeline.finished_s
    assert record.restarts == 0 and record.token_ids == fake_tokens(ask(0, tokens=60))


def test_kv_that_waits_on_the_last_instance_is_decoded_there():
    w = World([spec(0, Role.PREFILL), spec(1, Role.DECODE, max_rows=1)], Disaggregated())
    requests = [ask(0, tokens=60), ask(1, tokens=5)]
    w.add(*requests)
    w.cluster.lose(1, "power", at_s=0.1)
    records = w.run().records
    assert records[1].restarts == 0 and records[0].restarts == 1
    assert [records[i].token_ids for i in (0, 1)] == [fake_tokens(request) for request in requests]


def test_on_failure_fail_ends_what_was_on_a_lost_instance_and_nothing_else():
    w = World([spec(0, Role.PREFILL), spec(1, Role.DECODE), spec(2, Role.DECODE)], Disaggregated(), on_failure="fail")
    w.add(*(ask(i, tokens=60) for i in range(4)), ask(4, at_s=0.5))
    w.cluster.lose(1, "power", at_s=0.1)
    records = w.run().records
    failed = [record for record in records.values() if record.state is State.FAILED]
    assert len(failed) == 2 and all("instance 1 is lost: power" in record.reason for record in failed)
    assert records[4].state is State.FINISHED


def test_the_loss_of_the_last_instance_fails_what_is_live():
    w = World([spec(0, Role.MIXED)], Colocated())
    w.add(ask(0, tokens=30))
    w.cluster.lose(0, "power", at_s=0.01)
    while w.step():
        pass
    record = w.collected.records[0]
    assert record.state is State.FAILED and "power" in record.reason


def test_who_comes_after_the_last_instance_is_lost_fails_at_once_with_the_reason():
    w = World([spec(0, Role.MIXED)], Colocated())
    w.cluster.lose(0, "power", at_s=0.01)
    w.add(ask(0, at_s=1.0))
    record = w.run().records[0]
    assert record.state is State.FAILED and "instance 0, the last one, is lost: power" in record.reason
    assert record.timeline.finished_s == 1.0


def test_kv_that_fills_the_last_instance_gives_way_to_the_oldest():
    """Seven pages, all taken by prompts that wait for instance 1; each needs one more to be decoded here."""
    w = World([spec(0, P, num_pages=8), spec(1, D, max_rows=1, num_pages=8)], Disaggregated())
    requests = [ask(0, 4, 20), ask(1, 8, 6, at_s=0.01), ask(2, 8, 6, at_s=0.02), ask(3, 12, 6, at_s=0.03)]
    w.add(*requests)
    run_until(w, lambda: len(w.controller.books.held) == 3)
    assert w.controller.books.instances[0].free_pages == 0
    w.cluster.lose(1, "power", at_s=w.cluster.now())
    records = w.run().records
    assert {r.id: records[r.id].token_ids for r in requests} == {r.id: fake_tokens(r) for r in requests}
    assert [records[i].preemptions > 0 for i in (1, 3)] == [False, True]


def test_what_is_only_bound_to_a_lost_instance_does_not_fail_with_it():
    class Named(Disaggregated):
        def place(self, ask, cluster):
            return Place(0, min(view.spec.index for view in decoders(cluster.instances)), "whole", "named")

    w = World([spec(0, P), spec(1, D, max_rows=1), spec(2, D)], Named(), on_failure="fail")
    w.add(ask(0, tokens=60), ask(1, tokens=5))
    run_until(w, lambda: w.controller.books.held)
    w.cluster.lose(1, "power", at_s=w.cluster.now())
    records = w.run().records
    assert [records[i].state for i in (0, 1)] == [State.FAILED, State.FINISHED]
    assert records[1].token_ids == fake_tokens(ask(1, tokens=5))


def test_what_a_lost_instance_still_reports_is_dropped():
    w = World([spec(0, Role.MIXED), spec(1, Role.MIXED)], Colocated())
    w.add(ask(0, tokens=20))
    handle, late = w.controller.handle, []

    def keep(event, now):
        late.extend([event] if isinstance(event, IterationDone) and event.instance == 0 and len(late) < 3 else [])
        return handle(event, now)

    w.controller.handle = keep
    run_until(w, lambda: len(late) == 3)
    w.cluster.lose(0, "power", at_s=w.cluster.now())
    for event in (*late, InstanceLost(0, "again")):
        w.cluster.post(event)
    record = w.run().records[0]
    assert (record.token_ids, record.restarts) == (fake_tokens(ask(0, tokens=20)), 1)


def test_who_waits_for_an_iteration_of_a_lost_instance_is_free_at_once():
    w = World([spec(0, Role.MIXED), spec(1, Role.MIXED)], Colocated())
    w.add(ask(0, tokens=20))
    run_until(w, lambda: w.controller.books.instances[0].rows)
    w.controller.handle(Abort(0), w.cluster.now())
    assert w.controller.books.live
    w.controller.handle(InstanceLost(0, "power"), w.cluster.now())
    assert not w.controller.books.live


@pytest.mark.parametrize("first", [0, 1])
def test_the_loss_of_both_sides_of_a_transfer_waits_for_one_answer(first):
    w = World([spec(0, P), spec(1, D), spec(2, Role.MIXED)], Disaggregated())
    w.add(ask(0, tokens=20))
    run_until(w, lambda: w.controller.books.transfers)
    (key,) = w.controller.books.transfers
    commands = [w.controller.handle(InstanceLost(index, "power"), w.cluster.now()) for index in (first, 1 - first)]
    assert commands == [[AbortTransfer(key)], []]
    w.controller.handle(TransferAborted(key), w.cluster.now())
    assert [lane.free_pages for lane in w.controller.books.instances[:2]] == [64, 64]
    assert w.controller.books.live[0].restarts == 1 and w.controller.books.instances[2].in_flight


def test_a_transfer_that_commits_after_its_side_is_lost_only_frees():
    w = World([spec(0, P), spec(1, D), spec(2, D)], Disaggregated())
    w.add(ask(0, tokens=20))
    run_until(w, lambda: w.controller.books.transfers)
    (key,) = w.controller.books.transfers
    w.controller.handle(InstanceLost(1, "power"), w.cluster.now())
    w.controller.handle(TransferDone(key, 0, 0.0, 0.0), w.cluster.now())
    assert [lane.rows for lane in w.controller.books.instances] == [0, 0, 0]
    assert w.controller.books.live[0].state in (State.WAITING, State.PREFILLING)


def test_failures_of_transfers_before_a_loss_do_not_count_after_it():
    w = World([spec(0, P), spec(1, D), spec(2, D)], Disaggregated())
    w.add(ask(0))
    w.step()
    break_transfers(w, MAX_FAILURES + 1)
    run_until(w, lambda: w.controller.books.live[0].restarts == MAX_FAILURES)
    w.cluster.lose(2, "power", at_s=w.cluster.now())
    assert w.run().records[0].token_ids == fake_tokens(ask(0))
