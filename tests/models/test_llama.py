"""The whole model against a dense one written apart in float64 numpy, for every kind of config; and one dtype down."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pdjax.messages import Chunk
from pdjax.models import source, weights
from pdjax.models.config import ModelConfig, RopeScaling
from pdjax.models.kv import make_pool
from pdjax.models.llama import head_graph, merge
from pdjax.models.plan import PassShape, pack_pass
from pdjax.models.programs import columns_of, embed_leaves, head_leaves, pass_programs
from pdjax.models.sharding import make_mesh
from pdjax.request import SamplingParams

BASE = ModelConfig(
    vocab_size=61, hidden_size=20, ffn_size=28, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, tied=True
)
BIASES = dataclasses.replace(BASE, attention_bias=True, output_bias=True, mlp_bias=True)
KINDS = {
    "tied": BASE,
    "untied, biases": dataclasses.replace(BIASES, tied=False),
    "multi-query, llama3 scaling": dataclasses.replace(
        BASE, num_kv_heads=1, rope_scaling=RopeScaling("llama3", 4.0, original_max_position=8)
    ),
    "multi-head, other eps": dataclasses.replace(BASE, num_kv_heads=4, rms_eps=1e-2),
}
TOKENS = np.random.default_rng(3).integers(0, 61, 19).tolist()


def paged_logits(config, dtype, devices=1, tokens=TOKENS, load=None) -> np.ndarray:
    """Logits after the last token, [V], through the programs that serve; the head on one device."""
    load = load or (lambda mesh, dtype: weights.random(config, mesh, dtype))
    mesh, first = (make_mesh(config, jax.devices()[:n]) for n in (devices, 1))
    loaded = load(mesh, dtype)
    shape = PassShape(20, 0, 1, 3, 8, 4, 1)
    programs = pass_programs(config, mesh, shape, False, dtype)
    last = jax.device_put(np.zeros(1, np.int32), NamedSharding(mesh, PartitionSpec()))
    chunk = Chunk(0, tuple(tokens), 0, (1, 2, 3), 0, True, SamplingParams(temperature=0.0))
    x, step, _ = programs.embed(embed_leaves(config, loaded, devices), last, pack_pass(shape, [chunk], None))
    columns = columns_of(config, loaded, devices, range(config.num_layers))
    _, picked, _, _ = programs.group(columns, tuple(make_pool(config, mesh, 4, 8, np.float32)), x, step)
    leaves, graph = head_leaves(config, load(first, dtype), 1), head_graph(config, 1)
    return np.asarray(jax.jit(lambda leaves, x: merge(graph, leaves)(x))(leaves, np.asarray(picked)))[:, 0]


def dense_logits(config: ModelConfig) -> np.ndarray:
    """The same in float64, all positions at once, no pages; written from the model's definition."""
    mesh = make_mesh(config, jax.devices()[:1])
    loaded = weights.random(config, mesh, "float32")
    outer = {name: np.asarray(a, np.float64) for name, a in loaded.outer.items()}
    T, H, G = len(TOKENS), config.head_dim, config.group

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_eps) * scale

    freq = config.rope_theta ** -(np.arange(0, H, 2) / H)
    if config.rope_scaling:
        r = config.rope_scaling
        turns = r.original_max_position * freq / (2 * np.pi)
        blend = np.clip((turns - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor), 0, 1)
        freq = (1 - blend) * freq / r.factor + blend * freq
    turn = np.exp(1j * np.arange(T)[:, None] * freq)

    def rope(x):  # [T, heads, H]
        z = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * turn[:, None]
        return np.concatenate([z.real, z.imag], -1)

    x = outer["embed"][TOKENS]
    for layer in loaded.layers.values():
        w = {name: np.asarray(a, np.float64) for name, a in layer.items()}
        h = norm(x, w["attn_norm"])
        q = np.einsum("td,kghd->tkgh", h, w["wq"]) + w.get("bq", 0)
        k, v = (np.einsum("td,khd->tkh", h, w["wkv"][i]) + (w["bkv"][i] if "bkv" in w else 0) for i in (0, 1))
        q, k = rope(q.reshape(T, -1, H)), np.repeat(rope(k), G, axis=1)
        scores = np.einsum("qnh,knh->nqk", q, k) / np.sqrt(H)
        scores[:, ~np.tril(np.ones((T, T), bool))] = -np.inf
        share = np.exp(scores - scores.max(-1, keepdims=True))
        o = np.einsum("nqk,knh->qnh", share / share.sum(-1, keepdims=True), np.repeat(v, G, axis=1))
        x = x + o.reshape(T, -1) @ w["wo"].reshape(config.hidden_size, -1).T + w.get("bo", 0)
        h = norm(x, w["mlp_norm"])
        gate, up = (h @ w["w_gate_up"][i].T + (w["b_gate_up"][i] if "b_gate_up" in w else 0) for i in (0, 1))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["w_down"].T + w.get("b_down", 0)
    return norm(x[-1], outer["final_norm"]) @ outer.get("head", outer["embed"]).T


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_dense_model(kind):
    np.testing.assert_allclose(paged_logits(KINDS[kind], "float32"), dense_logits(KINDS[kind]), atol=2e-5)


def test_sharded_layers_with_biases_and_padding_give_the_dense_logits():
    config = dataclasses.replace(BIASES, ffn_size=27)  # neither 27 nor 61 divides by 4
    np.testing.assert_allclose(paged_logits(config, "float32", devices=4), dense_logits(config), atol=2e-5)


def test_bfloat16_weights_stay_near_the_float32_ones():
    exact, rounded = paged_logits(BASE, "float32"), paged_logits(BASE, "bfloat16")
    assert 0 < np.abs(exact - rounded).max() < 0.05 * np.abs(exact).max()


def test_first_logits_of_a_real_model_are_the_reference(stories, weights_dir):
    found, saved = source.resolve(str(stories)), np.load(weights_dir / "ref" / "stories.npz")
    for case in json.loads((weights_dir / "ref" / "stories.json").read_text())["cases"]:
        got = paged_logits(found.config, "float32", tokens=case["prompt_ids"], load=found.load)
        np.testing.assert_allclose(got, saved[f"{case['name']}.first_logits"], atol=1e-3)
