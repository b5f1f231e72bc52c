"""The local cluster: real threads, fake executors, a wire that does what it is told (`tests.sites`). Nothing waits for
time: gates and fences order the threads, and every wait has a limit."""

import itertools
import threading

import pytest

from pdjax.controller import MAX_RESTARTS, Controller
from pdjax.latency import LatencyModel
from pdjax.local import ClusterFault
from pdjax.messages import (
    Abort,
    AbortTransfer,
    Arrival,
    IterationDone,
    Role,
    Tick,
    TransferAborted,
    TransferDone,
    TransferFailed,
)
from pdjax.request import State
from pdjax.testing import Collector, fake_next, fake_tokens, spec
from pdjax.transfer.base import TransferState, Unit
from tests.sites import LAYERS, WAIT_S, Site, move
from tests.worlds import POLICIES, ask, crowd, policy, specs


@pytest.fixture
def site():
    made = []

    def make(hold=False):
        made.append(Site([spec(0, Role.PREFILL), spec(1, Role.DECODE)], hold))
        return made[-1]

    yield make
    for one in made:
        one.cluster.close()
        assert not [lane for lane in one.cluster._lanes if lane.is_alive()]


PROMPT = tuple(range(10, 20))


def serve(site: Site, name: str, requests, abort=()) -> Collector:
    """Runs a controller on the cluster, as the engine's thread does, until all have ended and all pages are free.

    `abort`: ids that are aborted when their first token is out.
    """
    collected = Collector()
    models = [LatencyModel()] * len(site.executors)
    controller = Controller([executor.spec for executor in site.executors], policy(name), models, collected)
    for request in requests:
        site.cluster.post(Arrival(request))
    told = set()
    while len(collected.records) < len(requests) or controller.books.live:
        for command in controller.handle(site.event(), site.cluster.now()):
            site.cluster.submit(command)
        for number in set(abort) & set(collected.tokens) - told:
            told.add(number)
            site.cluster.post(Abort(number))
    assert [lane.free_pages for lane in controller.books.instances] == [
        executor.spec.usable_pages for executor in site.executors
    ]
    return collected


@pytest.fixture
def served():
    """`served(policy, requests, **)` on a fresh cluster: the records and the site."""
    sites = []

    def run(name, requests, fail_next=0, abort=(), **limits):
        sites.append(Site(specs(name, **limits)))
        sites[-1].wire.fail_next = fail_next
        return serve(sites[-1], name, requests, abort), sites[-1]

    yield run
    for one in sites:
        one.cluster.close()


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_threads_give_the_tokens_of_the_context(served, name):
    requests = crowd(seed=1, count=25)
    collected, _ = served(name, requests)
    assert {r.id: collected.records[r.id].token_ids for r in requests} == {r.id: fake_tokens(r) for r in requests}


@pytest.mark.parametrize("name", ["colocated", "stream", "dynamic_stream"])
def test_scarce_pages_preempt_and_change_no_token(served, name):
    requests = crowd(seed=2, count=25)
    collected, _ = served(name, requests, num_pages=26)
    assert {r.id: collected.records[r.id].token_ids for r in requests} == {r.id: fake_tokens(r) for r in requests}


@pytest.mark.parametrize("name", ["pull", "stream", "2p2d"])
def test_failed_transfers_cost_restarts_and_no_token(served, name):
    requests = crowd(seed=3, count=10)
    collected, _ = served(name, requests, fail_next=3)
    records = collected.records
    assert sum(record.restarts for record in records.values()) == 3
    assert {r.id: records[r.id].token_ids for r in requests} == {r.id: fake_tokens(r) for r in requests}


def test_a_wire_that_always_breaks_ends_the_request_with_the_reason(served):
    collected, _ = served("pull", [ask(0, tokens=10)], fail_next=100)
    record = collected.records[0]
    assert record.state is State.FAILED and record.restarts == MAX_RESTARTS + 1
    assert "the wire broke" in record.reason


@pytest.mark.parametrize("name", ["pull", "stream"])
def test_aborts_in_the_middle_leave_the_other_tokens_alone(served, name):
    requests = crowd(seed=4, count=20)
    collected, _ = served(name, requests, abort=range(0, 20, 3))
    for request in requests:
        tokens = collected.records[request.id].token_ids
        assert tokens == fake_tokens(request)[: len(tokens)]
        assert request.id % 3 == 0 or tokens == fake_tokens(request)


# --- order ----------------------------------------------------------------------------------------------------------


def test_commands_of_an_instance_keep_their_order(site):
    s = site()
    for number in range(1, 101):
        s.cluster.submit(s.prefill(PROMPT, number=number))
    assert [event.number for event in s.events(100)] == list(range(1, 101))
    assert [number for what, number in s.executors[0].log if what == "run"] == list(range(1, 101))


def test_tokens_are_not_read_while_an_iteration_can_be_dispatched(site):
    s, submitted = site(), threading.Event()
    s.executors[0].before = lambda what: what != "run" or submitted.wait(WAIT_S)
    s.cluster.submit(s.prefill(PROMPT, number=1))
    s.cluster.submit(s.prefill(PROMPT, number=2))
    submitted.set()
    s.events(2)
    assert s.executors[0].log == [("run", 1), ("run", 2), ("wait", 1), ("wait", 2)]


def test_tokens_are_read_when_nothing_is_left_to_dispatch(site):
    s = site()
    s.cluster.submit(s.prefill(PROMPT))
    event = s.event()
    assert isinstance(event, IterationDone) and event.firsts == ((7, fake_next(PROMPT)),)


def test_iterations_of_an_instance_do_not_overlap_in_time(site):
    s, submitted = site(), threading.Event()
    s.executors[0].before = lambda what: what != "run" or submitted.wait(WAIT_S)
    for number in range(1, 5):
        s.cluster.submit(s.prefill(PROMPT, number=number))
    submitted.set()
    done = s.events(4)
    assert all(event.started_s <= event.finished_s for event in done)
    assert all(a.finished_s <= b.started_s for a, b in itertools.pairwise(done))


# --- transfers ------------------------------------------------------------------------------------------------------


def test_a_whole_transfer_moves_every_token(site):
    s = site()
    s.cluster.submit(s.prefill(PROMPT))
    s.cluster.submit(move())
    done = next(event for event in s.events(2) if isinstance(event, TransferDone))
    assert s.executors[1].machine.read((5, 6, 7, 8), 10) == list(PROMPT)
    assert done.nbytes == 10 * LAYERS * 2 * 4
    assert done.busy_s == 1.0 * 2 * LAYERS  # the wire says that every unit took a second
    assert s.wire.states[1] is TransferState.COMMITTED


def test_a_streamed_transfer_is_done_when_every_layer_of_every_token_is_in(site):
    s = site(hold=True)
    s.cluster.submit(move(mode="stream"))
    s.cluster.submit(s.prefill(PROMPT, stream=1))
    assert isinstance(s.event(), IterationDone)
    assert [u.header.layer for u in s.wire.kept] == [0, 1]
    s.wire.deliver(s.wire.kept[0])
    assert s.fence() == []
    s.wire.deliver(s.wire.kept[1])
    assert isinstance(s.event(), TransferDone)
    assert s.executors[1].machine.read((5, 6, 7, 8), 10) == list(PROMPT)


def test_bytes_that_move_before_the_prompt_is_computed_are_hidden(site):
    s, computed = site(), threading.Event()
    s.executors[0].before = lambda what: what != "wait" or computed.wait(WAIT_S)
    s.cluster.submit(move(mode="stream"))
    s.cluster.submit(s.prefill(PROMPT, stream=1))
    done = s.event()
    computed.set()
    assert isinstance(done, TransferDone) and done.hidden_s == done.busy_s > 0


def test_bytes_of_a_whole_transfer_are_not_hidden(site):
    s = site(hold=True)
    s.cluster.submit(s.prefill(PROMPT))
    s.cluster.submit(move())
    assert isinstance(s.event(), IterationDone)
    late = s.cluster.now() + 1
    for one in s.wire.kept:
        s.wire.deliver(Unit(one.header, one.kv, (late, late + 1)))
    done = s.event()
    assert isinstance(done, TransferDone) and done.hidden_s == 0


def test_a_failed_transfer_is_answered_once_and_touches_nothing_more(site):
    s = site(hold=True)
    s.cluster.submit(s.prefill(PROMPT))
    s.cluster.submit(move())
    s.fence()
    s.wire.fail(1, "no route")
    s.cluster.submit(AbortTransfer(1))
    assert s.fence() == [TransferFailed(1, "no route")]
    for one in s.wire.kept:
        s.wire.deliver(one)
    s.fence()
    assert s.executors[1].count("insert") == 0


# --- aborts ---------------------------------------------------------------------------------------------------------


def test_units_that_wait_in_the_lane_when_the_abort_comes_are_not_inserted(site):
    s, gate, inside = site(hold=True), threading.Event(), threading.Event()
    s.cluster.submit(s.prefill(PROMPT))
    s.cluster.submit(move())
    s.fence()

    def block(what):
        if what == "insert":
            inside.set()
            assert gate.wait(WAIT_S)

    s.executors[1].before = block
    for one in s.wire.kept:
        s.wire.deliver(one)
    assert inside.wait(WAIT_S)
    s.cluster.submit(AbortTransfer(1))
    assert s.cluster.next_event(0) is None, "acknowledged while a unit was being inserted"
    gate.set()
    assert s.fence() == [TransferAborted(1)]
    assert s.executors[1].count("insert") == 1


def test_an_abort_waits_for_the_source_to_have_stopped_reading(site):
    s, gate, inside = site(hold=True), threading.Event(), threading.Event()

    def block(what):
        if what == "extract":
            inside.set()
            assert gate.wait(WAIT_S)

    s.executors[0].before = block
    s.cluster.submit(s.prefill(PROMPT))
    s.cluster.submit(move())
    assert inside.wait(WAIT_S)
    s.cluster.submit(AbortTransfer(1))
    assert s.cluster.next_event(0) is None, "acknowledged while the source was reading"
    gate.set()
    assert TransferAborted(1) in s.fence()


def test_a_transfer_aborted_before_its_turn_reads_nothing(site):
    s, gate = site(), threading.Event()
    s.executors[0].before = lambda what: what != "run" or gate.wait(WAIT_S)
    s.cluster.submit(s.prefill(PROMPT))
    s.cluster.submit(move())
    s.cluster.submit(AbortTransfer(1))
    gate.set()
    assert TransferAborted(1) in s.fence()
    assert s.executors[0].count("extract") == 0


def test_an_abort_of_what_has_ended_or_never_was_is_not_answered_again(site):
    s = site()
    s.cluster.submit(s.prefill(PROMPT))
    s.cluster.submit(move())
    s.events(2)
    s.cluster.submit(AbortTransfer(1))
    s.cluster.submit(AbortTransfer(99))
    assert s.fence() == []


def test_an_abort_that_races_with_the_last_insert_has_exactly_one_answer(site):
    s = site(hold=True)
    s.cluster.submit(s.prefill(PROMPT))
    s.event()
    barrier, turns = threading.Barrier(2), 300
    last: list[Unit] = []

    def other():
        for _ in range(turns):
            barrier.wait(WAIT_S)  # both go
            s.wire.deliver(last[0])
            barrier.wait(WAIT_S)  # both are back

    thread = threading.Thread(target=other)
    thread.start()
    seen = set()
    for key in range(1, turns + 1):
        s.cluster.submit(move(key, tokens=4))
        assert s.fence() == []
        *first, last[:] = s.wire.kept[:-1], s.wire.kept[-1:]
        s.wire.kept = []
        for one in first[0]:
            s.wire.deliver(one)
        if key % 2:  # else the lane has work to do first
            s.fence()
        barrier.wait(WAIT_S)
        s.cluster.submit(AbortTransfer(key))
        barrier.wait(WAIT_S)
        (answer,) = s.fence()
        inserted = s.executors[1].count("insert")
        assert s.fence() == [] and s.executors[1].count("insert") == inserted
        assert answer.key == key
        done = isinstance(answer, TransferDone)
        assert done or isinstance(answer, TransferAborted)
        assert s.wire.states[key] is (TransferState.COMMITTED if done else TransferState.ABORTED)
        seen.add(type(answer))
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert TransferAborted in seen


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["run", "wait", "extract", "insert"])
def test_an_exception_in_a_lane_reaches_whoever_waits(site, where):
    s = site()

    def burst(what):
        if what == where:
            raise OSError(f"{where} burst")

    for executor in s.executors:
        executor.before = burst
    s.cluster.submit(s.prefill(PROMPT))
    s.cluster.submit(move())
    with pytest.raises(ClusterFault, match=f"OSError: {where} burst") as caught:
        s.events(3)
    assert isinstance(caught.value.__cause__, OSError)
    for again in (lambda: s.cluster.submit(s.prefill(PROMPT)), lambda: s.events(3)):
        with pytest.raises(ClusterFault, match=f"{where} burst"):
            again()


def test_an_exception_of_the_wire_reaches_whoever_waits(site):
    s = site()

    def send(unit):
        raise OSError("no such wire")

    s.wire.send = send
    s.cluster.submit(s.prefill(PROMPT))
    s.cluster.submit(move())
    with pytest.raises(ClusterFault, match="OSError: no such wire"):
        s.events(3)


def test_events_before_a_fault_are_not_lost(site):
    s = site()
    s.cluster.submit(s.prefill(PROMPT))
    s.cluster.post(Tick())
    assert {type(event) for event in s.events(2)} == {IterationDone, Tick}


def test_close_is_idempotent_and_ends_the_submitting(site):
    s = site()
    s.cluster.submit(s.prefill(PROMPT))
    s.cluster.close()
    s.cluster.close()
    assert s.wire.closed
    with pytest.raises(RuntimeError, match="the cluster is closed"):
        s.cluster.submit(s.prefill(PROMPT))


def test_close_leaves_a_stuck_lane_behind_and_says_so(site, monkeypatch, caplog):
    monkeypatch.setattr("pdjax.local.CLOSE_S", 0.05)
    s, gate, inside = site(), threading.Event(), threading.Event()

    def block(what):
        inside.set()
        assert gate.wait(WAIT_S)

    s.executors[0].before = block
    s.cluster.submit(s.prefill(PROMPT))
    assert inside.wait(WAIT_S)
    s.cluster.close()
    assert "instance-0 still waits for its device" in caplog.text
    gate.set()
    s.cluster._lanes[0].join(WAIT_S)


def test_without_an_event_the_limit_ends_the_wait(site):
    assert site().cluster.next_event(0.01) is None
