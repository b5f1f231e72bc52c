"""Writers of small checkpoints, as fixtures: configs, tensors, safetensors files and folders. Nothing is downloaded."""

import json
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def config(**changes):
    """A config.json whose sizes tell every axis apart; a change to None removes the key."""
    base = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 48,
        "intermediate_size": 42,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 101,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    return {key: value for key, value in (base | changes).items() if value is not None}


def shapes(table):
    """Tensor name -> shape of a config, written down apart from the code under test."""
    D, F, V = table["hidden_size"], table["intermediate_size"], table["vocab_size"]
    N = table["num_attention_heads"]
    H = table.get("head_dim", D // N)
    K = table.get("num_key_value_heads", N)
    qwen = table["model_type"] == "qwen2"
    result = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not table.get("tie_word_embeddings"):
        result["lm_head.weight"] = (V, D)
    for i in range(table["num_hidden_layers"]):
        at = f"model.layers.{i}."
        linear = {
            "self_attn.q_proj": (N * H, D, qwen or table.get("attention_bias")),
            "self_attn.k_proj": (K * H, D, qwen or table.get("attention_bias")),
            "self_attn.v_proj": (K * H, D, qwen or table.get("attention_bias")),
            "self_attn.o_proj": (D, N * H, table.get("attention_bias")),
            "mlp.gate_proj": (F, D, table.get("mlp_bias")),
            "mlp.up_proj": (F, D, table.get("mlp_bias")),
            "mlp.down_proj": (D, F, table.get("mlp_bias")),
        }
        for name, (out, into, bias) in linear.items():
            result[f"{at}{name}.weight"] = (out, into)
            if bias:
                result[f"{at}{name}.bias"] = (out,)
        result[f"{at}input_layernorm.weight"] = result[f"{at}post_attention_layernorm.weight"] = (D,)
    return result


def tensors(table, dtype="float32"):
    """Random tensors for a config."""
    random = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return {name: random.standard_normal(shape).astype(kind) for name, shape in shapes(table).items()}


def write_safetensors(path, arrays):
    """The format as its description has it: length, JSON header, data."""
    header, start = {"__metadata__": {"format": "pt"}}, 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, start + array.nbytes],
        }
        start += array.nbytes
    text = json.dumps(header).encode()
    Path(path).write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in arrays.values())
    )


def write_folder(folder, table, arrays=None, shards=1, generation=None):
    """A Hugging Face folder; with several shards also its index."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = tensors(table) if arrays is None else arrays
    (folder / "config.json").write_text(json.dumps(table))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", arrays)
        return folder
    names = list(arrays)
    places = {name: f"model-{1 + i % shards:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(places.values())):
        write_safetensors(folder / file, {name: arrays[name] for name in names if places[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


@pytest.fixture(scope="session")
def files():
    """The writers above, by name."""
    return types.SimpleNamespace(
        config=config,
        shapes=shapes,
        tensors=tensors,
        write_safetensors=write_safetensors,
        write_folder=write_folder,
    )


@pytest.fixture(scope="session")
def weights_dir():
    """Small real checkpoints and references beside the repository."""
    folder = Path(__file__).parents[3] / "shared" / "weights"
    if not folder.is_dir():
        pytest.skip("no ../shared/weights beside the repository")
    return folder


@pytest.fixture(scope="session")
def stories(weights_dir):
    """The stories260K checkpoint, a Hugging Face folder."""
    return weights_dir / "stories260k-hf"


@pytest.fixture(scope="session")
def smollm2():
    """The source of SmolLM2-135M-Instruct, where the package with its weights is installed."""
    from pdjax.models import source

    try:
        return source.resolve("smollm2-135m")
    except ValueError as error:
        pytest.skip(str(error))
