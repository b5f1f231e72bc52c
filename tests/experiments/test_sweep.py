"""Searches over rates that share runs, with a system whose goodput is known."""

import math

import pytest

from pdjax import workload
from pdjax.experiments import compare_tables
from pdjax.experiments.sweep import Effort, Played, Sweep, scaled
from pdjax.request import SLO
from pdjax.workload import Workload

POINTS = {"loose": SLO(ttft_ms=400.0), "tight": SLO(ttft_ms=100.0)}
EFFORT = Effort(seeds=2, window_s=10, least=10, most=10, max_runs=6, tolerance=0.05)


def make(rate: float, seed: int, count: int, slo: SLO) -> Workload:
    return workload.parse(
        "fixed:3,2", num_requests=count, vocab_size=9, max_model_len=9, rate=rate, arrival="uniform", seed=seed, slo=slo
    )


class System:
    """Every TTFT is `slow_ms` times the rate: the limit L is kept up to the rate L / slow_ms."""

    def __init__(self, slow_ms: float) -> None:
        self.slow_ms = slow_ms
        self.names: list[str] = []

    def __call__(self, name: str, asked: Workload) -> Played:
        self.names.append(name)
        rate = 1 / asked.items[1].arrival_s
        ttft_ms = self.slow_ms * rate
        numbers = dict.fromkeys(
            ("num_requests", "completed", "rejected", "duration_s", "throughput_rps", "output_tokens_per_s"), 1.0
        ) | {"ttft_ms": {}, "tpot_ms": {}}
        return Played(lambda slo: (ttft_ms <= (slo.ttft_ms or math.inf),) * len(asked.items), numbers)


def sweep_of(**systems: System) -> Sweep:
    sweep = Sweep(POINTS, make, EFFORT, aware=["dynamic"])
    for name, system in systems.items():
        sweep.find(name, system, dict.fromkeys(POINTS, 2.0))
    return sweep


def test_goodput_is_found_at_every_point() -> None:
    sweep = sweep_of(colocated=System(100))
    assert sweep.goodput("colocated", "loose").value == pytest.approx(4, rel=0.06)
    assert sweep.goodput("colocated", "tight").value == pytest.approx(1, rel=0.06)


def test_runs_of_a_scheduler_that_looks_at_no_limit_are_judged_by_all() -> None:
    blind, aware = System(100), System(100)
    sweep_of(colocated=blind, dynamic=aware)
    assert len(blind.names) < len(aware.names)
    assert len(set(blind.names)) == len(blind.names)
    assert blind.names[0] == "colocated-seed0-rate2"
    assert aware.names[:2] == ["dynamic-loose-seed0-rate2", "dynamic-tight-seed0-rate2"]


def test_every_search_has_a_run_when_the_time_is_up() -> None:
    sweep = Sweep(POINTS, make, Effort(1, 10, 10, 10, 6, budget_s=1e-9), aware=["dynamic"])
    system = System(100)
    sweep.find("dynamic", system, dict.fromkeys(POINTS, 2.0))
    assert system.names == ["dynamic-loose-seed0-rate2", "dynamic-tight-seed0-rate2"]


def test_every_search_goes_on_after_its_first_run() -> None:
    sweep = Sweep(POINTS, make, Effort(1, 10, 10, 10, max_runs=2), aware=["dynamic"])
    system = System(100)
    sweep.find("dynamic", system, dict.fromkeys(POINTS, 2.0))
    first, second = system.names[:2], system.names[2:]
    assert first == ["dynamic-loose-seed0-rate2", "dynamic-tight-seed0-rate2"]
    assert second == ["dynamic-loose-seed0-rate4", "dynamic-tight-seed0-rate0.5"]


def test_a_run_has_the_requests_that_arrive_in_its_window() -> None:
    effort = Effort(seeds=1, window_s=30, least=10, most=60, max_runs=1)
    assert [effort.count(rate) for rate in (0.1, 1.0, 9.0)] == [10, 30, 60]


def test_scales_replay_only_who_looks_at_the_limits() -> None:
    sweep = Sweep(POINTS, make, EFFORT, aware=["dynamic"])
    blind, aware = System(100), System(100)
    for name, system in (("colocated", blind), ("dynamic", aware)):
        sweep.scale(name, system, "tight", 2.0, (0.5, 1.0, 2.0))
    assert (len(blind.names), len(aware.names)) == (1, 3)
    for name in ("colocated", "dynamic"):
        assert [sweep.attainment(name, "tight", scale) for scale in (0.5, 1.0, 2.0)] == [0, 0, 1]
    assert sweep.attainment("dynamic", "loose", 1.0) is None


def test_scaled_limits_leave_out_what_is_no_limit() -> None:
    assert scaled(SLO(ttft_ms=10.0, e2e_ms=4.0), 1.5) == SLO(ttft_ms=15.0, e2e_ms=6.0)


def test_ratios_name_the_better_baseline() -> None:
    sweep = sweep_of(colocated=System(200), colocated_chunked=System(100), disaggregated=System(50), dynamic=System(25))
    found = compare_tables.ratios(sweep)["tight"]
    assert found["disaggregated_over_colocated"] == pytest.approx(2, rel=0.1)
    assert found["disaggregated_over_colocated_under"] == "colocated_chunked"
    assert found["dynamic_over_best"] == pytest.approx(2, rel=0.1)
    assert found["dynamic_over_best_under"] == "disaggregated"
    low, high = found["dynamic_over_best_interval"]
    assert low <= found["dynamic_over_best"] <= high


def test_a_line_of_a_run_has_the_attainment_at_all_limits_it_stands_for() -> None:
    sweep = sweep_of(colocated=System(100), dynamic=System(100))
    lines = compare_tables.results(sweep, "fixed:3,2", {})["points"]
    assert lines[0]["attainment"] == {"loose": 1.0, "tight": 0.0}
    assert next(line for line in lines if line["scheduler"] == "dynamic")["attainment"] == {"loose": 1.0}
