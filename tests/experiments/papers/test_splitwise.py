"""Splitwise's clusters, slowdowns, searches and transfers, on lengths of its own."""

import json
import math

import pytest

from pdjax.experiments import reproduce
from pdjax.experiments.papers import splitwise, splitwise_cost
from pdjax.experiments.papers.outcome import Setup
from pdjax.experiments.papers.splitwise import CLUSTERS
from pdjax.experiments.papers.splitwise_clusters import (
    LIMITS,
    Case,
    MixedBatching,
    Slowdowns,
    Workload,
    azure,
    build,
    failing,
    max_rate,
)
from pdjax.experiments.papers.splitwise_machines import A100, H100, L40, MEASURED, SIMULATED, Design, machine
from pdjax.experiments.papers.splitwise_transfer import cost
from pdjax.latency import Load
from pdjax.messages import Role
from pdjax.record import RequestRecord, Timeline
from pdjax.request import SLO, Request, SamplingParams, State
from pdjax.schedulers.base import Place
from tests.views import Ask, Cluster, views

BLOOM = "bloom-176b"
SHORT = Workload("short", (512, 1024), (20, 40))


def case(duration_s=4.0, engine=MEASURED):
    return Case(SHORT, BLOOM, engine, duration_s, seed=0)


# --- clusters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", ["conv", "code"])
def test_clusters_of_equal_power_and_of_equal_cost_are_that_to_six_percent(workload):
    power = [design.power for design in CLUSTERS["equal power", workload]]
    dollars = [design.dollars for design in CLUSTERS["equal cost", workload]]
    assert max(power) / min(power) < 1.06
    assert max(dollars) / min(dollars) < 1.06


def test_a_cluster_has_its_machines_by_role_and_decides_pass_by_pass():
    specs = build(Design("HA", H100, 2, A100, 1), BLOOM, MEASURED).specs
    assert [spec.role for spec in specs] == [Role.PREFILL, Role.PREFILL, Role.DECODE]
    assert {spec.devices for spec in specs} == {8} and {spec.max_in_flight for spec in specs} == {1}
    assert [spec.role for spec in build(Design("A", A100, 2), BLOOM, MEASURED).specs] == [Role.MIXED] * 2


def test_l40_is_slower_than_a100_in_every_pass_and_holds_less():
    slow, fast = (machine(kind, "llama2-70b", MEASURED) for kind in (L40, A100))
    spec = build(Design("A", A100, 1), "llama2-70b", MEASURED).specs[0]
    for load in (Load(((128, 0),)), Load(((2048, 0),)), Load((), 1, 1, 1), Load((), 64, 64, 64)):
        assert slow.latency.iteration_s(spec, load) > fast.latency.iteration_s(spec, load)
    assert slow.kv_tokens < fast.kv_tokens


def test_the_baseline_counts_a_prompt_that_is_being_computed_as_one_that_waits():
    there = Cluster(views(Role.MIXED, Role.MIXED))
    there.instances[0].busy_s, there.instances[1].rows = 0.5, 3
    place = MixedBatching().place(Ask(), there)
    assert isinstance(place, Place) and (place.prefill, place.decode) == (1, 1)


# --- slowdowns ------------------------------------------------------------------------------------------------------


def record(state, *token_s):
    return RequestRecord("0", 10, (0,) * len(token_s), state, "length", SLO(), Timeline(1.0, token_s=list(token_s)))


def request(tokens):
    return Request(0, (0,) * 10, SamplingParams(max_tokens=tokens), arrival_s=1.0)


def test_slowdowns_compare_with_the_same_request_alone():
    sink = Slowdowns(lambda prompt: (100.0, 50.0))
    sink.done(request(3), record(State.FINISHED, 1.2, 1.3, 1.5))
    assert sink.values == {
        "TTFT": [pytest.approx(2.0)],
        "TBT": [pytest.approx(3.0)],
        "E2E": [pytest.approx(500 / 200)],
    }


def test_an_answer_of_one_token_has_no_time_between_tokens():
    sink = Slowdowns(lambda prompt: (100.0, 50.0))
    sink.done(request(1), record(State.FINISHED, 1.2))
    assert sink.values == {"TTFT": [pytest.approx(2.0)], "TBT": [], "E2E": [pytest.approx(2.0)]}


def test_a_request_that_did_not_finish_is_endlessly_slow():
    sink = Slowdowns(lambda prompt: (100.0, 50.0))
    sink.done(request(3), record(State.FAILED))
    assert sink.values == {name: [math.inf] for name in ("TTFT", "TBT", "E2E")}


def test_a_limit_that_is_just_reached_is_kept():
    assert failing(LIMITS) == []
    assert failing(LIMITS | {("TBT", 50): 1.26, ("TTFT", 99): 6.1}) == ["TTFT P99", "TBT P50"]
    assert failing(LIMITS | {("TBT", 50): 2.5, ("TTFT", 99): 6.1}, relaxed=2) == ["TTFT P99"]


def test_a_request_that_has_the_cluster_to_itself_is_as_slow_as_alone():
    found = case(duration_s=1.0).play(Design("A", A100, 1), 1.0)
    assert all(value == pytest.approx(1.0) for value in found.values())


# --- lengths --------------------------------------------------------------------------------------------------------


def test_lengths_are_drawn_each_for_themselves_and_longer_draws_begin_alike():
    drawn = SHORT.draw(200, seed=3)
    assert set(drawn) == {(prompt, answer) for prompt in SHORT.prompts for answer in SHORT.answers}
    assert SHORT.draw(50, seed=3) == drawn[:50] and SHORT.draw(200, seed=4) != drawn


def test_requests_without_tokens_are_left_out_of_a_trace(tmp_path):
    (tmp_path / "azure").mkdir()
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50,9,0\r\n"
    )
    (tmp_path / "azure" / "AzureLLMInferenceTrace_conv.csv").write_text(text)
    assert azure(tmp_path, "conv") == Workload("conv", (374,), (44,))


def test_without_a_data_folder_it_is_told_so():
    with pytest.raises(ValueError, match="data is not given"):
        splitwise.run(Setup(None, True, 0, print))


# --- searches -------------------------------------------------------------------------------------------------------


def test_the_highest_rate_lies_between_one_that_keeps_all_limits_and_one_that_does_not():
    found = max_rate(case(), Design("AA", A100, 2, A100, 1), tolerance=0.2)
    kept = [rate for rate, slowdowns in found.runs if not failing(slowdowns)]
    broken = [rate for rate, slowdowns in found.runs if failing(slowdowns)]
    assert found.rate == max(kept) < min(broken) <= 1.2 * found.rate and found.why


def test_steps_of_the_authors_simulator_are_no_longer_for_more_rows():
    spec = build(Design("A", A100, 1), BLOOM, SIMULATED).specs[0]
    simulated, measured = (machine(A100, BLOOM, engine).latency for engine in (SIMULATED, MEASURED))
    one, many = Load((), 1, 1, 1), Load((), 64, 64, 64)
    assert simulated.iteration_s(spec, many) < 1.01 * simulated.iteration_s(spec, one)
    assert measured.iteration_s(spec, many) > 1.9 * measured.iteration_s(spec, one)


def test_the_cheapest_cluster_keeps_the_limits_and_one_machine_less_does_not():
    here = case()
    best = splitwise_cost.cheapest(here, Design("HA", H100, 1, A100, 1), 12.0)
    assert isinstance(best, Design) and not failing(here.play(best, 12.0))
    for prompts, tokens in ((best.prompts - 1, best.tokens), (best.prompts, best.tokens - 1)):
        if prompts and tokens:
            assert failing(here.play(Design("HA", H100, prompts, A100, tokens), 12.0))


def test_limits_that_no_number_of_machines_keeps_are_named():
    slow = Case(SHORT, "llama2-70b", MEASURED, 4.0, seed=0)
    assert "TBT P50" in splitwise_cost.cheapest(slow, Design("L", H100, 1, L40, 1), 2.0)


# --- transfers ------------------------------------------------------------------------------------------------------


def test_kv_as_a_whole_is_waited_for_and_layer_by_layer_all_but_the_last_layer_is_hidden():
    whole, layers = (cost(A100, BLOOM, 1e11, (1000, 3), streamed=streamed) for streamed in (False, True))
    seconds = 1000 * 2 * 70 * 14336 * 2 / 1e11
    assert whole.visible_ms == pytest.approx(1e3 * seconds)
    assert layers.visible_ms == pytest.approx(1e3 * seconds / 70)
    assert whole.second_token == pytest.approx(1e3 * seconds / 48.76)


# --- the whole ------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # some thirty simulations
def test_a_quick_run_has_rows_a_summary_and_a_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    (tmp_path / "azure").mkdir()
    for name in ("conv", "code"):
        path = tmp_path / "azure" / f"AzureLLMInferenceTrace_{name}.csv"
        path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,512,9\n1,1500,20\n2,4000,30\n")
    monkeypatch.setattr(splitwise, "QUICK_S", 0.5)
    monkeypatch.setattr(splitwise, "QUICK_TOLERANCE", 0.5)
    said = []
    outcome = splitwise.run(Setup(tmp_path, True, 0, said.append))
    assert len(said) == len(outcome.summary["splitwise"]) == 8
    assert {row.what for row in outcome.rows if row.reached} >= {"what the user waits for"}
    json.dumps([reproduce.entry(row) for row in outcome.rows] + outcome.summary["splitwise"], allow_nan=False)
    assert outcome.plot is not None
    outcome.plot(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
