"""Inserts between decode steps: how many go when. No threads, no clock: passes and their seconds are told."""

import math
from collections import deque

from pdjax.pacing import Pacing

STEP_S = 0.010


class Lane:
    """A pacing with `flight` passes in flight, and the inserts that went. A pass takes STEP_S and the time of the
    inserts in front of it."""

    def __init__(self, flight=2):
        self.pacing, self.gone = Pacing(), []
        self._between, self._spent_s = deque(), 0.0
        for _ in range(flight):
            self._dispatch()

    def add(self, *names, seconds=0.001, wanted=True):
        def insert(name):
            if wanted:
                self.gone.append(name)
                self._spent_s += seconds
            return wanted

        for name in names:
            self.pacing.add(seconds, lambda name=name: insert(name))

    def done(self):
        self.pacing.done(STEP_S + self._between.popleft(), alone=True)

    def step(self):
        """A pass ends and the next is dispatched; how many inserts went meanwhile."""
        before = len(self.gone)
        self.done()
        self._dispatch()
        return len(self.gone) - before

    def _dispatch(self):
        self._between.append(self._spent_s)
        self._spent_s = 0.0
        self.pacing.dispatched()


def test_without_rows_in_flight_all_go_at_once():
    lane = Lane(flight=0)
    lane.add(*range(100), seconds=1.0)
    assert lane.gone == list(range(100))


def test_between_two_steps_go_as_many_as_a_fifth_of_a_step_holds():
    lane = Lane()
    assert lane.step() == 0
    lane.add(*range(10))
    assert lane.gone == [0, 1]  # 2 ms of 10
    assert [lane.step() for _ in range(5)] == [2, 2, 2, 2, 0]
    assert lane.gone == list(range(10))


def test_the_share_does_not_grow_from_the_time_of_the_inserts_themselves():
    lane = Lane()
    lane.step()
    lane.add(*range(100))
    assert [lane.step() for _ in range(20)] == [2] * 20


def test_one_goes_whatever_it_takes():
    lane = Lane()
    lane.step()
    lane.add(*range(4), seconds=math.inf)
    assert [lane.step() for _ in range(4)] == [1, 1, 1, 0]


def test_before_the_first_step_is_measured_one_goes():
    lane = Lane()
    lane.add("a", "b", "c")
    assert lane.gone == ["a"]


def test_a_pass_with_prompt_tokens_is_no_measure_of_a_step():
    lane = Lane()
    lane.step()
    lane.pacing.done(1.0, alone=False)
    lane._dispatch()
    lane.add(*range(10))
    assert lane.gone == [0, 1]


def test_when_the_last_row_is_done_the_rest_goes():
    lane = Lane()
    lane.step()
    lane.add(*range(10))
    lane.done()
    assert len(lane.gone) == 2
    lane.done()
    assert lane.gone == list(range(10))


def test_inserts_that_came_too_late_take_nobodys_place():
    lane = Lane()
    lane.step()
    lane.add("late", "late", "late", wanted=False)
    lane.add("a", "b", "c")
    assert lane.gone == ["a", "b"]


def test_inserts_keep_their_order():
    lane = Lane()
    lane.step()
    lane.add("long", seconds=0.009)
    lane.add(*range(3), seconds=0.0)
    assert lane.gone == ["long"]
    lane.step()
    assert lane.gone == ["long", 0, 1, 2]
