"""Rank 0's cluster and the parts of other ranks, over a network in one process and on fake executors: what the
controller is told, and what becomes of lost ranks."""

import contextlib
import dataclasses

import pytest

from pdjax.controller import Controller
from pdjax.latency import LatencyModel
from pdjax.messages import AbortTransfer, Arrival, InstanceLost, Iteration, IterationDone, Role, Tick, TransferAborted
from pdjax.mpi import words
from pdjax.mpi.cluster import MpiCluster
from pdjax.mpi.layout import deal
from pdjax.mpi.line import Line
from pdjax.mpi.part import Part
from pdjax.request import State
from pdjax.schedulers import Disaggregated
from pdjax.testing import Collector, fake_tokens, spec
from pdjax.transfer.inbox import Inbox
from pdjax.transfer.outbox import Outbox
from pdjax.transfer.parcel import Side
from tests.mpi.posts import FakeNetwork
from tests.sites import LAYERS, WAIT_S, FakeExecutor, move, places
from tests.worlds import ask, crowd

HEADS = 2  # of the fake KV


class Job:
    """Ranks in one process: a cluster on rank 0, a part on each other rank."""

    def __init__(self, network, roles, verify_kv=False):
        self.network, layout = network, deal([1] * len(roles))
        specs = tuple(dataclasses.replace(spec(i, role), ranks=layout.ranks[i]) for i, role in enumerate(roles))
        sides = [Side(1, 1, one.ranks) for one in specs]
        where = places(len(specs))
        self.executors = [FakeExecutor(one, place) for one, place in zip(specs, where, strict=True)]
        self.parts, self.left, self.faults = {}, [], []
        line = Line(network.posts[0], layout, 0.0, lambda *_: None, lambda rank, why: self.cluster.lose(rank, why))
        build = words.Build(1, specs, "float32", 1, "mpi", verify_kv, 60.0, "")
        self.cluster = MpiCluster(line, build)
        for index, executor in enumerate(self.executors):
            self._start(index, executor, layout, sides, where[index])

    def _start(self, index, executor, layout, sides, place):
        rank = index + 1

        def heard(source, word):
            match word:
                case words.Leave(why):
                    self.left.append((rank, why))
                case words.EndEngine():
                    line.tell(0, words.Ended())
                case _:
                    self.parts[rank].heard(source, word)

        line = Line(self.network.posts[rank], layout, 0.0, heard, lambda *_: None)
        line.epoch = 1
        head_bytes = LAYERS * 2 * 64 * 4
        outbox = Outbox(line, sides, index, HEADS, head_bytes, 60.0)
        inbox = Inbox(line, sides, index, [place] * LAYERS, HEADS, 1, "int32", head_bytes)
        self.parts[rank] = Part(line, executor, outbox, inbox, LAYERS, self.faults.append)

    def event(self):
        event = self.cluster.next_event(WAIT_S)
        assert event is not None, "nothing came"
        return event

    def serve(self, requests, on_event=lambda event: None, **options):
        """All requests, by a controller. Records by id."""
        collected, models = Collector(), [LatencyModel()] * len(self.executors)
        policy = Disaggregated(stream_from=8)
        self.controller = controller = Controller(self.cluster.specs, policy, models, collected, **options)
        for request in requests:
            self.cluster.post(Arrival(dataclasses.replace(request, arrival_s=self.cluster.now())))
        while len(collected.records) < len(requests) or controller.books.live:
            event = self.cluster.next_event(WAIT_S) or Tick()
            on_event(event)
            for command in controller.handle(event, self.cluster.now()):
                self.cluster.submit(command)
        return collected.records

    def close(self):
        self.cluster.close()
        for part in self.parts.values():
            part.close()


@contextlib.contextmanager
def job(*roles, **options):
    with FakeNetwork(1 + len(roles)) as network:
        made = Job(network, roles, **options)
        try:
            yield made
        finally:
            made.close()
        assert made.faults == []


P, D = Role.PREFILL, Role.DECODE


@pytest.mark.parametrize("verify_kv", [False, True])
def test_requests_get_their_tokens_over_ranks(verify_kv):
    requests = crowd(seed=3, count=12)
    with job(P, D, D, verify_kv=verify_kv) as one:
        records = one.serve(requests)
        for request in requests:
            assert records[request.id].token_ids == fake_tokens(request)
        for lane in one.controller.books.instances:
            assert lane.free_pages == lane.spec.usable_pages


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_rank_that_dies_in_the_middle_changes_no_token(lost):
    requests = crowd(seed=4, count=12)
    with job(P, P, D) as one:
        seen = []

        def on_event(event):
            seen.append(event)
            if len(seen) == 30:
                one.network.kill(lost)

        records = one.serve(requests, on_event)
        assert any(isinstance(event, InstanceLost) for event in seen)
        for request in requests:
            assert records[request.id].token_ids == fake_tokens(request), records[request.id]


def test_an_instance_that_does_not_answer_is_lost_its_late_words_are_dropped_and_it_is_told_to_leave():
    with job(P, D) as one:
        one.network.freeze(1)
        one.cluster.submit(Iteration(0, 1))
        one.network.time_out(1)
        assert one.event() == InstanceLost(0, "rank 1 was not heard of")
        one.network.thaw(1)
        one.network.settle()
        assert [rank for rank, _ in one.left] == [1]
        assert one.cluster.next_event(0.0) is None


def test_nothing_is_sent_to_a_lost_instance():
    with job(P, D) as one:
        one.network.kill(1)
        assert isinstance(one.event(), InstanceLost)
        one.cluster.submit(Iteration(0, 1))
        one.cluster.submit(Iteration(1, 1))
        event = one.event()
        assert isinstance(event, IterationDone) and event.instance == 1


def test_an_abort_is_answered_when_the_other_side_is_lost():
    with job(P, D) as one:
        one.cluster.submit(move(mode="stream"))
        one.network.settle()
        one.network.kill(1)
        assert isinstance(one.event(), InstanceLost)
        one.cluster.submit(AbortTransfer(1))
        assert one.event() == TransferAborted(1)


def test_on_failure_fail_names_the_lost_rank():
    with job(P, D, D) as one:

        def on_event(event):
            if isinstance(event, IterationDone) and event.instance == 1 and not one.cluster._lost:
                one.network.kill(2)

        records = one.serve([ask(i, prompt=20, tokens=40) for i in range(4)], on_event, on_failure="fail")
        failed = [record for record in records.values() if record.state is State.FAILED]
        assert failed and all("instance 1 is lost: rank 2" in record.reason for record in failed)


def test_the_latency_of_words_is_measured_to_every_rank():
    with job(P, D) as one:
        assert set(one.cluster.latency(count=3)) == {1, 2}


def test_only_awaited_answers_keep_the_post_awake():
    with job(P, D) as one:
        one.serve([ask(0, prompt=20)])
        one.network.settle()
        assert [post.awaited for post in one.network.posts] == [0, 0, 0]


def test_a_closed_cluster_takes_nothing():
    with job(P, D) as one:
        one.cluster.close()
        with pytest.raises(RuntimeError, match="closed"):
            one.cluster.submit(Iteration(0, 1))
