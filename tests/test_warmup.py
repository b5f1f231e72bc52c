"""How often a warm-up runs a pass."""

import itertools
import types

import pytest

from pdjax import warmup
from pdjax.latency import Probe, Sample


class Replica:
    """An instance with one decode pass, which counts how often that is run."""

    def __init__(self, alone, index=0):
        self.alone, self.passes = alone, 0
        self.spec = types.SimpleNamespace(index=index, max_model_len=1, page_size=4)
        self.buckets = types.SimpleNamespace(chunks=(), rows=(1,), pairs=((0, 1),))

    def programs(self):
        return ()

    def rehearse_transfers(self):
        pass

    def program_of(self, probe):
        return (self,)

    kind_of = program_of

    def rehearse(self, probe):
        self.passes += 1
        return types.SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize(
    ("alone", "pass_s", "passes"), [(True, 0.01, 4), (True, 1, 2), (False, 0.01, 4), (False, 1, 4)]
)
def test_long_passes_run_less_often_but_for_those_that_other_processes_run_too(monkeypatch, alone, pass_s, passes):
    clock = itertools.count(0, pass_s)
    monkeypatch.setattr(warmup, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    replica = Replica(alone)
    (sample, *_) = warmup.warm_up(replica)
    assert replica.passes == passes  # the first is not measured
    assert sample.seconds == pytest.approx(pass_s)


def test_passes_that_are_asked_for_are_measured_in_three_rounds(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(warmup, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    replica, order = Replica(alone=True), []
    replica.rehearse = lambda probe: order.append(probe) or types.SimpleNamespace(wait=lambda: None)
    one, two = Probe((), (1,)), Probe((), (9,))
    assert warmup.warm_up(replica, probes=(one, two)) == [Sample(one, 1.0), Sample(two, 1.0)]
    assert order == [one, *(one, two) * 3]  # called once before


def test_instances_that_measure_at_the_same_time_measure_different_passes(monkeypatch):
    monkeypatch.setattr(warmup, "time", types.SimpleNamespace(perf_counter=itertools.count().__next__))
    asked, orders = [Probe((), (context,)) for context in range(1, 9)], []
    for index in range(3):
        replica, order = Replica(alone=False, index=index), []
        replica.rehearse = lambda probe, order=order: order.append(probe) or types.SimpleNamespace(wait=lambda: None)
        assert [sample.probe for sample in warmup.warm_up(replica, probes=asked)] == asked
        orders.append(order[-len(asked) :])
        assert sorted(orders[-1], key=asked.index) == asked
    assert all(len(set(beside)) == 3 for beside in zip(*orders, strict=True))
