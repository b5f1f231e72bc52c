"""The mix of prompts is the one that was asked for, and what is said of gaps follows from the tokens' times."""

import dataclasses
import json

import pytest
from absl import flags
from absl.testing import flagsaver

import pdjax
from pdjax import report
from pdjax.config import EngineConfig
from pdjax.experiments import interference, measured
from pdjax.experiments.virtual import Virtual
from pdjax.latency import LatencyModel
from pdjax.messages import Role
from pdjax.models.presets import PRESETS
from pdjax.record import IterationRecord, RequestRecord, Timeline, TransferRecord
from pdjax.report import Report
from pdjax.request import SLO, State
from pdjax.schedulers import SCHEDULERS
from pdjax.testing import spec

# A prompt token takes 1 ms, a row of a step 10 ms.
MODEL = LatencyModel(iteration=(0.0, 1e-3, 0.0, 1e-2, 0.0, 0.0))
ASKED = {"instances": 2, "rows": 2, "prompt": 48, "share": 0.2}
MIX = interference.Mix(lead_s=1.0, period_s=0.5, periods=2, row_tokens=10, prefill_busy=0.5)


def request(name, arrival_s, *token_s):
    marks = Timeline(arrival_s, finished_s=token_s[-1], token_s=list(token_s))
    return RequestRecord(name, 5, (0,) * len(token_s), State.FINISHED, "length", SLO(), marks, 0, 0)


def test_a_period_has_the_passes_of_a_prompt_and_the_steps_beside_them():
    mix = interference.mix(MODEL, spec(0, Role.MIXED), seconds=1.0, **ASKED)  # chunks of 16: 3 passes, so 12 steps
    assert mix.period_s == pytest.approx(0.048 + 12 * 0.020)
    assert mix.periods == 3
    assert mix.row_tokens == interference.LEAD_STEPS + 36
    assert mix.prefill_busy == pytest.approx(2 * 0.048 / 0.288)


def test_seconds_for_less_than_two_prompts_are_refused():
    with pytest.raises(ValueError, match=r"seconds is 0\.5; allowed: at least 0\.576"):
        interference.mix(MODEL, spec(0, Role.MIXED), seconds=0.5, **ASKED)


def test_prompts_without_room_for_an_answer_are_refused():
    with pytest.raises(ValueError, match=r"prompt_tokens is 255; allowed: at most 254"):
        interference.mix(MODEL, spec(0, Role.MIXED), seconds=1.0, **ASKED | {"prompt": 255})


def test_rows_come_first_and_then_a_prompt_for_each_instance_every_period():
    both = interference.requests(MIX, rows=3, prompt=48, instances=2, vocab_size=100, max_model_len=64, seed=1)
    assert [item.arrival_s for item in both.items] == [0.0, 0.0, 0.0, 1.0, 1.0, 1.5, 1.5]
    assert [item.sampling.max_tokens for item in both.items] == [10] * 3 + [interference.ANSWER] * 4
    assert interference.without_prompts(both).items == both.items[:3]


def test_a_prefill_first_instance_has_the_share_that_was_asked_for(tmp_path):
    virtual = Virtual(EngineConfig(prefill_chunk=48, decode_max_batch=6), PRESETS["smollm2-135m"])
    one = dataclasses.replace(spec(0, Role.MIXED), max_chunk=48, max_rows=6, max_model_len=1024)
    asked = ASKED | {"prompt": 512, "seconds": 20.0}
    mix = interference.mix(virtual.model_of(one), one, **asked)
    both = interference.requests(mix, rows=4, prompt=512, instances=2, vocab_size=100, max_model_len=1024, seed=0)
    played = virtual.play("colocated", both)
    point = measured.Point("p", report.write_requests(tmp_path, {"p": played}), played, 0)
    outcome = interference.outcome(point, mix)
    assert outcome["prompt_share_of_iterations"] == pytest.approx(0.2, abs=0.02)
    assert outcome["placed"] == [(0, 0), (1, 1)]


def test_gaps_count_within_the_window_and_of_rows_only():
    records = [
        request("row-0", 0.0, 0.9, 1.1, 1.3, 1.9, 2.1),  # 0.9 to 1.1 begins before the prompts
        request("row-1", 0.0, 1.0, 1.8, 2.2),  # 1.8 to 2.2 ends behind the last period
        request("prompt-0", 1.0, 1.2, 1.25),
    ]
    begin_s, end_s = interference.window(records, MIX)
    assert (begin_s, end_s) == (1.0, 2.0)
    assert [ms for _, ms in interference.gaps_ms(records, begin_s, end_s)] == pytest.approx([200, 600, 800])
    assert interference.tpots_ms(records, begin_s, end_s) == pytest.approx([400, 800])


def test_the_window_ends_with_the_first_row():
    records = [request("row-0", 0.0, 1.1, 1.4), request("row-1", 0.0, 1.1, 1.9)]
    assert interference.window(records, MIX) == (1.0, 1.4)


def test_gaps_while_kv_moves_and_passes_with_prompts_are_counted(tmp_path):
    records = [request("row-0", 0.0, 0.9, 1.0, 1.1, 1.3, 2.0), request("prompt-0", 1.0, 1.2, 1.25)]
    iterations = [
        IterationRecord(0, 0, 16, 0, 1.0, 1.1),  # an instance without rows does not count
        IterationRecord(1, 0, 0, 1, 1.0, 1.1),
        IterationRecord(1, 1, 16, 1, 1.1, 1.3),
        IterationRecord(1, 2, 0, 1, 1.3, 2.0, steps=2),
    ]
    moves = [TransferRecord("prompt-0", 0, 1, 4096, 1.15, 1.25)]
    played = Report(records, iterations, moves, 2.0, (spec(0, Role.PREFILL), spec(1, Role.DECODE)))
    point = measured.Point("p", report.write_requests(tmp_path, {"p": played}), played, 0)
    outcome = interference.outcome(point, MIX)
    assert outcome["gaps"] == 3
    assert outcome["prompt_share_of_iterations"] == 0.25
    assert outcome["itl_ms_while_kv_moves"]["max"] == pytest.approx(200)
    assert outcome["prompt_ttft_ms"]["p50"] == pytest.approx(200)


class VirtualEngine:
    """Serves in virtual time."""

    compiles_while_serving = 0

    def __init__(self, config):
        self._config, self._virtual = config, Virtual(config, PRESETS[config.model])
        self.specs = self._virtual.specs(SCHEDULERS[config.scheduler](None))
        self.latency = tuple(self._virtual.model_of(spec) for spec in self.specs)

    def replay(self, workload):
        return self._virtual.play(self._config.scheduler, workload)

    def wait_idle(self, timeout_s):
        return True

    def close(self):
        pass


def test_in_virtual_time_prompts_stall_rows_beside_them_and_not_those_apart(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pdjax, "Engine", VirtualEngine)
    for picture in ("latency_by_run", "timeline"):  # have tests of their own, and take long
        monkeypatch.setattr(pytest.importorskip("pdjax.plots"), picture, lambda runs, path: None)
    with flagsaver.flagsaver():
        flags.FLAGS(["x", "--model=tiny", "--prefill_chunk=48", "--seconds=12"])
        configs = {name: interference.config(name) for name in interference.POINTS}
        interference.measure(configs, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    over = summary["itl_p95_over_pure_decode"]
    assert over["prefill_first"] > 3 and over["disaggregated"] < 1.3 < over["chunked"] < over["prefill_first"]
    assert set(summary["tpot_p95_over_pure_decode"]) == set(over)
    for name in summary["points"]:
        assert measured.judge(tmp_path / "points" / name / "requests.jsonl").attainment == 1.0
    assert "prefill-first: ITL P95 is" in capsys.readouterr().out
    assert (tmp_path / "interference.png").exists()
