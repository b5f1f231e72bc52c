"""Checkpoints become the right arrays on every mesh, and broken ones are refused by name."""

import jax
import ml_dtypes
import numpy as np
import pytest

from pdjax.models import source, weights
from pdjax.models.params import layer_params, outer_params
from pdjax.models.sharding import make_mesh


def on(found, tp, dtype="float32"):
    return found.load(make_mesh(found.config, jax.devices()[:tp]), dtype)


def expected_layer(arrays, config, layer):
    """The parameters of a layer by the plainest means."""
    D, K, G, H = config.hidden_size, config.num_kv_heads, config.group, config.head_dim

    def w(name):
        return arrays[f"model.layers.{layer}.{name}"]

    result = {
        "attn_norm": w("input_layernorm.weight"),
        "wq": w("self_attn.q_proj.weight").reshape(K, G, H, D),
        "wkv": np.stack([w(f"self_attn.{n}_proj.weight").reshape(K, H, D) for n in "kv"]),
        "wo": w("self_attn.o_proj.weight").reshape(D, K, G, H),
        "mlp_norm": w("post_attention_layernorm.weight"),
        "w_gate_up": np.stack([w(f"mlp.{n}_proj.weight") for n in ("gate", "up")]),
        "w_down": w("mlp.down_proj.weight"),
    }
    if config.attention_bias:
        result["bq"] = w("self_attn.q_proj.bias").reshape(K, G, H)
        result["bkv"] = np.stack([w(f"self_attn.{n}_proj.bias").reshape(K, H) for n in "kv"])
    if config.output_bias:
        result["bo"] = w("self_attn.o_proj.bias")
    if config.mlp_bias:
        result["b_gate_up"] = np.stack([w(f"mlp.{n}_proj.bias") for n in ("gate", "up")])
        result["b_down"] = w("mlp.down_proj.bias")
    return result


def assert_equal(array, expected):
    """Equal where there is something, zero in the padding."""
    array = np.asarray(array)
    assert all(a >= b for a, b in zip(array.shape, expected.shape, strict=True))
    padding = [(0, a - b) for a, b in zip(array.shape, expected.shape, strict=True)]
    assert np.array_equal(array, np.pad(expected, padding))


CASES = {
    "gqa": {},
    "mha": {"num_key_value_heads": None, "head_dim": None},
    "three kv heads": {"num_attention_heads": 9, "num_key_value_heads": 3},
    "one kv head": {"num_key_value_heads": 1},
    "undivided hidden": {"hidden_size": 64, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32},
    "all biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize(
    ("case", "tp"),
    [
        ("gqa", 1),
        ("gqa", 2),
        ("gqa", 4),
        ("gqa", 8),
        ("mha", 8),
        ("three kv heads", 3),
        ("one kv head", 4),
        ("undivided hidden", 3),
        ("all biases", 4),
        ("qwen2", 2),
        ("tied", 8),
    ],
)
def test_every_parameter_is_the_checkpoints_on_every_mesh(files, tmp_path, case, tp):
    table = files.config(**CASES[case])
    arrays = files.tensors(table)
    found = source.resolve(str(files.write_folder(tmp_path, table, arrays)))
    config, loaded = found.config, on(found, tp)
    assert_equal(loaded.outer["embed"], arrays["model.embed_tokens.weight"])
    assert_equal(loaded.outer["final_norm"], arrays["model.norm.weight"])
    assert ("head" in loaded.outer) == (not config.tied)
    if not config.tied:
        assert_equal(loaded.outer["head"], arrays["lm_head.weight"])
    for i, layer in loaded.layers.items():
        expected = expected_layer(arrays, config, i)
        assert layer.keys() == expected.keys()
        for name, array in layer.items():
            assert_equal(array, expected[name])
            assert array.sharding.spec == layer_params(config, tp, i)[name].spec


def test_bfloat16_rounds_to_nearest_even_and_keeps_norms(files, tmp_path):
    table = files.config()
    arrays = files.tensors(table)
    # Half way between two bfloat16 values: ties go to the even one, below and above.
    arrays["model.embed_tokens.weight"][0, :3] = np.float32([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20])
    loaded = on(source.resolve(str(files.write_folder(tmp_path, table, arrays))), 2, "bfloat16")
    assert loaded.outer["embed"].dtype == ml_dtypes.bfloat16
    assert np.asarray(loaded.outer["embed"], np.float32)[0, :3].tolist() == [1.0, 1 + 2**-6, 1 + 2**-7]
    assert_equal(loaded.outer["final_norm"], arrays["model.norm.weight"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_files_load_as_float32(files, tmp_path, dtype):
    arrays = files.tensors(files.config(), dtype)
    loaded = on(source.resolve(str(files.write_folder(tmp_path, files.config(), arrays, shards=2))), 4)
    assert_equal(loaded.outer["head"], arrays["lm_head.weight"].astype(np.float32))


def test_blocks_of_rows_join_seamlessly(files, tmp_path, monkeypatch):
    arrays = files.tensors(files.config())
    found = source.resolve(str(files.write_folder(tmp_path, files.config(), arrays)))
    monkeypatch.setattr(weights, "_BLOCK_BYTES", 4 * 48 * 5)  # five rows
    loaded = on(found, 2)
    assert_equal(loaded.outer["embed"], arrays["model.embed_tokens.weight"])
    assert_equal(loaded.layers[1]["w_down"], arrays["model.layers.1.mlp.down_proj.weight"])


def refused(files, tmp_path, table, arrays, message):
    folder = files.write_folder(tmp_path, table, arrays)
    with pytest.raises(ValueError, match=message):
        on(source.resolve(str(folder)), 1)


def test_missing_tensor_is_named(files, tmp_path):
    arrays = files.tensors(files.config())
    del arrays["model.layers.1.mlp.up_proj.weight"]
    refused(files, tmp_path, files.config(), arrays, r"'model.layers.1.mlp.up_proj.weight' is missing in .*safetensors")


def test_misshaped_tensor_is_named(files, tmp_path):
    arrays = files.tensors(files.config())
    arrays["model.layers.0.self_attn.k_proj.weight"] = np.zeros((8, 40), np.float32)
    refused(files, tmp_path, files.config(), arrays, r"safetensors: tensor '.*k_proj.weight' has shape \[8, 40\]")


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_norm.weight"])
def test_leftover_tensor_is_named(files, tmp_path, name):
    arrays = files.tensors(files.config()) | {name: np.zeros(4, np.float32)}
    refused(files, tmp_path, files.config(), arrays, f"tensor '{name}' belongs to nothing")


def test_fused_weights_are_refused_by_name(files, tmp_path):
    arrays = files.tensors(files.config())
    fused = "model.layers.0.self_attn.qkv_proj.weight"
    del arrays["model.layers.0.self_attn.q_proj.weight"]
    refused(files, tmp_path, files.config(), arrays | {fused: np.zeros((1, 1), np.float32)}, "qkv_proj.*fused")


def test_stored_rotary_table_is_ignored(files, tmp_path):
    arrays = files.tensors(files.config())
    more = arrays | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32)}
    loaded = on(source.resolve(str(files.write_folder(tmp_path, files.config(), more))), 1)
    assert_equal(loaded.outer["embed"], arrays["model.embed_tokens.weight"])


def test_tied_model_may_store_an_equal_head(files, tmp_path):
    table = files.config(tie_word_embeddings=True)
    arrays = files.tensors(table)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    assert "head" not in on(source.resolve(str(files.write_folder(tmp_path, table, arrays))), 1).outer


def test_tied_model_with_another_head_is_refused(files, tmp_path):
    arrays = files.tensors(files.config())
    refused(files, tmp_path, files.config(tie_word_embeddings=True), arrays, "'lm_head.weight' differs")


def test_untied_model_without_head_says_how_to_tie(files, tmp_path):
    arrays = files.tensors(files.config())
    del arrays["lm_head.weight"]
    refused(files, tmp_path, files.config(), arrays, "'lm_head.weight' is missing.*tie_word_embeddings")


def test_random_weights_are_the_same_for_every_mesh():
    found = source.resolve("tiny")
    one, eight = on(found, 1), on(found, 8)
    for name, array in one.layers[1].items():
        assert_equal(eight.layers[1][name], np.asarray(array))
    assert_equal(eight.outer["embed"], np.asarray(one.outer["embed"]))


def test_random_weights_follow_the_seed():
    found = source.resolve("tiny")
    mesh = make_mesh(found.config, jax.devices()[:1])
    first, again, other = (np.asarray(found.load(mesh, "float32", seed).layers[0]["wq"]) for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_stories_load_as_their_table_says(stories):
    found = source.resolve(str(stories))
    loaded = on(found, 8, "bfloat16")
    for name, param in outer_params(found.config, 8).items():
        assert loaded.outer[name].shape == param.shape
    assert len(loaded.layers) == 5
