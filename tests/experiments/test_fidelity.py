"""Real and simulated runs side by side: errors by hand, which points count, and runs whose real side is a second
simulation."""

import dataclasses

import pytest

from pdjax import metrics
from pdjax.config import EngineConfig
from pdjax.experiments import fidelity_runs as fidelity
from pdjax.experiments import fidelity_tables
from pdjax.experiments.compare_tables import COMPARED
from pdjax.experiments.fidelity_tables import Point, Side
from pdjax.experiments.virtual import Virtual
from pdjax.latency import LatencyModel
from pdjax.models.presets import PRESETS

# 10 ms per pass, 1 ms per prompt token, 2 ms per row.
MODEL = LatencyModel((0.01, 0.001, 0.0, 0.002, 0.0, 0.0))
CONFIG = EngineConfig(model="tiny", scheduler="colocated", max_model_len=512, prefill_chunk=64)
VIRTUAL = Virtual(CONFIG, PRESETS["tiny"], lambda spec: MODEL)
PLAN = fidelity.course(VIRTUAL, "uniform:32-96,4-12", count=30, seed=0, extra=2, attempts=3)
BIAS = {"prefill": 0.01, "decode": -0.02, "mixed": None}
DRIFT = {"decode": 0.03}


def side(met: int, of: int = 100, ttft: float = 100.0, tpot: float = 10.0) -> Side:
    return Side((True,) * met + (False,) * (of - met), (ttft, 2 * ttft), (tpot, 2 * tpot))


def point(real: int, simulated: int, scheduler: str = "colocated") -> Point:
    virtual = {"slower": 0.0, "by_profile": (real + 2) / 100, "around": (real + 1) / 100, "as_it_was": real / 100}
    return Point(scheduler, 1.0, side(real), side(simulated), **virtual, bias=BIAS, drift=DRIFT)


def test_errors_are_points_of_attainment() -> None:
    assert point(70, 66).error == pytest.approx(-4)
    mean, largest = fidelity_tables.errors([point(70, 66), point(50, 52), point(90, 90)]) or (0, 0)
    assert (mean, largest) == (pytest.approx(2), pytest.approx(4))


@pytest.mark.parametrize(
    ("real", "simulated", "counts"), [(99, 97, False), (99, 60, True), (60, 99, True), (10, 20, False), (95, 99, True)]
)
def test_a_point_counts_where_one_of_both_sides_is_in_the_band(real: int, simulated: int, counts: bool) -> None:
    assert point(real, simulated).counts is counts


def test_without_a_point_that_counts_there_is_no_error() -> None:
    found = fidelity_tables.summary([point(99, 100)], needed=1)
    assert found["mean_abs_error_points"] is None and not found["ok"]
    assert "other rates" in fidelity_tables.verdict(found)


def test_errors_at_another_speed_are_told_beside() -> None:
    found = fidelity_tables.summary([point(70, 60), point(50, 45), point(99, 98)], needed=2)
    assert found["mean_abs_error_points"] == pytest.approx(7.5)  # the last does not count
    assert found["abs_error_points_with"]["around"] == pytest.approx({"mean": 1.0, "max": 1.0})
    assert found["abs_error_points_with"]["by_profile"] == pytest.approx({"mean": 2.0, "max": 2.0})
    assert "alone: 2.0 and 2.0; with passes as those in front" in fidelity_tables.verdict(found)
    assert "behind: 1.0 and 1.0; as all were: 0.0 and 0.0" in fidelity_tables.verdict(found)


def test_both_bars_and_enough_points_are_needed() -> None:
    good = [point(90, 88), point(70, 72), point(50, 50)]
    assert fidelity_tables.summary(good, needed=3)["ok"]
    few = fidelity_tables.summary(good, needed=4)
    assert not few["ok"] and "too few points" in fidelity_tables.verdict(few)
    assert not fidelity_tables.summary([*good, point(60, 51)], needed=3)["ok"]  # 9 points at most
    assert not fidelity_tables.summary([point(90, 86), point(70, 66), point(50, 46)], needed=3)["ok"]  # 4 in the mean


def test_requests_are_judged_alike_one_by_one() -> None:
    half = dataclasses.replace(point(2, 2), real=Side((True, False, True, False), (1, 1), (1, 1)))
    assert dataclasses.replace(half, simulated=Side((True, True, False, False), (1, 1), (1, 1))).alike == 0.5


def test_percentiles_are_compared_relative_to_real_ones() -> None:
    sides = {"real": side(50, ttft=100.0, tpot=10.0), "simulated": side(50, ttft=110.0, tpot=9.0)}
    slow = dataclasses.replace(point(50, 50), **sides)
    found = fidelity_tables.latency_errors([slow])
    assert found["ttft_ms_p50"] == pytest.approx(0.1) and found["tpot_ms_p90"] == pytest.approx(0.1)


def test_the_table_shows_both_sides() -> None:
    table = fidelity_tables.table([point(70, 66), point(99, 98)], slowness=1.03)
    cells = [list(column.cells) for column in table.columns]
    assert cells[2] == ["70.0 / 66.0", "99.0 / 98.0"]
    assert cells[3] == ["-4.0", "(-1.0)"]  # in brackets: does not count
    assert cells[5:8] == [["+2.0"] * 2, ["+1.0"] * 2, ["+0.0"] * 2]  # by the profile, around, and as it was
    assert (cells[9], cells[10]) == (["+1 | -2 | -"] * 2, ["- | +3 | -"] * 2)


def test_where_all_real_attainments_lie_on_one_side_another_rate_is_tried() -> None:
    assert fidelity.another([(1.0, side(98)), (2.0, side(97))]) == pytest.approx(2.0 * fidelity.STEP)
    assert fidelity.another([(1.0, side(20)), (2.0, side(10))]) == pytest.approx(1.0 / fidelity.STEP)
    between = fidelity.another([(1.0, side(98)), (2.0, side(10))])
    assert 1.0 < between < 2.0


def test_limits_are_multiples_of_what_an_idle_instance_takes() -> None:
    assert PLAN.slo.ttft_ms == pytest.approx(1e3 * fidelity.LIMITS.ttft * (0.01 + 64 * 0.001))
    assert PLAN.slo.tpot_ms == pytest.approx(1e3 * fidelity.LIMITS.tpot * (0.01 + 8 * 0.002))  # 6 rows are padded to 8


@pytest.mark.parametrize("scheduler", COMPARED)
def test_the_same_latencies_give_the_same_attainment(scheduler: str) -> None:
    config = dataclasses.replace(CONFIG, scheduler=scheduler)
    found = fidelity.point(PLAN, config, 5.0, fidelity.in_virtual_time(VIRTUAL, config))
    assert found.real == found.simulated
    assert found.real.attainment == found.by_profile == found.around == found.as_it_was
    assert found.alike == 1.0 and found.attempts == 1


def test_how_slow_a_machine_is_is_told_by_requests_that_are_not_judged() -> None:
    slow = fidelity.in_virtual_time(fidelity.slowed(VIRTUAL, 1.5), CONFIG)
    found = fidelity.point(PLAN, CONFIG, 8.0, slow)
    assert found.by_profile > found.real.attainment > found.slower
    assert found.real.attainment == found.around == found.as_it_was
    assert found.real.met == found.simulated.met
    assert found.real.ttft_ms == pytest.approx(found.simulated.ttft_ms)
    assert found.real.tpot_ms == pytest.approx(found.simulated.tpot_ms)
    assert found.bias["prefill"] == pytest.approx(1 / 1.5 - 1)  # the policy believes the profile


def test_how_fast_the_real_machine_was_is_kept_by_kind_of_pass() -> None:
    play = fidelity.in_virtual_time(VIRTUAL, CONFIG)

    def as_told(name, asked):
        run = play(name, asked)
        took_s = [(one.finished_s - one.started_s) / one.steps for one in run.iterations]
        said_s = [(1 + (BIAS[one.kind] or 0)) * took for one, took in zip(run.iterations, took_s, strict=True)]
        told = [dataclasses.replace(one, predicted_s=s) for one, s in zip(run.iterations, said_s, strict=True)]
        return dataclasses.replace(run, iterations=told)

    assert fidelity.point(PLAN, CONFIG, 5.0, as_told).bias == pytest.approx(BIAS)


def test_requests_in_front_and_behind_are_not_judged() -> None:
    records = list(range(PLAN.count + 2 * PLAN.margin))
    assert len(PLAN.workload(1.0).items) == len(records)
    assert list(PLAN.judged(records)) == records[PLAN.margin : -PLAN.margin]


def late_by(times: float):
    """A machine on which the passes behind the judged requests take so many times as long."""
    play = fidelity.in_virtual_time(VIRTUAL, CONFIG)

    def real(name, asked):
        run = play(name, asked)
        end_s = max(record.timeline.finished_s for record in PLAN.judged(run.records))
        kept = [
            dataclasses.replace(one, finished_s=one.started_s + times * (one.finished_s - one.started_s))
            if one.started_s >= end_s
            else one
            for one in run.iterations
        ]
        return dataclasses.replace(run, iterations=kept)

    return real


def test_of_runs_in_which_the_machine_changed_the_steadiest_counts(monkeypatch) -> None:
    monkeypatch.setattr(fidelity.gauge, "LEAST_S", 0.1)
    runs = iter([late_by(1.1), late_by(1.05), late_by(1.2)])
    found = fidelity.point(PLAN, CONFIG, 5.0, lambda name, asked: next(runs)(name, asked))
    assert found.attempts == PLAN.attempts == 3
    assert found.drift["prefill"] == pytest.approx(0.05)


def test_runs_that_are_alike_are_not_played_for_ever(monkeypatch) -> None:
    monkeypatch.setattr(fidelity.gauge, "LEAST_S", 0.1)
    found = fidelity.point(PLAN, CONFIG, 5.0, late_by(1.1))
    assert found.attempts == PLAN.attempts == fidelity.ATTEMPTS == 3
    assert found.drift["prefill"] == pytest.approx(0.1)


def test_a_run_in_which_the_machine_was_steady_is_the_last(monkeypatch) -> None:
    monkeypatch.setattr(fidelity.gauge, "LEAST_S", 0.1)
    runs = iter([late_by(1.1), late_by(1.01)])
    assert fidelity.point(PLAN, CONFIG, 5.0, lambda name, asked: next(runs)(name, asked)).attempts == 2


def test_rates_are_those_of_the_targets() -> None:
    chosen, seconds = fidelity.rates(PLAN, CONFIG)
    play = fidelity.in_virtual_time(VIRTUAL, CONFIG)
    assert chosen == sorted(chosen) and seconds > 0
    for rate, target in zip(chosen, fidelity.TARGETS, strict=True):
        records = PLAN.judged(play("", PLAN.workload(rate)).records)
        assert sum(metrics.met(record) for record in records) / len(records) == pytest.approx(target, abs=0.12)


def test_more_rates_are_played_until_enough_real_attainments_are_in_the_band() -> None:
    fast = fidelity.in_virtual_time(fidelity.slowed(VIRTUAL, 0.1), CONFIG)
    found = fidelity.compare(PLAN, CONFIG, [1.0], fast)
    assert [one.rate for one in found] == [1.0, 1.25, 1.56]  # `extra` more, each beyond those before


def test_other_instances_than_the_simulated_ones_are_told() -> None:
    mine = VIRTUAL.specs(fidelity.build.scheduler_of(CONFIG))
    fidelity.same_instances(mine, [dataclasses.replace(spec, ranks=(1,)) for spec in mine])
    with pytest.raises(RuntimeError, match="other instances"):
        fidelity.same_instances(mine, [dataclasses.replace(spec, max_rows=3) for spec in mine])


def test_a_picture_is_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    fidelity_tables.scatter([point(70, 66), point(50, 45, "dynamic")], tmp_path / "fidelity.png")
    assert (tmp_path / "fidelity.png").stat().st_size > 1000
