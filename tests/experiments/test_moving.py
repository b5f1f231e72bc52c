"""A workload whose mix moves, in virtual time: systems, attainment over time and by phase, and the picture."""

import json
from pathlib import Path

import pytest

from pdjax import workload
from pdjax.config import EngineConfig
from pdjax.experiments import moving
from pdjax.experiments.virtual import Virtual
from pdjax.latency import LatencyModel
from pdjax.messages import Role
from pdjax.models.presets import PRESETS
from pdjax.record import FlipRecord, RequestRecord, Timeline
from pdjax.report import Report
from pdjax.request import SLO, State

KIND = "phases:fixed:60,4@8;fixed:10,20@16*2"


def record(arrival_s: float, ttft_s: float) -> RequestRecord:
    line = Timeline(arrival_s, finished_s=arrival_s + 1, token_s=[arrival_s + ttft_s])
    return RequestRecord("", 3, (1,), State.FINISHED, "length", SLO(ttft_ms=100.0), line)


def test_disaggregated_is_played_in_every_split_of_the_instances() -> None:
    systems = moving.systems(EngineConfig(prefill_instances=1, decode_instances=2))
    assert list(systems) == ["colocated", "disaggregated 1+2", "disaggregated 2+1", "dynamic"]
    assert {config.devices for config in systems.values()} == {3}


def test_attainment_over_time_is_that_of_the_requests_around() -> None:
    # Arrivals at 10 s, 10.5 s, ... 34 s; those before 22 s are late.
    records = [record(10 + number / 2, 0.25 if number < 24 else 0.0625) for number in range(49)]
    points = dict(moving.over_time(records))
    assert (points[0.0], points[24.0]) == (0.0, 1.0)
    assert points[12.0] == pytest.approx(3 / 5)  # of 11, 11.5, 12, 12.5 and 13 s


def test_phases_begin_with_their_first_request() -> None:
    asked = workload.parse(KIND, num_requests=None, vocab_size=9, max_model_len=99, rate=1.0, arrival="uniform")
    starts = moving.phase_starts(KIND, asked)
    assert starts == [{"kind": "fixed:60,4", "start_s": 0.0}, {"kind": "fixed:10,20", "start_s": 7.5}]


def test_a_result_has_attainment_by_phase_and_flips_with_their_durations() -> None:
    records = [record(5.0, 0.0625), record(6.0, 0.25), record(9.0, 0.0625)]
    flip = FlipRecord(0, Role.PREFILL, Role.DECODE, 7.0, 7.5, "why")
    run = Report(records, [], [], 5.0, (), revisions=[flip])
    found = moving.result(run, records, [0.0, 4.0])
    assert found["attainment"] == pytest.approx(2 / 3)
    assert found["by_phase"] == [0.5, 1.0]
    assert found["flips"] == [
        {"instance": 0, "from": "prefill", "to": "decode", "start_s": 2.0, "seconds": 0.5, "reason": "why"}
    ]


def test_a_mix_that_moves_ends_as_summary_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from pdjax import plots_goodput

    configs = moving.systems(EngineConfig(model="tiny", max_model_len=512, prefill_chunk=64, decode_instances=2))
    model = LatencyModel((0.01, 0.001, 0.0, 0.002, 0.0, 0.0))
    virtuals = {name: Virtual(config, PRESETS["tiny"], lambda spec: model) for name, config in configs.items()}
    slo = SLO(ttft_ms=500.0, tpot_ms=60.0)
    rate = moving.sustained(virtuals, KIND, slo, seed=0)
    summary = json.loads(json.dumps(moving.simulate(virtuals, KIND, slo, rate, seed=0)))
    assert set(summary["attainment"]) == set(configs)
    assert max(summary["attainment"].values()) > 0.5
    best = summary["best_static"]
    assert summary["dynamic_over_best_static"] == pytest.approx(
        summary["attainment"]["dynamic"] / summary["attainment"][best]
    )
    moving.table(summary)
    plots_goodput.switch(summary, tmp_path / "switch.png")
    assert (tmp_path / "switch.png").stat().st_size > 0
