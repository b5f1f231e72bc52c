"""Rows that move, roles that flip, requests that are dropped: each test one rule, on the simulated cluster."""

import dataclasses
import itertools

import pytest

from pdjax import metrics
from pdjax.messages import Abort, Role, StartTransfer
from pdjax.request import SLO, SLOClass, State
from pdjax.schedulers import Place, Reject, Wait
from pdjax.schedulers.base import Drop, Flip, Move, Traits
from pdjax.simulated import Timing
from pdjax.testing import FakeMachine, World, fake_tokens, spec
from tests.revisers import Local, Nomads, Scripted, moves, once, row_of
from tests.worlds import RoundRobin, ask, break_transfers, crowd, run_until

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


def world(policy, *roles, **changes):
    return World([spec(index, role, **changes) for index, role in enumerate(roles)], policy)


def live_of(w, number):
    return w.controller.books.live[number]


def draining(w, number):
    """Out of its batch, steps still in flight."""
    live = w.controller.books.live.get(number)
    return live is not None and live.state is State.DECODING and live.moving is not None


# --- moves --------------------------------------------------------------------------------------------------------


def test_a_moved_row_goes_on_with_the_tokens_of_its_context():
    w = world(Local(once(moves(0, 1, after=4))), M, M)
    w.add(ask(0, prompt=9, tokens=20))
    collected = w.run()
    record = collected.records[0]
    assert record.token_ids == fake_tokens(ask(0, prompt=9, tokens=20))
    assert (record.prefill_instance, record.decode_instance, len(record.moves), record.reason) == (0, 1, 1, "here")
    (move,), (transfer,) = collected.moves, collected.transfers
    assert (move.request_id, move.src, move.dst, move.reason) == ("0", 0, 1, "told to")
    assert transfer.started_s > move.time_s  # the steps in flight came first
    assert transfer.nbytes == (9 + 4) * 1000  # the prompt, 4 tokens, one that was in flight; less the last


def test_a_row_that_moves_is_seen_coming_until_it_is_there():
    seen = []

    def script(cluster):
        here, there = cluster.instances
        seen.append((here.rows, len(there.assigned), there.rows))
        return move(cluster)

    move = once(moves(0, 1, after=4))
    w = world(Local(script), M, M)
    w.add(ask(0, tokens=20))
    w.run()
    told = [views for views, _ in itertools.groupby(seen) if any(views)]
    assert told == [(1, 0, 0), (0, 1, 0), (0, 0, 1)]


def test_rows_that_wander_give_the_same_tokens():
    w = world(Nomads(), M, M, D)
    requests = crowd(seed=3, count=20)
    w.add(*requests)
    records = w.run().records
    assert {r.id: records[r.id].token_ids for r in requests} == {r.id: fake_tokens(r) for r in requests}
    assert max(len(record.moves) for record in records.values()) > 3


def test_scarce_pages_and_rows_that_wander_change_no_token():
    w = world(Nomads(2), M, M, num_pages=26)
    requests = crowd(seed=2, count=30)
    w.add(*requests)
    records = w.run().records
    assert {r.id: records[r.id].token_ids for r in requests} == {r.id: fake_tokens(r) for r in requests}
    assert sum(record.preemptions for record in records.values()) > 0


def test_counted_tokens_move_as_computed_ones_do():
    def ends(machine):
        w = World([spec(0, M), spec(1, M)], Nomads(), machine=machine)
        w.add(*(ask(number, prompt=9, tokens=25, at_s=number / 100) for number in range(6)))
        return [(r.timeline.token_s, r.timeline.decode_start_s, len(r.moves)) for r in w.run().records.values()]

    assert ends(lambda _: Timing()) == ends(FakeMachine)


def test_a_row_may_end_by_a_step_that_was_in_flight_when_it_was_to_move():
    stop = fake_tokens(ask(0, tokens=10))[4]
    w = world(Local(once(moves(0, 1, after=4))), M, M)
    w.add(ask(0, tokens=10, stops=frozenset({stop})))
    collected = w.run()
    assert collected.records[0].finish_reason == "stop" and len(collected.records[0].token_ids) == 5
    assert collected.transfers == [] and len(collected.moves) == 1


def test_two_full_instances_can_change_rows():
    def script(cluster):
        a, b = row_of(cluster, 0), row_of(cluster, 1)
        if a and b and (a[1], b[1]) == (0, 1) and min(a[0].generated, b[0].generated) >= 3:
            return [Move(a[0].ask, 1, ""), Move(b[0].ask, 0, "")]
        return []

    class Two(Local):
        def place(self, ask, cluster):
            return Place(ask.id, ask.id, "whole", "")

    w = world(Two(once(script)), M, M, num_pages=17, max_model_len=64)  # one row fills more than half
    requests = [ask(number, prompt=40, tokens=20) for number in range(2)]
    w.add(*requests)
    records = w.run().records
    assert {r.id: records[r.id].token_ids for r in requests} == {r.id: fake_tokens(r) for r in requests}
    assert w.controller.next_deadline() is None


def test_a_row_that_drains_stays_when_its_new_instance_is_lost():
    w = world(Local(once(moves(0, 1, after=4))), M, M)
    w.add(ask(0, tokens=20))
    run_until(w, lambda: draining(w, 0))
    w.cluster.lose(1, "gone", w.cluster.now())
    record = w.run().records[0]
    assert record.token_ids == fake_tokens(ask(0, tokens=20))
    assert (record.restarts, record.decode_instance) == (0, 0) and w.collected.transfers == []


def test_a_row_that_waits_for_room_stays_when_its_new_instance_is_lost():
    w = world(Local(once(moves(0, 1, after=4))), M, M)
    w.controller.books.instances[1].starved = True  # never has room
    w.add(ask(0, tokens=20), ask(1, tokens=40))
    run_until(w, lambda: 0 in w.controller.books.live and live_of(w, 0).state is State.MIGRATING)
    w.cluster.lose(1, "gone", w.cluster.now())
    record = w.run().records[0]
    assert record.token_ids == fake_tokens(ask(0, tokens=20)) and record.restarts == 0


def test_a_row_that_can_never_be_handed_off_goes_on_where_it_is():
    w = world(Local(once(moves(0, 1, after=4))), M, M)
    w.controller.books.instances[1].starved = True
    w.add(ask(0, tokens=20))
    record = w.run().records[0]
    assert record.token_ids == fake_tokens(ask(0, tokens=20))
    assert (record.restarts, record.preemptions, record.decode_instance) == (0, 0, 0)


def test_a_row_whose_old_instance_is_lost_starts_over():
    w = world(Local(once(moves(0, 1, after=4)), instance=0), M, M)
    w.add(ask(0, tokens=20))
    run_until(w, lambda: draining(w, 0))
    w.controller._scheduler._instance = 1
    w.cluster.lose(0, "gone", w.cluster.now())
    record = w.run().records[0]
    assert record.token_ids == fake_tokens(ask(0, tokens=20)) and record.restarts == 1


def test_a_move_that_breaks_is_computed_again():
    w = world(Local(once(moves(0, 1, after=4))), M, M)
    break_transfers(w, 1)
    w.add(ask(0, tokens=20))
    record = w.run().records[0]
    assert record.token_ids == fake_tokens(ask(0, tokens=20)) and record.restarts == 1


@pytest.mark.parametrize("when", ["draining", "transfer"])
def test_an_abort_of_a_moving_row_gives_everything_back(when):
    w = world(Local(once(moves(0, 1, after=4))), M, M)
    w.add(ask(0, tokens=20))
    run_until(w, lambda: draining(w, 0) if when == "draining" else bool(w.controller.books.transfers))
    w.cluster.post(Abort(0))
    record = w.run().records[0]  # which checks the pages
    assert record.state is State.ABORTED
    assert record.token_ids == fake_tokens(ask(0, tokens=20))[: len(record.token_ids)]
    assert (record.prefill_instance, record.decode_instance) in ((0, 0), (0, 1))


def test_the_parts_of_a_request_that_moves_add_up():
    w = world(Nomads(), P, D, D)
    w.add(*(ask(number, tokens=25) for number in range(3)))
    for record in w.run().records.values():
        assert len(record.moves) > 2
        parts = metrics.parts(record)
        assert sum(parts.values()) == pytest.approx(metrics.e2e_ms(record))
        assert 0 < parts["transfer"] < parts["decode"]  # its hand-off; waiting for a move is decoding
        transfers = [t for t in w.collected.transfers if t.request_id == record.request_id]
        assert record.timeline.transfer_bytes == sum(t.nbytes for t in transfers)


def test_a_policy_hears_whether_a_row_would_have_room():
    heard = []

    def script(cluster):
        found = row_of(cluster, 0)
        if found and found[0].generated >= 10:
            heard.append(cluster.instances[1].room_for(found[0].ask))
        return []

    w = World([spec(0, M), spec(1, M, num_pages=4)], Local(script))
    w.add(ask(0, prompt=4, tokens=12))  # 14 tokens: 4 pages of 4, instance 1 has 3
    w.run()
    assert heard and not any(heard)


# --- flips --------------------------------------------------------------------------------------------------------


def flips(instance, role, when=lambda cluster: True):
    return lambda cluster: [Flip(instance, role, "told to")] if when(cluster) else []


def test_an_instance_takes_its_new_role_when_its_rows_have_ended():
    busy = once(flips(2, P, lambda cluster: cluster.instances[2].rows > 0))
    w = world(Scripted(busy), P, D, D)
    requests = [ask(number, tokens=12) for number in range(4)]
    later = [ask(number, tokens=3, at_s=1.0) for number in range(4, 8)]
    w.add(*requests, *later)
    lane = w.controller.books.instances[2]
    run_until(w, lambda: lane.next_role is P)
    assert lane.role is D
    collected = w.run()
    (flip,) = collected.flips
    assert (flip.instance, flip.before, flip.after, flip.reason) == (2, D, P, "told to")
    on_it = [r for r in collected.records.values() if r.decode_instance == 2]
    assert flip.started_s < flip.finished_s == max(r.timeline.finished_s for r in on_it)
    assert {collected.records[r.id].prefill_instance for r in later} == {0, 2}
    assert {collected.records[r.id].decode_instance for r in later} == {1}
    assert all(collected.records[r.id].token_ids == fake_tokens(r) for r in [*requests, *later])


def test_a_prefill_instance_hands_off_all_it_has_begun_before_it_decodes():
    begun = once(flips(1, D, lambda cluster: any(ask.prefilled for ask in cluster.instances[1].prefills)))
    w = world(Scripted(begun), P, P, D)
    requests = [ask(number, prompt=60, tokens=5) for number in range(6)]
    w.add(*requests)
    collected = w.run()
    (flip,) = collected.flips
    from_it = [r for r in collected.records.values() if r.prefill_instance == 1]
    assert 0 < len(from_it) < 3  # the others were placed anew
    assert flip.finished_s == max(r.timeline.transfer_end_s for r in from_it)
    assert all(collected.records[r.id].token_ids == fake_tokens(r) for r in requests)


def test_a_mixed_role_is_taken_at_once():
    w = world(Scripted(once(flips(1, M, lambda cluster: cluster.instances[1].rows > 0))), P, D)
    w.add(*(ask(number) for number in range(3)))
    (flip,) = w.run().flips
    assert flip.started_s == flip.finished_s and w.controller.books.instances[1].role is M


def test_a_flip_back_cancels():
    script = once(flips(2, P, lambda c: c.instances[2].rows > 0), flips(2, D))
    w = world(Scripted(script), P, D, D)
    w.add(*(ask(number, tokens=12) for number in range(4)))
    assert w.run().flips == []
    lane = w.controller.books.instances[2]
    assert (lane.role, lane.next_role) == (D, None)


def test_a_row_that_moves_away_is_gone_before_its_instance_prefills():
    def script(cluster):
        found = row_of(cluster, 0)
        return [Move(found[0].ask, 2, ""), Flip(1, P, "")] if found and found[0].generated > 3 else []

    class There(Scripted):
        def hand_off(self, ask, cluster):
            return 1

    w = world(There(once(script)), P, D, D)
    w.add(ask(0, tokens=20))
    collected = w.run()
    (flip,), (_, move) = collected.flips, collected.transfers
    assert flip.finished_s <= move.finished_s and collected.records[0].token_ids == fake_tokens(ask(0, tokens=20))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_losing_an_instance_during_a_flip_strands_nobody(lost):
    w = world(Scripted(once(flips(2, P, lambda cluster: cluster.instances[2].rows > 0))), P, D, D)
    requests = crowd(seed=4, count=12)
    w.add(*requests)
    run_until(w, lambda: w.controller.books.flips)
    w.cluster.lose(lost, "gone", w.cluster.now())
    records = w.run().records
    assert all(records[r.id].token_ids == fake_tokens(r) for r in requests)
    assert len(w.collected.flips) == (lost != 2)


# --- drops and classes --------------------------------------------------------------------------------------------


def test_a_request_that_waits_is_dropped_from_the_queue_and_from_an_instance():
    def script(cluster):
        waits = [a for a in [*cluster.queue, *cluster.instances[0].prefills] if a.id in (2, 3) and not a.prefilled]
        return [Drop(a, "too late") for a in waits]

    class Last(Local):
        def place(self, ask, cluster):
            return Wait("no") if ask.id == 3 else super().place(ask, cluster)

    w = world(Last(script), M, max_chunks=1)
    w.add(*(ask(number, prompt=60) for number in range(4)))
    records = w.run().records
    assert [records[number].state for number in range(2)] == [State.FINISHED] * 2
    for number in (2, 3):
        record = records[number]
        assert (record.state, record.finish_reason, record.reason) == (State.REJECTED, "rejected", "dropped: too late")


def test_a_request_is_put_into_a_laxer_class():
    class Lax(RoundRobin):
        def place(self, ask, cluster):
            return Place(0, None, "whole", "", slo_class="batch")

    laxer = (SLOClass("normal", SLO(ttft_ms=500)), SLOClass("batch", SLO(ttft_ms=5000)))
    w = world(Lax(), P, D)
    w.add(dataclasses.replace(ask(0), slo=SLO(ttft_ms=50), slo_class="chat", laxer=laxer))
    record = w.run().records[0]
    assert (record.slo, record.slo_class, record.degraded_from) == (SLO(ttft_ms=5000), "batch", "chat")
    w.add(ask(1, at_s=w.cluster.now()))
    with pytest.raises(ValueError, match="slo_class of request 1 is 'batch'; allowed: none"):
        w.run()


# --- what is not there --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("revision", "says"),
    [
        (lambda c: Flip(7, P, ""), "instance 7"),
        (lambda c: Flip(0, P, ""), "that it does not have"),
        (lambda c: Flip(0, "decode", ""), "allowed: a pdjax.messages.Role"),
        (lambda c: Flip(0, D, ""), "can still prefill"),
        (lambda c: Flip(1, P, ""), "can still decode"),
        (lambda c: Move(row_of(c, 0)[0].ask, 1, ""), "moves request 0 to 1; allowed: another living instance"),
        (lambda c: Move(row_of(c, 0)[0].ask, True, ""), "moves request 0 to True"),
        (lambda c: Move(ask(5), 0, ""), "moves request 5; allowed: a row that runs"),
        (lambda c: Drop(row_of(c, 0)[0].ask, ""), "drops request 0; allowed: one that waits"),
        (lambda c: Reject(""), "allowed: Move, Flip, Drop"),
    ],
)
def test_a_revision_of_what_is_not_there_is_refused(revision, says):
    w = world(Scripted(once(lambda c: [revision(c)] if row_of(c, 0) else [])), P, D)
    w.add(ask(0, tokens=12))
    with pytest.raises(ValueError, match=says):
        w.run()


def test_a_policy_that_revises_is_not_steady():
    policy = Nomads()
    policy.traits = Traits(steady=True)
    with pytest.raises(ValueError, match=r"Nomads.traits: steady is True; allowed with a method revise: False"):
        world(policy, P, D)


def test_a_transfer_of_a_row_names_its_own_attempt():
    w = world(Nomads(), M, M)
    seen, submit = [], w.cluster.submit

    def spy(command):
        if isinstance(command, StartTransfer):
            seen.append((command.request, command.attempt))
        submit(command)

    w.cluster.submit = spy
    w.add(ask(0, tokens=25))
    w.run()
    assert len(seen) > 3 and len(set(seen)) == len(seen)
