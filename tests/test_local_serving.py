"""A controller on the local cluster: real threads, fake executors (`tests.sites`), tokens that prove which pages were
used."""

import pytest

from pdjax.controller import MAX_FAILURES, Controller
from pdjax.latency import LatencyModel
from pdjax.messages import Abort, Arrival
from pdjax.request import State
from pdjax.testing import Collector, fake_tokens
from tests.sites import Site
from tests.worlds import POLICIES, ask, crowd, policy, specs


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
    assert record.state is State.FAILED and record.restarts == MAX_FAILURES
    assert "the wire broke" in record.reason


@pytest.mark.parametrize("name", ["pull", "stream"])
def test_aborts_in_the_middle_leave_the_other_tokens_alone(served, name):
    requests = crowd(seed=4, count=20)
    collected, _ = served(name, requests, abort=range(0, 20, 3))
    for request in requests:
        tokens = collected.records[request.id].token_ids
        assert tokens == fake_tokens(request)[: len(tokens)]
        assert request.id % 3 == 0 or tokens == fake_tokens(request)
