"""Correction of latency models: factors by hand, and clusters that are slower than their model says."""

import math
from types import SimpleNamespace

import pytest

from pdjax import rerun
from pdjax.correction import LIMIT, QUANTUM, WEIGHT, Correction
from pdjax.eventlog import EventLog, Header, read
from pdjax.latency import LatencyModel, Load
from pdjax.messages import Role
from pdjax.schedulers import ChunkedColocated, Colocated, Disaggregated, Dynamic
from pdjax.testing import Collector, World, spec
from tests.worlds import ask

SPEC = spec(0, Role.MIXED)
MODEL = LatencyModel((1.0, 0.0, 0.0, 0.0, 0.0, 0.0), 2.0, 100.0)  # a pass takes 1 s, 300 bytes 5 s
PREFILL, DECODE, MIXED = Load(((4, 0),)), Load((), 2, 9, 9), Load(((4, 0),), 2, 9, 9)


def test_a_pass_that_takes_longer_moves_its_own_kind_by_a_share_of_the_distance():
    correction = Correction(MODEL)
    for _ in range(2):  # 1.19 is within the limit: the mean is 0.1 log, then 0.1 + 0.09 of it
        correction.passed(SPEC, DECODE, 1.19)
    assert correction.model.iteration_s(SPEC, DECODE) == pytest.approx(1.19**0.19)
    assert correction.model.iteration_s(SPEC, PREFILL) == correction.model.iteration_s(SPEC, MIXED) == 1.0
    assert correction.model.transfer_s(300) == 5.0


def test_a_transfer_moves_latency_and_bandwidth_alike():
    correction = Correction(MODEL)
    for _ in range(200):
        correction.moved(300, 10.0)
    # The shown factor follows as soon as it is a quantum away.
    assert correction.model.transfer_s(300) == pytest.approx(10.0, rel=0.02)
    assert correction.model.transfer_s(0) == pytest.approx(4.0, rel=0.02)
    assert correction.model.scale == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("seconds", [1e3, 1e-6])
def test_a_single_outlier_changes_nothing_and_two_little(seconds):
    correction = Correction(MODEL)
    correction.passed(SPEC, MIXED, seconds)
    assert WEIGHT * LIMIT < QUANTUM
    assert correction.model is MODEL
    correction.passed(SPEC, MIXED, seconds)
    assert abs(math.log(correction.model.scale[2])) == pytest.approx(2 * WEIGHT * LIMIT)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_pass_without_a_duration_says_nothing(seconds):
    correction = Correction(MODEL)
    for _ in range(50):
        correction.passed(SPEC, DECODE, seconds)
    assert correction.model is MODEL


def test_a_model_that_is_right_but_for_noise_is_hardly_ever_another():
    correction, models = Correction(MODEL), set()
    for number in range(1000):
        correction.passed(SPEC, DECODE, (0.9, 1.1, 1.03, 0.97, 1.0)[number * number % 5])
        models.add(correction.model)
    assert len(models) <= 3


@pytest.mark.parametrize(
    ("policy", "roles", "kinds"),
    [
        (Colocated, (Role.MIXED,), ("prefill", "decode")),
        (ChunkedColocated, (Role.MIXED,), ("decode", "mixed")),
        (Disaggregated, (Role.PREFILL, Role.DECODE), ("prefill", "decode")),
    ],
)
def test_a_cluster_twice_as_slow_as_its_model_is_predicted_within_five_percent_after_60_passes(policy, roles, kinds):
    fast, slow = LatencyModel((5e-3, 1e-3, 0.0, 2e-3, 1e-6, 0.0)), LatencyModel((1e-2, 2e-3, 0.0, 4e-3, 2e-6, 0.0))
    w = World([spec(index, role) for index, role in enumerate(roles)], policy(), fast, correct=True, actual=slow)
    w.add(*(ask(n, 5 + n % 9, 12, 0.15 * n) for n in range(120)))
    passes = {"prefill": [], "decode": [], "mixed": []}
    for one in w.run().iterations:
        kind = one.kind
        passes[kind].append(one.predicted_s / (one.finished_s - one.started_s))
    for kind in kinds:
        assert passes[kind][0] == pytest.approx(0.5)
        assert passes[kind][60:] == pytest.approx([1.0] * len(passes[kind][60:]), rel=0.05)
        assert len(passes[kind]) > 100


def test_whole_transfers_correct_the_senders_constants_and_streamed_ones_do_not():
    def after(stream_from):
        fast, slow = LatencyModel(transfer_alpha_s=1e-3), LatencyModel(transfer_alpha_s=2e-3)
        w = World(
            [spec(0, Role.PREFILL), spec(1, Role.DECODE)], Disaggregated(stream_from), fast, correct=True, actual=slow
        )
        w.add(*(ask(n, 30, 3, 0.1 * n) for n in range(60)))
        assert {one.streamed for one in w.run().transfers} == {stream_from is not None}
        return [lane.latency.transfer_alpha_s for lane in w.controller.books.instances]

    assert after(None) == [pytest.approx(2e-3, rel=0.05), 1e-3]
    assert after(1) == [1e-3, 1e-3]


def test_a_log_of_a_corrected_controller_replays_with_the_same_predictions(tmp_path):
    specs, told = [spec(0, Role.PREFILL), spec(1, Role.DECODE)], Collector()
    log = EventLog(tmp_path / "events.jsonl", told)
    log.begin(Header("dynamic", None, tuple(specs), (LatencyModel(),) * 2, 60.0, correct=True))
    w = World(specs, Dynamic(), sink=log, correct=True, actual=LatencyModel((1e-3, 4e-3, 0.0, 1e-3, 0.0, 0.0)))
    handle = w.controller.handle
    w.controller.handle = lambda event, now: log.handle(SimpleNamespace(handle=handle), event, now)
    w.add(*(ask(n, 5 + n % 9, 6, 0.1 * n) for n in range(30)))
    w.run()
    replayed = rerun.replay(read(tmp_path / "events.jsonl"))
    assert replayed.difference == "" and replayed.commands > 100
    assert replayed.report.iterations == told.iterations
    assert any(lane.latency.scale != (1.0, 1.0, 1.0) for lane in w.controller.books.instances)


def test_a_simulation_is_not_corrected_unless_it_is_asked_for():
    w = World([SPEC], Colocated(), MODEL, actual=LatencyModel())
    w.add(*(ask(n) for n in range(30)))
    w.run()
    assert w.controller.books.instances[0].latency is MODEL


def test_runs_are_not_corrected():
    with pytest.raises(ValueError, match="max_steps is 8; allowed with correct, which looks at every pass: 1"):
        World([SPEC], Colocated(), machine=lambda _: None, max_steps=8, correct=True)
