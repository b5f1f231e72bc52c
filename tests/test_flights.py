"""How long what was issued will still take: by hand, and in runs as in single steps."""

import pytest

from pdjax.flights import Flight, Flights
from pdjax.latency import LatencyModel, Load
from pdjax.messages import Iteration, IterationDone, Role, RunStarted
from pdjax.request import Request, SamplingParams
from pdjax.schedulers import Colocated, Place
from pdjax.simulated import Timing
from pdjax.testing import World, spec

ROWS = Load((), 2, 10, 12)


def flights(*seconds, at_s=0.0):
    """Iterations issued at a time, each expected to take so long."""
    made = Flights(2)
    for number, each in enumerate(seconds, 1):
        made.add(Flight(Iteration(0, number), {}, (), 1, ROWS, each), at_s)
    return made


def done(number, finished_s):
    return IterationDone(0, number, (), (), finished_s - 1.0, finished_s)


def left(made, now):
    return made.busy_s(now, lambda load: float(load.context_tokens + load.attended_tokens))


def test_nothing_issued_is_done_at_once():
    assert left(Flights(2), 7.0) == 0.0


def test_two_iterations_follow_each_other_and_the_first_has_begun():
    made = flights(3.0, 5.0, at_s=10.0)
    assert [left(made, now) for now in (10.0, 11.0, 12.5)] == [8.0, 7.0, 5.5]


def test_one_that_takes_longer_than_expected_is_about_to_end_and_the_next_is_still_whole():
    assert left(flights(3.0, 5.0), 4.0) == 5.0


def test_the_second_begins_when_the_device_had_done_the_first_not_when_it_was_told():
    made = flights(3.0, 5.0)
    made.reported(done(1, 2.0), 2.0)
    assert left(made, 2.5) == 4.5


def test_after_idling_time_counts_from_the_next_issue():
    made = flights(3.0)
    made.reported(done(1, 3.0), 3.0)
    assert left(made, 3.0) == left(made, 50.0) == 0.0
    made.add(Flight(Iteration(0, 2), {}, (), 1, ROWS, 4.0), 60.0)
    assert left(made, 61.0) == 3.0


def test_a_lost_instance_is_not_busy():
    made = flights(3.0, 5.0)
    made.forget()
    assert left(made, 1.0) == 0.0


def test_of_a_run_the_steps_count_that_would_have_been_issued_by_now():
    made = Flights(2)
    made.add(Flight(Iteration(0, 1, decode=True, steps=9), {}, (), 9, ROWS, 20.0), 0.0)
    made.newly_issued(0.0)
    made.started(RunStarted(0, 1, (22.0, 48.0, 78.0)), 0.0)
    # Steps take 22 as fed to `started`; expected were 20, then 10 + 2 + 12 + 2 = 26, 30, 34 and so on.
    assert left(made, 1.0) == 19.0 + 26.0
    made.newly_issued(23.0)
    assert left(made, 23.0) == 25.0 + 30.0


class Telling(Colocated):
    """Says in its reason how busy every instance is."""

    def place(self, ask, cluster):
        place = super().place(ask, cluster)
        return Place(place.prefill, place.decode, "whole", repr([view.busy_s for view in cluster.instances]))


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_in_the_middle_of_a_run_an_instance_is_as_busy_as_with_single_steps(in_flight):
    def told(max_steps):
        latency = LatencyModel((1.03e-3, 1.7e-4, 1.1e-7, 2.3e-4, 1.3e-6, 1.9e-6))
        specs = [spec(0, Role.MIXED, max_in_flight=in_flight), spec(1, Role.MIXED, max_in_flight=in_flight)]
        w = World(specs, Telling(), latency, machine=lambda _: Timing(), max_steps=max_steps)
        for number in range(20):
            sampling = SamplingParams(max_tokens=100)
            w.add(Request(number, (5,) * (number + 1), sampling, arrival_s=0.0123 * number))
        return [record.reason for record in w.run().records.values()]

    assert told(1) == told(4096)
    assert len(set(told(1))) == 20
