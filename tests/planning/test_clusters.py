"""Which clusters are made of the devices."""

import pytest

from pdjax.messages import Role
from pdjax.planning import clusters
from pdjax.planning.clusters import Cluster, Part
from pdjax.planning.mix import Mix
from pdjax.request import SLO
from tests.planning.toys import shape, stock

MIX = Mix(((100, 11),), SLO(ttft_ms=50, tpot_ms=20))


def split(p, d, of=None, tp=1):
    one = shape(of, tp)
    return Cluster("disaggregated", (Part(Role.PREFILL, one, p), Part(Role.DECODE, one, d)), 1.0)


def test_algorithm_1_takes_as_many_of_each_phase_as_the_rate_needs_and_one_more():
    one = shape()
    made = list(clusters.splits({one: 4.0}, {one: 2.5}, rate=9.0))
    assert {cluster.counts for cluster in made} == {(3, 4), (3, 5), (4, 4), (4, 5)}
    assert {cluster.counts: cluster.estimate for cluster in made}[3, 4] == 10.0


def test_without_a_rate_every_split_of_the_devices_is_made():
    one = shape(stock(devices=4))
    assert [cluster.counts for cluster in clusters.splits({one: 4.0}, {one: 2.5}, None)] == [(1, 3), (2, 2), (3, 1)]


def test_decode_instances_of_another_stock_are_no_more_than_prefill_feeds():
    fast, cheap = shape(stock("fast", devices=2)), shape(stock("cheap", devices=16))
    made = [cluster.counts for cluster in clusters.splits({fast: 4.0}, {cheap: 2.5}, None)]
    assert made == [(1, 2), (2, 4)]


def test_algorithm_2_pairs_segments_that_fit_into_a_node():
    small = stock(devices=8, node_devices=4, sizes=((1, 1), (2, 1), (4, 1), (2, 2)))
    one, two, four, deep = (shape(small, tp, pp) for tp, pp in ((1, 1), (2, 1), (4, 1), (2, 2)))
    made = list(clusters.units({four: 8.0, deep: 8.0}, {one: 4.0, deep: 3.0}, None))
    # TP4 fills a node alone; two stages of TP2 share two nodes with the same, and no single node with one device more.
    assert [[part.shape for part in cluster.parts] for cluster in made] == [[deep, deep]]
    made = list(clusters.units({two: 5.0}, {one: 4.0}, None))
    assert [(cluster.groups, cluster.counts, cluster.estimate) for cluster in made] == [(2, (2, 2), 8.0)]


def test_only_instances_that_hold_the_longest_request_are_looked_at():
    assert [one.text for one in clusters.shapes([stock(sizes=((1, 1), (2, 1)))], MIX)] == ["TP1", "TP2"]
    assert clusters.shapes([stock()], Mix(((5000, 2),), SLO(ttft_ms=50))) == []


def test_kv_stays_inside_a_node_where_it_can_and_takes_the_nics_elsewhere():
    network = split(2, 4, stock(devices=8, node_devices=4)).network()
    assert network.node == (0, 0, 0, 0, 1, 1)
    inside, outside = network.route(0, 3), network.route(0, 4)
    assert [network.links[link].name for link in inside] == ["inside toy 0"]
    assert len(outside) == 2 and all("nic" in network.links[link].name for link in outside)


def test_an_instance_has_the_nics_of_its_devices():
    network = split(1, 1, stock(devices=16, node_devices=4, sizes=((4, 1),), nic=1e9), tp=4).network()
    assert {network.links[link].bytes_per_s for link in network.route(0, 1)} == {4e9}


@pytest.mark.parametrize(("by", "cost"), [("device", 6), ("dollar", 12.0)])
def test_a_cluster_costs_its_devices_or_their_price(by, cost):
    assert split(2, 4, stock(price=2.0, devices=8)).cost(by) == cost


def test_sliders_are_the_chunks_of_both_sides():
    one = shape()
    parts = Part(Role.PREFILL, one, 1), Part(Role.DECODE, one, 1)
    assert [pool.max_chunk for pool in Cluster("dynamic", parts, 1.0, chunks=(2048, 256)).pools] == [2048, 256]


def test_a_cluster_in_words():
    assert split(4, 12).text == "4 TP1 prefill + 12 TP1 decode"
