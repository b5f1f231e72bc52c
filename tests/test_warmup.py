"""How often a warm-up runs a pass."""

import itertools
import types

import pytest

from pdjax import warmup


class Replica:
    """An instance with one decode pass, which counts how often that is run."""

    def __init__(self, alone):
        self.alone, self.passes = alone, 0
        self.spec = types.SimpleNamespace(max_model_len=1)
        self.buckets = types.SimpleNamespace(chunks=(), pairs=((0, 1),))

    def programs(self):
        return ()

    def rehearse_transfers(self):
        pass

    def program_of(self, load):
        return (self,)

    kind_of = program_of

    def rehearse(self, load):
        self.passes += 1
        return types.SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize(
    ("alone", "pass_s", "passes"), [(True, 0.01, 4), (True, 1, 2), (False, 0.01, 4), (False, 1, 4)]
)
def test_long_passes_run_less_often_but_for_those_that_other_processes_run_too(monkeypatch, alone, pass_s, passes):
    clock = itertools.count(0, pass_s)
    monkeypatch.setattr(warmup, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    replica = Replica(alone)
    ((_, seconds), *_) = warmup.warm_up(replica)
    assert replica.passes == passes  # the first is not measured
    assert seconds == pytest.approx(pass_s)
