"""The local cluster: real threads, fake executors, a wire that does what it is told (`tests.sites`). Nothing waits for
time: gates and fences order the threads, and every wait has a limit."""

import itertools
import sys
import threading

import pytest

from pdjax.local import ClusterFault
from pdjax.messages import (
    AbortTransfer,
    IterationDone,
    Role,
    Tick,
    TransferAborted,
    TransferDone,
    TransferFailed,
)
from pdjax.testing import fake_next, spec
from pdjax.transfer.base import TransferState, Unit
from tests.sites import LAYERS, WAIT_S, Site, move


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


# --- order ----------------------------------------------------------------------------------------------------------


def test_commands_of_an_instance_keep_their_order(site):
    s = site()
    for number in range(1, 101):
        s.cluster.submit(s.prefill(PROMPT, number=number))
    assert [event.number for event in s.events(100)] == list(range(1, 101))
    assert [number for what, number in s.executors[0].log if what == "run"] == list(range(1, 101))


def test_an_iteration_is_dispatched_while_the_one_before_is_waited_for(site):
    s, waiting, dispatched = site(), threading.Event(), threading.Event()

    def before(what):
        if s.executors[0].log[-1] == ("wait", 1):
            waiting.set()
            assert dispatched.wait(WAIT_S), "the second was not dispatched"
        elif s.executors[0].log[-1] == ("run", 2):
            dispatched.set()

    s.executors[0].before = before
    s.cluster.submit(s.prefill(PROMPT, number=1))
    assert waiting.wait(WAIT_S)
    s.cluster.submit(s.prefill(PROMPT, number=2))
    assert [event.number for event in s.events(2)] == [1, 2]


def test_tokens_are_read_without_anything_behind_them(site):
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
    assert done.nbytes == 10 * LAYERS * 2 * 2 * 4  # K and V of two heads
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
    s.prefilled(PROMPT)
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
    s.prefilled(PROMPT)
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
    s.prefilled(PROMPT)
    s.cluster.submit(move())
    assert inside.wait(WAIT_S)
    s.cluster.submit(AbortTransfer(1))
    assert s.cluster.next_event(0) is None, "acknowledged while the source was reading"
    gate.set()
    assert TransferAborted(1) in s.fence()


def test_a_transfer_aborted_before_its_turn_sends_nothing(site):
    s, gate = site(hold=True), threading.Event()
    s.executors[0].before = lambda what: what != "run" or gate.wait(WAIT_S)
    s.cluster.submit(s.prefill(PROMPT))
    s.cluster.submit(move())
    s.cluster.submit(AbortTransfer(1))
    gate.set()
    assert TransferAborted(1) in s.fence()
    assert s.wire.kept == []


def test_an_abort_of_what_has_ended_or_never_was_is_not_answered_again(site):
    s = site()
    s.cluster.submit(s.prefill(PROMPT))
    s.cluster.submit(move())
    s.events(2)
    s.cluster.submit(AbortTransfer(1))
    s.cluster.submit(AbortTransfer(99))
    assert s.fence() == []


@pytest.fixture
def restless():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_an_abort_that_races_with_the_last_insert_has_exactly_one_answer(site, restless):
    s, barrier = site(hold=True), threading.Barrier(2)
    s.cluster.submit(s.prefill(PROMPT))
    s.event()

    def meet(what):
        if what == "insert" and s.executors[1].count("insert") % LAYERS == 0:
            barrier.wait(WAIT_S)

    s.executors[1].before = meet
    for key in range(1, 401):
        s.cluster.submit(move(key, tokens=4))  # one unit a layer
        assert s.fence() == []
        for one in s.wire.kept:
            s.wire.deliver(one)
        s.wire.kept = []
        barrier.wait(WAIT_S)  # the lane is at the last insert: both go
        s.cluster.submit(AbortTransfer(key))
        (answer,) = s.fence()
        done = isinstance(answer, TransferDone)
        assert answer.key == key and (done or isinstance(answer, TransferAborted))
        assert s.wire.states[key] is (TransferState.COMMITTED if done else TransferState.ABORTED)


class Gate:
    """Where a thread says that it has come, and waits to be let on."""

    def __init__(self):
        self.reached, self.on = threading.Event(), threading.Event()

    def __call__(self):
        self.reached.set()
        assert self.on.wait(WAIT_S)


def test_an_abort_cannot_come_between_the_last_insert_and_the_end(site, monkeypatch):
    s, gate = site(), Gate()
    finish = s.wire.finish
    monkeypatch.setattr(s.wire, "finish", lambda key: (gate(), finish(key)))
    s.prefilled(PROMPT)
    s.cluster.submit(move())
    assert gate.reached.wait(WAIT_S)
    aborting = threading.Thread(target=s.cluster.submit, args=(AbortTransfer(1),))
    aborting.start()
    aborting.join(0.05)  # it has to wait; if it did not, this is long enough to see it
    gate.on.set()
    aborting.join(WAIT_S)
    assert [type(event) for event in s.fence()] == [TransferDone]


def test_the_end_cannot_come_in_the_middle_of_an_abort(site, monkeypatch):
    s, inserting, aborted = site(), Gate(), Gate()
    abort = s.wire.abort
    monkeypatch.setattr(s.wire, "abort", lambda key: (abort(key), aborted())[0])
    s.executors[1].before = lambda what: s.executors[1].count("insert") == LAYERS and inserting()
    s.cluster.submit(s.prefill(PROMPT[:4]))
    s.cluster.submit(move(tokens=4))
    assert isinstance(s.event(), IterationDone) and inserting.reached.wait(WAIT_S)
    aborting = threading.Thread(target=s.cluster.submit, args=(AbortTransfer(1),))
    aborting.start()
    assert aborted.reached.wait(WAIT_S)
    inserting.on.set()
    assert s.cluster.next_event(0.05) is None
    aborted.on.set()
    aborting.join(WAIT_S)
    assert s.fence() == [TransferAborted(1)]


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
