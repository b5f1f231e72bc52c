"""The comparison of answers: a device that computes as the CPU does passes, one that does not is seen."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from pdjax.experiments import gpu_answers
from pdjax.experiments.gpu_answers import PROMPTS, STEPS, Answers, cast, difference, play, replica
from pdjax.experiments.gpu_goals import GOALS
from pdjax.messages import Sampled
from pdjax.models import weights
from pdjax.models.presets import PRESETS
from pdjax.models.sharding import make_mesh

TINY = PRESETS["tiny"]


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(TINY, jax.devices()[:1])


@pytest.fixture(scope="module")
def expected(mesh):
    return play(replica(TINY, weights.random(TINY, mesh, "float32"), mesh))


class Script:
    """Stands for an instance: writes down the prompt parts and the rows of each pass, and who joins with what."""

    config = TINY

    def __init__(self):
        self.passes, self.joins, self.batch = [], [], []

    def run(self, iteration, emit):
        self.joins += iteration.joins
        self.batch = [slot for slot in self.batch if slot not in iteration.leaves]
        self.batch += [join.slot for join in iteration.joins]
        rows = self.batch if iteration.decode else []
        self.passes.append(([len(chunk.tokens) for chunk in iteration.chunks], list(rows)))
        firsts = tuple((chunk.request, 7) for chunk in iteration.chunks if chunk.last)
        return SimpleNamespace(wait=lambda: Sampled(tuple((slot, 7) for slot in rows), firsts))

    def read_kv(self, pages, tokens):
        return np.zeros((1, 2, tokens, 1, 1), np.float32)


def answers(kv, tokens=(1, 2)):
    return Answers({0: list(tokens)}, {0: np.asarray(kv, np.float32).reshape(1, 2, 1, 1, 2)})


def test_errors_are_relative_to_the_norm_of_a_tokens_k_or_v():
    found = difference(answers([3, 4, 0, 1], (1, 5)), answers([3, 4, 0, 2]))
    assert found == {"tokens": 2, "equal": 1, "kv_error": 0.5, "kv_error_mean": 0.25}


def test_prompts_are_packed_chunked_decoded_and_computed_beside_rows():
    script = Script()
    got = play(script)
    decode = [([], [0, 1])] * STEPS
    assert script.passes == [([150, 40], []), ([100], []), *decode, ([120], [0, 1]), *[([], [0, 1, 2])] * STEPS]
    assert {request: len(tokens) for request, tokens in got.tokens.items()} == {0: 10, 1: 10, 2: 5}
    assert {request: kv.shape[2] for request, kv in got.kv.items()} == {0: 159, 1: 149, 2: 124}


def test_tokens_that_are_given_are_the_inputs_of_every_step():
    script = Script()
    play(script, {request: [100 * request + number for number in range(10)] for request in PROMPTS})
    inputs = {
        request: [(join.token, join.position) for join in script.joins if join.slot == request] for request in PROMPTS
    }
    assert inputs[0] == [(number, 150 + number) for number in range(9)]
    assert inputs[2] == [(200 + number, 120 + number) for number in range(4)]


@pytest.mark.slow
def test_three_prompts_are_played_through_every_kind_of_pass(expected):
    steps = {0: 2 * STEPS + 1, 1: 2 * STEPS + 1, 2: STEPS}
    assert {request: len(tokens) for request, tokens in expected.tokens.items()} == {0: 10, 1: 10, 2: 5}
    held = {request: kv.shape[2] for request, kv in expected.kv.items()}
    assert held == {request: PROMPTS[request] + steps[request] for request in PROMPTS}


@pytest.mark.slow
def test_given_its_own_tokens_a_device_answers_as_when_it_runs_freely(mesh, expected):
    again = play(replica(TINY, weights.random(TINY, mesh, "float32"), mesh), expected.tokens)
    assert again.tokens == expected.tokens
    assert difference(again, expected)["kv_error"] < 1e-6


@pytest.mark.slow
def test_other_weights_are_seen_in_the_tokens_and_in_the_kv(mesh, expected):
    found = difference(play(replica(TINY, weights.random(TINY, mesh, "float32", seed=1), mesh)), expected)
    assert found["equal"] < found["tokens"] and found["kv_error"] > GOALS["kv_error_bfloat16"][0]


@pytest.mark.slow
def test_a_weight_of_the_last_layer_that_is_off_by_a_fifth_is_seen(mesh, expected):
    held = weights.random(TINY, mesh, "float32")
    held.layers[1]["wkv"] = jax.device_put(held.layers[1]["wkv"] * 1.2, held.layers[1]["wkv"].sharding)
    assert difference(play(replica(TINY, held, mesh)), expected)["kv_error"] > GOALS["kv_error_bfloat16"][0]


def test_a_cast_rounds_matrices_and_leaves_norms(mesh):
    held = weights.random(TINY, mesh, "float32")
    rounded = cast(held, "bfloat16")
    wide = cast(rounded, "float32")
    assert {array.dtype.name for array in rounded.layers[0].values()} == {"float32", "bfloat16"}
    assert rounded.outer["final_norm"] is held.outer["final_norm"]
    assert np.array_equal(wide.outer["embed"], np.asarray(rounded.outer["embed"]).astype(np.float32))
    assert wide.outer["embed"].sharding == held.outer["embed"].sharding


@pytest.mark.slow
def test_the_cpu_passes_its_own_comparison():
    found = gpu_answers.measure("tiny", *jax.devices()[:2], small=True)
    assert len(found["checks"]) == 3 and all(check["ok"] for check in found["checks"].values()), found


def test_tables_of_the_widest_are_compared_with_the_heads_that_kernels_are_made_for(monkeypatch):
    asked = {}

    def compare(config, device, home, variants):
        asked[config.head_dim] = list(variants)
        return {name: {"tokens": 1, "equal": 1, "kv_error": 0.0} for name in variants}

    monkeypatch.setattr(gpu_answers, "compare", compare)
    checks = {model: gpu_answers.measure(model, None, None)["checks"] for model in ("tiny", "heads")}
    assert (len(checks["tiny"]), len(checks["heads"])) == (3, 4)  # of tokens, too
    assert asked[128] == list(gpu_answers.VARIANTS) and asked[TINY.head_dim] == ["float32", "bfloat16"]
