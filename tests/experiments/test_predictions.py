"""The comparison in virtual time: limits, short runs of every policy, and pictures of what came out."""

import json
from pathlib import Path

import pytest

from pdjax import metrics, workload
from pdjax.config import EngineConfig
from pdjax.experiments import predictions
from pdjax.experiments.sweep import Effort
from pdjax.experiments.virtual import Virtual, requests_of, slo_points
from pdjax.latency import LatencyModel
from pdjax.models.presets import PRESETS
from pdjax.request import SLO
from pdjax.schedulers import SCHEDULERS

# 10 ms per pass, 1 ms per prompt token, 2 ms per row.
MODEL = LatencyModel((0.01, 0.001, 0.0, 0.002, 0.0, 0.0))


@pytest.fixture(scope="module")
def virtual() -> Virtual:
    config = EngineConfig(model="tiny", max_model_len=512, prefill_chunk=64)
    return Virtual(config, PRESETS["tiny"], lambda spec: MODEL)


def test_the_points_are_multiples_of_what_an_idle_instance_takes() -> None:
    points = slo_points(prefill_s=0.1, step_s=0.01)
    assert points["tight_tpot"].ttft_ms == pytest.approx(1000)
    assert points["tight_tpot"].tpot_ms == pytest.approx(13)
    assert points["tight_ttft"].ttft_ms == pytest.approx(200)
    assert points["balanced"].tpot_ms == pytest.approx(20)


def test_limits_come_from_the_mean_request(virtual: Virtual) -> None:
    points, idle = predictions.limits(virtual, "uniform:32-96,10-30")
    assert (idle["prompt_tokens"], idle["context_tokens"]) == (64, 74)
    assert idle["prefill_s"] == pytest.approx(0.01 + 64 * 0.001)
    assert idle["step_s"] == pytest.approx(0.01 + 8 * 0.002)  # 6 rows are padded to 8
    assert points["balanced"].ttft_ms == pytest.approx(4 * 74)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_policy_serves_in_virtual_time(virtual: Virtual, scheduler: str) -> None:
    slo = SLO(ttft_ms=1000.0, tpot_ms=50.0)
    run = predictions.simulate(scheduler, slo, 1.0, num_requests=5, kind="fixed:64,8", virtual=virtual)
    assert len(run.records) == 5
    assert all(metrics.met(record) for record in run.records)


def test_a_rate_stretches_the_same_requests(virtual: Virtual) -> None:
    make = predictions.make_of(virtual, "uniform:32-96,10-30")
    slow, fast = make(1.0, 0, 9, SLO()), make(2.0, 0, 9, SLO())
    assert [item.prompt for item in slow.items] == [item.prompt for item in fast.items]
    assert [item.arrival_s for item in slow.items] == pytest.approx([2 * item.arrival_s for item in fast.items])


def test_text_and_closed_loops_have_no_virtual_time() -> None:
    options = {"vocab_size": 9, "max_model_len": 99}
    with pytest.raises(ValueError, match="workload has 2 clients"):
        requests_of(workload.parse("fixed:3,2", num_requests=4, arrival="closed:2", **options))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="workload item 0 is text"):
        requests_of(workload.parse("chat", num_requests=1, rate=1.0, **options))  # type: ignore[arg-type]


def test_a_comparison_in_virtual_time_ends_as_summary_and_picture(virtual: Virtual, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from pdjax import plots_goodput

    effort = Effort(seeds=1, window_s=20, least=10, most=16, max_runs=2, factor=3.0, tolerance=1.0)
    found = predictions.predictions(virtual, "uniform:32-96,10-30", ["colocated", "disaggregated", "dynamic"], effort)
    summary = json.loads(json.dumps(found.summary()))
    assert summary["simulated"]
    assert set(summary["goodput_ratio"]) == {"tight_tpot", "tight_ttft", "balanced"}
    assert {"disaggregated_over_colocated", "dynamic_over_best"} <= set(summary["goodput_ratio"]["balanced"])
    assert list(summary["other_workloads"]) == [predictions.SHORT_PROMPTS]
    assert {entry["scale"] for entry in summary["scales"]} == set(predictions.SCALES)
    plots_goodput.compare(summary, tmp_path / "compare.png")
    assert (tmp_path / "compare.png").stat().st_size > 0
