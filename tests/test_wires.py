"""KV on its way in simulation: layer groups, shared links, aborts; every time computed by hand."""

import pytest

from pdjax.latency import LatencyModel
from pdjax.messages import AbortTransfer, Chunk, Iteration, Role, StartTransfer, TransferDone
from pdjax.network import Link, Network, nodes, switched
from pdjax.request import SamplingParams
from pdjax.simulated import SimulatedCluster
from pdjax.testing import spec

PASS = LatencyModel((1.0, 0, 0, 0, 0, 0), transfer_alpha_s=0.0, transfer_bytes_per_s=1000.0)
WIRE = Link("wire", 1000.0)


def cluster(network=None, groups=1, count=3):
    """Instances whose passes take a second, and whose tokens have 1000 bytes."""
    specs = [spec(index, Role.MIXED) for index in range(count)]
    return SimulatedCluster(specs, [PASS] * count, network=network, layer_groups=[groups] * count)


def move(key, tokens, src=0, dst=1, mode="whole"):
    return StartTransfer(key, key, 0, src, dst, (1,), (1,), tokens, mode)


def chunk(key, tokens):
    return Chunk(key, (0,) * tokens, 0, (1,), 8, True, SamplingParams(), stream=key)


def arrivals(sim):
    """When each transfer has arrived, by key."""
    found = {}
    while (event := sim.next_event(None)) is not None:
        if isinstance(event, TransferDone):
            found[event.key] = event.finished_s
    return found


def streamed(network=None, groups=1):
    sim = cluster(network, groups)
    sim.submit(move(1, 2, mode="stream"))
    sim.submit(Iteration(0, 1, (chunk(1, 2),)))
    return arrivals(sim)[1]


def test_without_layer_groups_a_pass_sends_its_kv_when_it_is_done():
    assert streamed() == 1 + 2


def test_layer_groups_leave_one_after_the_other_while_the_pass_computes():
    assert streamed(groups=4) == 0.25 + 2  # from the first group on the wire never waits


def test_a_transfer_alone_on_its_links_takes_latency_and_bytes_over_bandwidth():
    sim = cluster(switched(Link("wire", 1000.0, alpha_s=0.5), 3))
    sim.submit(move(1, 3))
    assert arrivals(sim) == {1: 3.5}


def test_transfers_on_one_link_share_it_in_equal_parts():
    sim = cluster(switched(WIRE, 3))
    sim.submit(move(1, 1, dst=1))
    sim.submit(move(2, 3, dst=2))
    assert arrivals(sim) == {1: 2.0, 2: 4.0}


def test_transfers_to_one_instance_share_its_link():
    sim = cluster(switched(WIRE, 3))
    sim.submit(move(1, 2, src=0, dst=2))
    sim.submit(move(2, 2, src=1, dst=2))
    assert arrivals(sim) == {1: 4.0, 2: 4.0}


def test_transfers_on_other_links_do_not_meet():
    sim = cluster(switched(WIRE, 3))
    sim.submit(move(1, 2, src=0, dst=1))
    sim.submit(move(2, 2, src=1, dst=2))
    assert arrivals(sim) == {1: 2.0, 2: 2.0}


def test_an_abort_leaves_the_link_to_the_others():
    sim = cluster(switched(WIRE, 3))
    sim.submit(move(1, 2))
    sim.submit(move(2, 2, dst=2))
    assert sim.next_event(1.0) is None
    sim.submit(AbortTransfer(1))
    assert arrivals(sim) == {2: 1 + 1.5}


def test_within_a_node_kv_does_not_leave_it():
    sim = cluster(nodes(WIRE, Link("inside", 4000.0), [0, 0, 1]))
    sim.submit(move(1, 4, dst=1))
    sim.submit(move(2, 4, dst=2))
    assert arrivals(sim) == {1: 1.0, 2: 4.0}


def test_the_instances_of_a_node_share_its_wire():
    sim = cluster(nodes(WIRE, Link("inside", 4000.0), [0, 0, 1]))
    sim.submit(move(1, 2, src=0, dst=2))
    sim.submit(move(2, 2, src=1, dst=2))
    assert arrivals(sim) == {1: 4.0, 2: 4.0}


def test_on_a_slow_link_streamed_kv_flows_from_the_start_of_the_pass():
    assert streamed(switched(WIRE, 3), groups=4) == pytest.approx(2.0)


def test_on_a_fast_link_only_the_last_layer_group_follows_the_pass():
    assert streamed(switched(Link("fast", 10_000.0), 3), groups=4) == pytest.approx(1 + 0.05)


def test_a_link_without_bandwidth_is_refused():
    with pytest.raises(ValueError, match="bytes_per_s of link 'x' is 0; allowed: > 0"):
        Link("x", 0)


def test_the_route_between_nodes_is_out_of_one_and_into_the_other():
    network = Network((WIRE,) * 4, ((0,), (1,)), ((2,), (3,)), (0, 1), ((), ()))
    assert network.route(0, 1) == (0, 3)
