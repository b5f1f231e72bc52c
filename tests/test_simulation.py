"""Fleets in virtual time: pools, requests as they come, faults, sums without records."""

import dataclasses
import math

import pytest

from pdjax import fleet, simulation
from pdjax.fleet import Pool
from pdjax.latency import LatencyModel
from pdjax.messages import Role
from pdjax.request import SLO, State
from pdjax.schedulers import Colocated, Disaggregated
from pdjax.tally import Histogram, Tally

SECOND = LatencyModel((1.0, 0, 0, 0, 0, 0), transfer_alpha_s=0.5, transfer_bytes_per_s=math.inf)


def pool(role=Role.MIXED, count=1, **changes):
    return Pool(role, count, SECOND, kv_tokens=4096, kv_bytes_per_token=1, **changes)


def test_pools_become_instances_in_order():
    made = fleet.build([pool(Role.PREFILL, 2), pool(Role.DECODE, devices=4, pp=2, layer_groups=3)])
    assert [spec.role for spec in made.specs] == [Role.PREFILL, Role.PREFILL, Role.DECODE]
    assert made.devices == 6 and made.layer_groups == (1, 1, 3) and made.specs[2].max_in_flight == 3


def test_a_pool_says_how_many_iterations_are_in_flight():
    assert fleet.build([pool(max_in_flight=1)]).specs[0].max_in_flight == 1


def test_a_pool_of_stages_that_do_not_divide_its_devices_is_refused():
    with pytest.raises(ValueError, match="devices is 3; allowed with pp 2: a multiple of it"):
        pool(devices=3, pp=2)


def test_a_prompt_of_one_instance_is_decoded_on_the_other():
    made = fleet.build([pool(Role.PREFILL), pool(Role.DECODE)])
    run = simulation.simulate(made, simulation.asks([(8, 3)], [0.0]), Disaggregated())
    assert run.records[0].timeline.token_s == [1.0, 2.5, 3.5]  # a pass, half a second for KV, two steps


def test_requests_are_taken_as_they_arrive():
    taken = []

    def requests():
        for request in simulation.asks([(8, 2)] * 3, [0.0, 10.0, 20.0]):
            taken.append(request.id)
            yield request

    class Watch(simulation.Records):
        def done(self, request, record):
            assert len(taken) <= request.id + 2  # itself, and the next one
            super().done(request, record)

    simulation.serve(fleet.build([pool()]), requests(), Colocated(), Watch())
    assert taken == [0, 1, 2]


def test_requests_out_of_order_are_refused():
    with pytest.raises(ValueError, match=r"request 1 arrives at 1\.0 s, behind one of 2\.0 s; allowed: in order"):
        simulation.simulate(fleet.build([pool()]), simulation.asks([(8, 2)] * 2, [2.0, 1.0]), Colocated())


def test_a_lost_instance_costs_time_not_answers():
    made = fleet.build([pool(count=2)])
    faults = [simulation.Fault(0, 1.5)]
    run = simulation.simulate(made, simulation.asks([(8, 9)] * 4, [0.0] * 4), Colocated(), faults=faults)
    assert all(record.state is State.FINISHED for record in run.records)
    assert any(record.restarts for record in run.records)


def test_instances_of_several_kinds_take_their_own_time():
    slow = Pool(Role.PREFILL, 1, LatencyModel((3.0, 0, 0, 0, 0, 0)), 4096, 1)
    made = fleet.build([pool(Role.PREFILL), slow, pool(Role.DECODE)])
    run = simulation.simulate(made, simulation.asks([(8, 1)] * 2, [0.0, 0.0]), Disaggregated())
    assert sorted(record.timeline.token_s[0] for record in run.records) == [1.0, 3.0]


def test_passes_take_their_time_whatever_the_policy_believes():
    believed = (LatencyModel((9.0, 0, 0, 0, 0, 0)),)
    made = dataclasses.replace(fleet.build([pool()]), believed=believed)
    run = simulation.simulate(made, simulation.asks([(8, 1)], [0.0]), Colocated())
    assert [record.timeline.token_s[0] for record in run.records] == [1.0]
    assert [one.predicted_s for one in run.iterations] == [9.0]


@pytest.mark.parametrize(("stream_from", "pass_s"), [(None, 1.0), (1, 1.7)])
def test_a_pass_takes_longer_whose_kv_leaves_while_it_is_computed(stream_from, pass_s):
    model = dataclasses.replace(SECOND, streaming=(0.5, 0.025))  # of a prompt, and of a token
    made = fleet.build([Pool(role, 1, model, 4096, 1, max_chunk=8) for role in (Role.PREFILL, Role.DECODE)])
    run = simulation.simulate(made, simulation.asks([(8, 2), (8, 2)], [0.0, 0.5]), Disaggregated(stream_from))
    passes = [one for one in run.iterations if one.chunk_tokens]
    assert [one.finished_s for one in passes] == pytest.approx([pass_s, 2 * pass_s])
    assert {one.predicted_s for one in passes} == {1.0}  # policies do not count on it


def test_poisson_arrivals_have_their_rate():
    times = simulation.poisson(4.0, 4000, seed=1)
    assert times[0] == 0 and times == sorted(times) and len(times) == 4000
    assert times[-1] == pytest.approx(1000, rel=0.05)


def test_a_tally_has_what_the_records_say():
    made, slos = fleet.build([pool(count=2)]), {"loose": SLO(ttft_ms=5000), "tight": SLO(ttft_ms=1000)}

    def requests():
        return simulation.asks([(8, 3)] * 20, simulation.poisson(1.0, 20, seed=0), SLO(ttft_ms=2000))

    tally = Tally(slos)
    simulation.serve(made, requests(), Colocated(), tally)
    run = simulation.simulate(made, requests(), Colocated())
    for name, slo in [("", None), *slos.items()]:
        assert tally.attainment(name) == run.summary(slo=slo)["slo_attainment"]
    assert tally.ttft_ms.mean == pytest.approx(run.summary()["ttft_ms"]["mean"])
    assert tally.output_tokens == 60 and tally.prompt_tokens == 160


def test_percentiles_of_a_histogram_are_off_by_half_a_bin_at_most():
    histogram = Histogram()
    for value in range(1, 1001):
        histogram.add(value)
    for percent in (1, 50, 90, 99):
        assert histogram.percentile(percent) == pytest.approx(10 * percent, rel=0.006)
    assert histogram.mean == 500.5
