"""The simulated cluster: its clock, its order, its links."""

import dataclasses

from pdjax.latency import LatencyModel
from pdjax.messages import Chunk, Iteration, IterationDone, Join, Role, RunStarted, StartTransfer, Tick, TransferDone
from pdjax.request import SamplingParams
from pdjax.schedulers import Disaggregated
from pdjax.simulated import SimulatedCluster, Timing
from pdjax.testing import World, spec
from tests.worlds import ask, crowd, policy, specs

ONE_SECOND = LatencyModel((1.0, 0, 0, 0, 0, 0), transfer_alpha_s=0.5, transfer_bytes_per_s=1000.0)


def cluster(count: int = 2) -> SimulatedCluster:
    return SimulatedCluster([spec(i, Role.MIXED) for i in range(count)], [ONE_SECOND] * count)


CHUNK = Chunk(0, (1, 2), 0, (1,), 8, True, SamplingParams())


def test_iterations_of_one_instance_run_one_after_the_other():
    sim = cluster()
    for number in (1, 2):
        sim.submit(Iteration(0, number, (CHUNK,)))
    events = [sim.next_event(None), sim.next_event(None)]
    assert [(e.number, e.started_s, e.finished_s) for e in events if isinstance(e, IterationDone)] == [
        (1, 0.0, 1.0),
        (2, 1.0, 2.0),
    ]


def pipeline() -> SimulatedCluster:
    return SimulatedCluster([spec(0, Role.MIXED, pp=2, devices=2, max_in_flight=3)], [ONE_SECOND])


def spans(sim: SimulatedCluster) -> list[tuple[float, float]]:
    events = iter(lambda: sim.next_event(None), None)
    return [(event.started_s, event.finished_s) for event in events if isinstance(event, IterationDone)]


def test_a_pass_begins_when_the_first_stage_is_free():
    sim = pipeline()
    for number in (1, 2, 3):
        sim.submit(Iteration(0, number, (CHUNK,)))
    assert spans(sim) == [(0.0, 1.0), (0.5, 1.5), (1.0, 2.0)]


def test_a_decode_step_waits_for_the_tokens_of_the_one_before():
    sim = pipeline()
    join = Join(0, 0, 2, (1,), 5, SamplingParams())
    sim.submit(Iteration(0, 1, joins=(join,), decode=True))
    sim.submit(Iteration(0, 2, decode=True))
    sim.submit(Iteration(0, 3, (CHUNK,)))
    assert spans(sim) == [(0.0, 1.0), (1.0, 2.0), (1.5, 2.5)]


def late(seconds: float = 0.25, in_flight: int = 2) -> SimulatedCluster:
    model = dataclasses.replace(ONE_SECOND, reporting=seconds)
    return SimulatedCluster([spec(0, Role.MIXED, max_in_flight=in_flight)], [model])


def heard(sim: SimulatedCluster) -> list[tuple[int, float, float]]:
    """(number, when it ended, when it was heard of) of what is reported."""
    events = iter(lambda: sim.next_event(None), None)
    return [(event.number, event.finished_s, sim.now()) for event in events if isinstance(event, IterationDone)]


def test_a_pass_is_heard_of_late_while_another_one_runs_and_at_once_where_none_follows():
    sim = late()
    for number in (1, 2):
        sim.submit(Iteration(0, number, (CHUNK,)))
    assert heard(sim) == [(1, 1.0, 1.25), (2, 2.0, 2.0)]


def test_passes_are_heard_of_in_order():
    sim = late(1.75)  # the second one ends before the first is heard of
    for number in (1, 2):
        sim.submit(Iteration(0, number, (CHUNK,)))
    assert heard(sim) == [(1, 1.0, 2.75), (2, 2.0, 2.75)]


def test_steps_of_a_run_are_heard_of_late():
    sim = late()
    sim.submit(Iteration(0, 1, joins=(Join(0, 0, 2, (1,), 5, SamplingParams()),), decode=True, steps=3))
    assert sim.next_event(None) == RunStarted(0, 1, (1.25, 2.25, 3.25))
    assert heard(sim) == [(2, 2.0, 2.25), (3, 3.0, 3.25)]


def test_no_step_of_a_run_is_shorter_than_it_takes_to_hear_of_one():
    sim = late(2.0)  # the next but one is asked for when one has been heard of
    sim.submit(Iteration(0, 1, joins=(Join(0, 0, 2, (1,), 5, SamplingParams()),), decode=True, steps=2))
    assert sim.next_event(None) == RunStarted(0, 1, (4.0, 6.0))


def test_an_instance_that_waits_to_hear_of_its_pass_is_heard_at_once():
    sim = late(in_flight=1)
    sim.submit(Iteration(0, 1, joins=(Join(0, 0, 2, (1,), 5, SamplingParams()),), decode=True, steps=2))
    assert sim.next_event(None) == RunStarted(0, 1, (1.0, 2.0))


def test_instances_run_at_the_same_time():
    sim = cluster()
    for index in (0, 1):
        sim.submit(Iteration(index, 1, (CHUNK,)))
    assert [sim.next_event(None).finished_s, sim.next_event(None).finished_s] == [1.0, 1.0]


def test_a_timeout_advances_the_clock_to_its_end_only():
    sim = cluster()
    sim.post(Tick(), at_s=5.0)
    assert sim.next_event(2.0) is None and sim.now() == 2.0
    assert sim.next_event(None) == Tick() and sim.now() == 5.0


def test_a_transfer_takes_latency_and_bytes_over_bandwidth():
    sim = cluster()
    sim.submit(StartTransfer(1, 0, 0, 0, 1, (1,), (1,), tokens=3, mode="whole"))
    done = sim.next_event(None)
    assert isinstance(done, TransferDone) and (done.nbytes, done.finished_s) == (3000, 3.5)


def test_the_same_seed_gives_the_same_run():
    def run():
        w = World(specs("dynamic_stream"), policy("dynamic_stream"))
        w.add(*crowd(seed=8, count=25))
        return w.run().iterations

    assert run() == run()


def test_without_computing_requests_end_by_length():
    w = World([spec(0, Role.PREFILL), spec(1, Role.DECODE)], Disaggregated(), machine=lambda spec: Timing())
    w.add(ask(0, tokens=7))
    assert w.run().records[0].token_ids == (0,) * 7
