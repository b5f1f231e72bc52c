"""DistServe's systems and curves, on small samples."""

import dataclasses
import json

import numpy as np
import pytest

from pdjax.experiments.papers import (
    distserve,
    distserve_ablation,
    distserve_bench,
    distserve_curves,
    distserve_queue,
    distserve_transfer,
)
from pdjax.experiments.papers.outcome import Setup
from pdjax.messages import Role
from pdjax.request import SLO

HEADER = (
    "figure,model,dataset,ttft_slo_s,tpot_slo_s,system,num_gpus,x_kind,x,per_gpu_rate_rps,slo_attainment_pct,quality\n"
)
GOODPUTS = "model,dataset,ttft_slo_s,tpot_slo_s,system,num_gpus,goodput90_rps_per_gpu,source\n"
SHORT = ((60, 4), (40, 8))  # prompts and answers


def line(model, system, kind, x, rate, percent, quality="full"):
    return f"fig8,{model},sharegpt,0.25,0.1,{system},1,{kind},{x},{rate},{percent},{quality}\n"


@pytest.fixture
def data(tmp_path):
    """A folder like the published one, with two points a series and short requests."""
    (tmp_path / "distserve").mkdir()
    (tmp_path / "datasets-derived").mkdir()
    figure, goodputs = HEADER, GOODPUTS
    for model in ("opt-13b", "opt-66b"):
        for system in ("distserve", "vllm"):
            figure += line(model, system, "rate", 0.5, 0.5, 100.0) + line(model, system, "slo_scale", 0.01, 0.5, 0.0)
            goodputs += f"{model},sharegpt,0.25,0.1,{system},1,0.5,typed\n"
    (tmp_path / "distserve" / "fig8_digitised.csv").write_text(figure)
    (tmp_path / "distserve" / "goodput90_notebook.csv").write_text(goodputs)
    rows = "".join(f"{prompt},{answer}\n" for prompt, answer in SHORT)
    (tmp_path / "datasets-derived" / "sharegpt_matched_lengths.csv").write_text("prompt_len,output_len\n" + rows)
    return tmp_path


def test_hidden_points_and_other_systems_are_left_out(data):
    path = data / "distserve" / "fig8_digitised.csv"
    kept = line("opt-66b", "vllm", "slo_scale", 1.5, 0.75, 78.0)
    path.write_text(
        HEADER
        + kept
        + line("opt-66b", "distserve", "rate", 0.25, 0.25, "", "hidden")
        + line("opt-13b", "deepspeed", "rate", 0.25, 0.25, 91.0)
        + line("opt-175b", "vllm", "rate", 0.25, 0.25, 10.0)
    )
    assert distserve_curves.read_points(data) == [
        distserve_curves.Point("opt-66b", "vllm", "slo_scale", 1.5, 0.75, 78.0)
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model,system\n", r"lacks the columns x_kind, x, per_gpu_rate_rps, slo_attainment_pct; allowed"),
        (
            HEADER + line("opt-13b", "vllm", "rate", "fast", 0.25, 90.0),
            r"csv:2: could not convert .*'fast'; allowed: n",
        ),
    ],
)
def test_a_file_of_points_that_is_none_is_refused(data, text, message):
    (data / "distserve" / "fig8_digitised.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        distserve_curves.read_points(data)


def test_a_folder_without_the_points_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no distserve/fig8_digitised.csv; allowed"):
        distserve_curves.read_points(tmp_path)


def test_without_a_folder_nothing_is_run():
    with pytest.raises(ValueError, match="data is not given"):
        distserve.run(Setup(None, True, 0, pytest.fail))


def test_the_evaluation_has_3_and_8_gpus_against_1_and_4():
    devices = {
        (model.name, system): distserve_bench.evaluated(model, system).devices
        for model in distserve_bench.MODELS
        for system in distserve_bench.SYSTEMS
    }
    assert list(devices.values()) == [3, 1, 8, 4]


def test_a_stage_has_one_pass_under_way():
    fleet = distserve_bench.evaluated(distserve_bench.MODELS[1], "distserve")
    assert [(spec.role, spec.pp, spec.max_in_flight) for spec in fleet.specs] == [
        (Role.PREFILL, 1, 1),
        (Role.DECODE, 2, 2),
    ]


def test_swap_space_adds_16_gib_of_kv_to_each_gpu_of_a_decode_instance():
    model = distserve_bench.MODELS[0]
    with_swap, without = (distserve_bench.evaluated(model, "distserve", swap=swap).specs for swap in (True, False))
    assert with_swap[0] == without[0]
    tokens = 16 * (with_swap[1].num_pages - without[1].num_pages)
    assert tokens == pytest.approx(16 * 2**30 / (2 * 40 * 5120 * 2), abs=16)


def test_limits_are_kept_by_the_same_request_and_scale_together():
    played = distserve_bench.Played(1.0, np.array([100.0, 100.0, 300.0]), np.array([40.0, 60.0, 40.0]), 0)
    slo = SLO(ttft_ms=200.0, tpot_ms=50.0)
    assert played.met(slo).tolist() == [True, False, False]
    assert played.met(slo, 1.2).tolist() == [True, True, False]
    assert played.met(SLO(tpot_ms=50.0)).tolist() == [True, False, True]


def test_a_seed_has_the_same_requests_at_every_rate():
    fleet = distserve_bench.evaluated(distserve_bench.MODELS[0], "distserve")
    slow, slower = (
        distserve_bench.play(fleet, distserve_bench.policy("distserve"), SHORT, rate, 20, 3) for rate in (0.1, 0.01)
    )
    assert slow.ttft_ms == pytest.approx(slower.ttft_ms)  # everybody is alone: what is left is the prompts' lengths
    assert len(set(slow.ttft_ms.round(3))) == 2


def test_where_decode_is_alone_prompts_take_no_time():
    fleet = distserve_bench.decode_alone("opt-13b", (1, 1))
    played = distserve_bench.play(fleet, distserve_bench.policy("distserve"), [(512, 3)], 0.001, 3, 0)
    assert played.ttft_ms.max() < 0.01
    assert played.tpot_ms == pytest.approx(19.9347 + 2 + (6.269357e-4 + 1e-4) * 513.5 + 0.03850698, rel=1e-4)


@pytest.mark.parametrize(("options", "expected_s"), [({}, 0.1), ({"stages": 2}, 0.1), ({"speedup": 1.5}, 0.1 / 1.5)])
def test_a_prompt_that_meets_nobody_takes_one_pass(options, expected_s):
    assert distserve_queue.mean_ttft_s(1e-3, 20, 0, **options) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("goodputs", "words"),
    [
        ((0.5, 0.5, 0.2, 0.2), "High >= Low > vLLM++ = vLLM"),
        ((0.4, 0.5, 0.3, 0.2), "High < Low > vLLM++ > vLLM"),
        ((0.5, 0.3, 0.3, 0.3), "High >= Low = vLLM++ = vLLM"),
    ],
)
def test_the_order_of_the_ablation_in_words(goodputs, words):
    names = ("High", "Low", "vLLM++", "vLLM")
    found = {name: distserve_ablation.Found(value, "") for name, value in zip(names, goodputs, strict=True)}
    assert distserve_ablation.order(found) == words


def test_kv_of_a_175b_prompt_moves_in_10_ms_inside_nodes_and_in_a_second_between_them():
    fleets = [distserve_transfer.cluster(same=same) for same in (True, False)]
    nbytes = 2048 * fleets[0].specs[0].kv_bytes_per_token
    times = [
        nbytes / min(fleet.network.links[link].bytes_per_s for link in fleet.network.route(0, 1)) for fleet in fleets
    ]
    assert times == pytest.approx([0.0107, 1.03], rel=0.01)


def test_curves_of_a_small_folder_are_compared_and_drawn(data, tmp_path, monkeypatch):
    few = tuple(dataclasses.replace(model, per_gpu=5) for model in distserve_bench.MODELS)
    monkeypatch.setattr(distserve_bench, "MODELS", few)
    rows, summary = distserve_curves.figure_8(Setup(data, True, 0, lambda line: None))
    assert {(point["x"], point["ours"]) for point in summary["fig8_points"]} == {(0.5, 100.0), (0.01, 0.0)}
    assert summary["fig8_mean_abs_error_points"] == 0.0  # short requests keep the limits, and none a hundredth of them
    assert [row.reached for row in rows if row.what.startswith("Figure 8")] == [True] * 5
    json.dumps(summary)
    drawing = pytest.importorskip("pdjax.experiments.papers.distserve_plot", exc_type=ImportError)
    drawing.draw(summary, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
