"""The simulated cluster: its clock, its order, its links."""

from pdjax.latency import LatencyModel
from pdjax.messages import Chunk, Iteration, IterationDone, Join, Role, StartTransfer, Tick, TransferDone
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
