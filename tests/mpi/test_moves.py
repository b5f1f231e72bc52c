"""Rank 0's transfers: whatever ranks say, and whichever are lost, each transfer ends with exactly one event."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.messages import (
    AbortTransfer,
    Chunk,
    InstanceSpec,
    Iteration,
    IterationDone,
    Role,
    StartTransfer,
    TransferAborted,
    TransferDone,
    TransferFailed,
)
from pdjax.mpi.moves import Moves
from pdjax.mpi.words import Compare, Digests, Failed, Inserted, Settle, Stop, Stopped
from pdjax.request import SamplingParams


def spec(index, role, ranks):
    return InstanceSpec(index, role, len(ranks), 4, 16, 1, 4, 9, 32, 8, ranks=ranks)


SPECS = (spec(0, Role.PREFILL, (1, 2)), spec(1, Role.DECODE, (3, 4)))


class Desk:
    """Moves whose words and events are lists, at a time that the test sets."""

    def __init__(self, verify=False):
        self.said, self.events, self.time = [], [], 0.0
        self.moves = Moves(SPECS, self._tell, self.events.append, lambda: self.time, verify)

    def _tell(self, ranks, word):
        self.said += [(rank, word) for rank in ranks]

    def start(self, key=1, mode="whole"):
        self.moves.start(StartTransfer(key, 7, 0, 0, 1, (1,), (2,), 4, mode))
        self.said.clear()

    def inserted(self, rank, key=1, spans=((1.0, 2.0),)):
        self.moves.inserted(rank, Inserted(key, 100, spans))

    def stopped(self, *ranks, key=1):
        for rank in ranks:
            self.moves.stopped(rank, Stopped(key))


def test_both_sides_are_told_of_a_transfer():
    desk = Desk()
    command = StartTransfer(1, 7, 0, 0, 1, (1,), (2,), 4, "whole")
    desk.moves.start(command)
    assert desk.said == [(rank, command) for rank in (1, 2, 3, 4)]


def test_a_transfer_is_done_when_every_rank_of_the_destination_has_it():
    desk = Desk()
    desk.start()
    desk.inserted(3)
    assert desk.events == []
    desk.inserted(4)
    assert [type(event) for event in desk.events] == [TransferDone]
    assert desk.events[0].nbytes == 200
    assert desk.said == [(rank, Settle(1)) for rank in (1, 2, 3, 4)]


def test_times_are_those_in_which_anything_moved_and_hidden_is_what_lay_before_the_end_of_the_prompt():
    desk = Desk()
    desk.start(mode="stream")
    chunk = Chunk(7, (1, 2, 3, 4), 0, (1,), 4, True, SamplingParams(), stream=1)
    desk.moves.issued(Iteration(0, 5, (chunk,)))
    desk.moves.done(IterationDone(0, 5, (), (), 0.0, 4.0))
    desk.inserted(3, spans=((1.0, 2.0), (1.5, 3.0)))
    desk.time = 9.0
    desk.inserted(4, spans=((5.0, 6.0),))
    (done,) = desk.events
    assert (done.started_s, done.finished_s, done.busy_s, done.hidden_s) == (1.0, 9.0, 3.0, 2.0)


def test_an_abort_is_answered_when_every_rank_has_stopped():
    desk = Desk()
    desk.start()
    desk.moves.abort(AbortTransfer(1))
    assert desk.said == [(rank, Stop(1)) for rank in (1, 2, 3, 4)]
    desk.stopped(1, 2, 3)
    assert desk.events == []
    desk.stopped(4)
    assert desk.events == [TransferAborted(1)]


def test_what_arrives_after_an_abort_commits_nothing():
    desk = Desk()
    desk.start()
    desk.inserted(3)
    desk.moves.abort(AbortTransfer(1))
    desk.inserted(4)
    desk.stopped(1, 2, 3, 4)
    assert desk.events == [TransferAborted(1)]


def test_an_abort_after_the_end_changes_nothing():
    desk = Desk()
    desk.start()
    desk.inserted(3)
    desk.inserted(4)
    desk.moves.abort(AbortTransfer(1))
    assert len(desk.events) == 1


def test_a_failure_on_one_rank_stops_the_others_and_is_told_with_its_reason():
    desk = Desk()
    desk.start()
    desk.moves.failed(Failed(1, "a header is wrong"))
    desk.moves.failed(Failed(1, "another one"))
    desk.stopped(4, 3, 2, 1)
    assert desk.events == [TransferFailed(1, "a header is wrong")]


@pytest.mark.parametrize("lost", [0, 1])
def test_an_abort_does_not_wait_for_a_lost_instance(lost):
    desk = Desk()
    desk.start()
    desk.moves.abort(AbortTransfer(1))
    desk.stopped(1, 3)
    desk.moves.lost(lost)
    assert desk.events == []
    desk.stopped(4 if lost == 0 else 2)
    assert desk.events == [TransferAborted(1)]


def test_an_abort_is_answered_at_once_when_both_sides_are_lost():
    desk = Desk()
    desk.start()
    desk.moves.lost(0)
    desk.moves.lost(1)
    desk.moves.abort(AbortTransfer(1))
    assert desk.events == [TransferAborted(1)]


def test_equal_digests_commit_and_others_name_the_first_head_that_differs():
    for wrong in (False, True):
        desk = Desk(verify=True)
        desk.start()
        desk.inserted(3)
        desk.inserted(4)
        assert desk.said == [(rank, Compare(1)) for rank in (1, 2, 3, 4)]
        for rank, head in ((1, 0), (2, 1), (3, 0), (4, 1)):
            digest = "x" if wrong and rank == 4 else f"h{head}"
            desk.moves.compared(rank, Digests(1, ((0, head, digest), (1, head, digest))))
        if wrong:
            desk.stopped(1, 2, 3, 4)
            (failed,) = desk.events
            assert "layer 0, head 1 has digest h1 at the source and x" in failed.error
            assert "(2 heads of layers differ)" in failed.error
        else:
            assert isinstance(desk.events[0], TransferDone)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["inserted", "stopped", "abort", "fail", "lose"]), st.integers(1, 4)), max_size=30
    )
)
def test_whatever_happens_a_transfer_ends_once(steps):
    desk = Desk()
    desk.start()
    for what, rank in steps:
        match what:
            case "inserted":
                desk.inserted(rank)
            case "stopped":
                desk.stopped(rank)
            case "abort":
                desk.moves.abort(AbortTransfer(1))
            case "fail":
                desk.moves.failed(Failed(1, "it broke"))
            case "lose":
                desk.moves.lost((rank - 1) // 2)
    # What the controller and the ranks do in the end, whatever was before.
    desk.moves.abort(AbortTransfer(1))
    desk.stopped(1, 2, 3, 4)
    assert len(desk.events) == 1
