"""Passes estimated by a compiler that one can compute by hand: what is added to what it tells, and what fits it."""

import dataclasses
import re

import jax
import pytest

from pdjax import build
from pdjax.aot import estimate
from pdjax.aot.programs import catalog
from pdjax.config import EngineConfig
from pdjax.hardware import Hardware
from pdjax.latency import Load
from pdjax.models.presets import PRESETS
from pdjax.models.sharding import make_meshes
from pdjax.schedulers.base import Traits

TINY = PRESETS["tiny"]  # 2 layers, 8 heads of 16, 4 kv heads
# At the usual efficiency (half of the operations, 0.8 of the bytes) a pair of tokens takes 1 us: 4 x 2 layers x 8 heads
# x 16 = 1024 operations; and so does reading a token of context, 2 x 2 layers x 4 heads x 16 numbers of 4 bytes.
ABACUS = Hardware("abacus", 2 * 1.024e9, 2 * 1.024e9, 1e9, 1.28e9, 1.28e9, 1e8, 1.0, 1.0)
CONFIG = EngineConfig(model="tiny", max_model_len=256, prefill_chunk=64, decode_chunk=64, decode_max_batch=2)


def told(program):
    """Seconds: 1 ms, 2 ms for each row of a layer, 5 ms for the head."""
    name = program.name
    if name.startswith("layer"):
        return 2e-3 * program.args[1].shape[0]
    return 5e-3 if name.startswith("head") else 1e-3


def made(time=told, **changes):
    """(what is estimated of the first instance, its programs)."""
    config = dataclasses.replace(CONFIG, **changes)
    specs = build.specs_of(config, TINY, Traits(), "cpu")
    meshes = make_meshes(TINY, jax.devices()[: specs[0].devices], specs[0].pp)
    programs = list(catalog(specs[0], specs, TINY, meshes, "float32", 3))
    return estimate.passes(specs[0], TINY, ABACUS, programs, time, dtype="float32", kv_dtype="float32"), programs


@pytest.fixture(scope="module")
def passes():
    return made()[0]


def test_layers_count_as_often_as_there_are_beside_embedding_and_head(passes):
    assert passes.compiled[64, 0] == pytest.approx(1e-3 + 2 * 2e-3 * 64 + 5e-3)
    assert passes.compiled[0, 2] == pytest.approx(1e-3 + 2 * 2e-3 * 2 + 5e-3)


def test_attention_is_counted_by_pairs_of_tokens_and_by_what_rows_read(passes):
    prompt = Load(((64, 64),))  # one block of 64 queries attends to two pages of 64
    assert passes.attention_s(prompt) == pytest.approx(64 * 128 * 1e-6)
    rows = Load((), 2, 200, 200)
    assert passes.attention_s(rows) == pytest.approx(200e-6)
    assert passes.seconds(rows) == pytest.approx(passes.compiled[0, 2] + 200e-6)


def test_the_model_fits_the_estimates(passes):
    kind = estimate.kind_of(passes)
    for load in (Load(((50, 0),)), Load(((32, 128),)), Load((), 1, 77, 77), Load(((20, 0),), 2, 300, 300)):
        assert kind.latency.iteration_s(kind.spec, load) == pytest.approx(passes.seconds(load), rel=1e-6)
    assert max(points.max_error for points in (*kind.points, *kind.held_out)) < 1e-6


def test_a_compiler_that_tells_no_time_is_asked_once_and_the_datasheet_stands_in():
    asked = []
    passes, _ = made(lambda program: asked.append(program.name))
    assert len(asked) == 1 and not passes.compiled
    assert "operations and bytes" in passes.how and "compiler" not in passes.how
    weights = 2 * 64 * ((8 + 4) * 2 * 16 + 3 * 172) + 512 * 64  # of the layers, and of the head
    # Two layers are launched in 0.1 ms each; 64 tokens go through the layers, and four prompts have a row in the head.
    operations = 2 * 64 * (weights - 512 * 64) + 2 * 4 * 512 * 64
    expected = max(operations / 1.024e9, 4 * weights / 1.024e9) + 2e-4
    assert passes.dense_s(Load(((64, 0),))) == pytest.approx(expected)


def test_stages_of_a_pipeline_are_passed_one_after_the_other():
    passes, _ = made(prefill_pp=2, decode_pp=2)
    # The second stage unpacks where the first embeds; activations, 64 floats a token, go over 0.8 of a link.
    sent = 1e-5 + 64 * 64 * 4 / (0.8 * 1.28e9)
    expected = 2 * 1e-3 + 2 * 2e-3 * 64 + 5e-3 + sent
    assert passes.dense_s(Load(((64, 0),))) == pytest.approx(expected)


def test_a_layer_without_attention_has_no_loop_and_keeps_its_two_sums():
    _, programs = made(prefill_tp=2, decode_tp=2)
    group = next(program for program in programs if re.match("group of . 64", program.name))
    text = estimate.without_attention(TINY, group).fn.lower(*estimate.without_attention(TINY, group).args).as_text()
    assert text.count("stablehlo.all_reduce") == 2 and "stablehlo.while" not in text
    assert "stablehlo.while" in group.fn.lower(*group.args).as_text()


def test_transfers_go_over_the_links_of_a_machine_or_through_the_network(passes):
    mine, *others = estimate.transfers(passes.bounds, ABACUS, "mpi")
    by_name = {one.transport: one.bytes_per_s for one in (mine, *others)}
    assert mine.transport == "mpi" and by_name["mpi"] == pytest.approx(0.8 * 1e8)
    assert by_name["device_put"] == pytest.approx(0.8 * 1.28e9)
