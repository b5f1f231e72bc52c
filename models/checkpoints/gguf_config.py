"""The config of a GGUF file: what enters is its header, what leaves is a `ModelConfig`; called by `models.source`.

The metadata are translated to the keys of a Hugging Face config, so both kinds of file pass the same checks.
"""

import dataclasses
import logging
import math
from typing import Any

import numpy as np

from pdjax.models import hf_config
from pdjax.models.checkpoints.gguf import ROPE_FREQS, Header, hf_name
from pdjax.models.config import ModelConfig, RopeScaling

_log = logging.getLogger("pdjax")

_ARCHITECTURES = ("llama", "qwen2")

# Key after the architecture's name -> key of config.json.
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_local_experts",
}
_SEEN = ("vocab_size", "rope.dimension_count", "attention.value_length")


def model_config(header: Header, max_len: int = 0) -> ModelConfig:
    """The config of a file. `max_len` is as in `hf_config.from_dict`.

    Raises:
        ValueError: an architecture or a setting that pdjax does not compute.
    """
    metadata = header.metadata
    arch = metadata.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise ValueError(f"{header.path}: general.architecture is {arch!r}; allowed: {', '.join(_ARCHITECTURES)}")
    own = {key.removeprefix(f"{arch}."): value for key, value in metadata.items() if key.startswith(f"{arch}.")}
    config: dict[str, Any] = {
        "model_type": arch,
        "vocab_size": _vocabulary(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    for key, value in own.items():
        if key in _KEYS:
            # Floats are stored in 32 bits: 9.9999997e-06 is meant to be 1e-05.
            config[_KEYS[key]] = float(str(np.float32(value))) if isinstance(value, float) else value
        elif key not in _SEEN and not key.startswith("rope.scaling."):
            _log.warning("GGUF key '%s.%s' is unknown and ignored; it may change what the model computes", arch, key)
    if own.get("rope.scaling.type", "none") != "none":
        config["rope_scaling"] = {"rope_type": own["rope.scaling.type"], "factor": own.get("rope.scaling.factor")}
    names = {hf_name(name) for name in header.tensors}
    result = hf_config.from_dict(config, has_tensor=names.__contains__, max_len=max_len)
    for key in ("rope.dimension_count", "attention.value_length"):
        if own.get(key, result.head_dim) != result.head_dim:
            raise ValueError(f"{header.path}: {arch}.{key} is {own[key]}; allowed: the head size, {result.head_dim}")
    return result if ROPE_FREQS not in header.tensors else _with_llama3_rope(header, result)


def _vocabulary(header: Header) -> int:
    if "token_embd.weight" not in header.tensors:
        raise ValueError(f"{header.path}: tensor 'token_embd.weight' is missing")
    return header.tensors["token_embd.weight"].shape[0]


def _with_llama3_rope(header: Header, config: ModelConfig) -> ModelConfig:
    """Llama 3.1 and later store divisors of the rotary frequencies as a tensor, not the numbers they come from.

    The released models share low 1, high 4 and an original context of 8192, so the largest divisor is the factor; a
    table that does not follow from these is refused.
    """
    kind, shape, start = header.tensors[ROPE_FREQS]
    if kind != "F32" or shape != (config.head_dim // 2,):
        raise ValueError(f"{header.path}: tensor {ROPE_FREQS!r} is {kind} {list(shape)}; allowed: F32, half a head")
    stored = np.fromfile(header.path, "<f4", config.head_dim // 2, offset=start)
    scaling = RopeScaling("llama3", float(stored.max()), 1.0, 4.0, 8192)
    turns = 8192 * config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim) / (2 * math.pi)
    # How much of the plain frequency stays: all above 4 turns in the original context, none below 1.
    keep = np.clip((turns - 1.0) / (4.0 - 1.0), 0, 1)
    if not np.allclose(stored, 1 / (keep + (1 - keep) / scaling.factor), rtol=1e-3):
        raise ValueError(f"{header.path}: tensor {ROPE_FREQS!r} is not a llama3 scaling of context 8192, low 1, high 4")
    return dataclasses.replace(config, rope_scaling=scaling)
