"""Reads a Hugging Face `config.json`: what enters is its dict, what leaves is a `ModelConfig`; called by
`models.source`, and by the GGUF reader, which translates its metadata to the same keys.

Every key is in one of three lists. USED keys shape the result, HARMLESS ones change nothing at inference, and NEUTRAL
ones change every layer in a way that pdjax does not compute: they must be absent or have a value that turns them off.
A key in none of the lists is reported by name, since ignoring it may be ignoring a part of the model.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

from pdjax.models.config import ModelConfig, RopeScaling

_log = logging.getLogger("pdjax")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FAMILIES = {
    "llama": ("LlamaForCausalLM", "LLaMAForCausalLM", "LlamaModel"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
}

USED = _words(
    """model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim rms_norm_eps hidden_act rope_theta rope_scaling rope_parameters
    max_position_embeddings attention_bias mlp_bias tie_word_embeddings sliding_window use_sliding_window
    layer_types eos_token_id bos_token_id"""
)

HARMLESS = _words(
    """attention_dropout hidden_dropout initializer_range use_cache _name_or_path name_or_path transformers_version
    auto_map torch_dtype dtype pad_token_id unk_token_id pretraining_tp max_window_layers _attn_implementation
    attn_implementation output_attentions output_hidden_states return_dict id2label label2id finetuning_task
    max_sequence_length model_max_length gradient_checkpointing resid_pdrop is_llama_config unsloth_version
    unsloth_fixed transformers.js_config task_specific_params"""
)

# Key -> the values that turn it off, beside None and absence.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "scale_depth": (),
    "scale_emb": (1.0,),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "no_rope_layers": ((), []),
    "no_rope_layer_interval": (0,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "clip_qkv": (),
    "alibi": (False,),
    "cross_attention_layers": ((), []),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "text_config": (),
    "vision_config": (),
}

_ROPE_KEYS = {
    "default": {"rope_theta"},
    "linear": {"rope_theta", "factor"},
    "dynamic": {"rope_theta", "factor", "original_max_position_embeddings"},
    "llama3": {
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
}


def from_dict(
    config: dict[str, Any],
    generation: dict[str, Any] | None = None,
    *,
    strict: bool = False,
    has_tensor: Callable[[str], bool] | None = None,
    max_len: int = 0,
) -> ModelConfig:
    """Checks a `config.json` and turns it into a `ModelConfig`.

    Args:
        config: the parsed `config.json`, in the spelling of transformers 4 or 5.
        generation: the parsed `generation_config.json`; only its end-of-text ids are used.
        strict: a key in none of the lists is an error instead of a warning.
        has_tensor: tells whether the checkpoint has a tensor of this name. With it, biases that the file does not
            mention are found, and biases that it promises but lacks are refused.
        max_len: most tokens a request will hold, 0 for the model's context. A sliding window is only accepted when
            no request can outgrow it.

    Raises:
        ValueError: a key is missing, has an impossible value, or asks for something pdjax does not compute.
    """
    family = _family(config)
    for key in config:
        if key in NEUTRAL:
            _neutral(config, key)
        elif key not in USED and key not in HARMLESS:
            if strict:
                raise ValueError(f"config key {key!r} is {config[key]!r}; allowed: only known keys (strict)")
            _log.warning("config key %r is unknown and ignored; it may change what the model computes", key)
    if config.get("pretraining_tp", 1) not in (1, None):
        _log.info("config key 'pretraining_tp' is ignored: it changes rounding only")
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise ValueError(f"hidden_act is {act!r}; allowed: 'silu'")

    heads = _whole(config, "num_attention_heads")
    kv_heads = _whole(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads is {kv_heads}; allowed: a divisor of num_attention_heads ({heads})")
    hidden = _whole(config, "hidden_size")
    if config.get("head_dim") is None and hidden % heads:
        raise ValueError(f"head_dim is missing; it is needed since {heads} heads do not divide hidden_size ({hidden})")
    theta, scaling = _rope(config, family)
    attention_bias, output_bias, mlp_bias = _biases(config, family, has_tensor)
    return ModelConfig(
        vocab_size=_whole(config, "vocab_size"),
        hidden_size=hidden,
        ffn_size=_whole(config, "intermediate_size"),
        num_layers=_whole(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_whole(config, "head_dim", hidden // heads),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_eps=_positive(config, "rms_norm_eps", 1e-6),
        max_position=_context(config, family, max_len),
        tied=_flag(config, "tie_word_embeddings"),
        attention_bias=attention_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        eos_ids=merge_ids(config.get("eos_token_id"), (generation or {}).get("eos_token_id")),
        bos_id=next(iter(merge_ids(config.get("bos_token_id"))), None),
    )


def merge_ids(*values: Any) -> tuple[int, ...]:
    """The ascending union of token ids given as a number, a list or nothing; null and -1 mean nothing."""
    ids: set[int] = set()
    for value in values:
        for item in value if isinstance(value, list | tuple) else (value,):
            if item is not None and item != -1:
                if not isinstance(item, int) or isinstance(item, bool) or item < 0:
                    raise ValueError(f"token id is {item!r}; allowed: a whole number >= 0, -1 or null")
                ids.add(item)
    return tuple(sorted(ids))


def _family(config: dict[str, Any]) -> str:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type is {family!r}; allowed: {', '.join(FAMILIES)}")
    for name in config.get("architectures") or ():
        if name not in FAMILIES[family]:
            raise ValueError(f"architectures is {name!r}; allowed for {family}: {', '.join(FAMILIES[family])}")
    return str(family)


def _neutral(config: dict[str, Any], key: str) -> None:
    value = config[key]
    if value is None or value in NEUTRAL[key]:
        return
    shown = value.get("quant_method", value) if key == "quantization_config" and isinstance(value, dict) else value
    allowed = ", ".join(["absent or null", *map(repr, NEUTRAL[key])])
    raise ValueError(f"config key {key!r} is {shown!r}, which pdjax does not compute; allowed: {allowed}")


def _rope(config: dict[str, Any], family: str) -> tuple[float, RopeScaling | None]:
    """Theta and scaling from the transformers 4 keys (rope_theta, rope_scaling) and the 5 one (rope_parameters)."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{key} is {value!r}; allowed: null or a table of keys")
        nested = sorted(k for k, v in (value or {}).items() if isinstance(v, dict))
        if nested:
            raise ValueError(f"{key} differs by layer type ({', '.join(nested)}); allowed: one for all layers")
    thetas = {
        float(v)
        for v in (config.get("rope_theta"), *((d or {}).get("rope_theta") for d in (old, new)))
        if v is not None
    }
    if len(thetas) > 1:
        raise ValueError(f"rope_theta is given as {sorted(thetas)} in different places; allowed: one value")
    scalings = [_scaling(key, value) for key, value in (("rope_scaling", old), ("rope_parameters", new)) if value]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise ValueError(f"rope_scaling is {old!r} but rope_parameters is {new!r}; allowed: both the same")
    if not thetas:
        # 10000 is the documented default of all the families read here.
        _log.info("no rope_theta in the config: 10000, the default of %s", family)
    theta = thetas.pop() if thetas else 10000.0
    if not (math.isfinite(theta) and theta > 0):
        raise ValueError(f"rope_theta is {theta!r}; allowed: a number > 0")
    return theta, scalings[0] if scalings else None


def _scaling(key: str, table: dict[str, Any]) -> RopeScaling | None:
    kinds = {str(table[name]) for name in ("rope_type", "type") if table.get(name) is not None}
    if len(kinds) > 1:
        raise ValueError(f"{key} has rope_type and type, which differ: {sorted(kinds)}")
    kind = kinds.pop() if kinds else "default"
    if kind not in _ROPE_KEYS:
        raise ValueError(f"{key}.rope_type is {kind!r}; allowed: {', '.join(_ROPE_KEYS)}")
    partial = table.get("partial_rotary_factor")
    if partial not in (None, 1.0):
        raise ValueError(f"{key}.partial_rotary_factor is {partial!r}; allowed: absent or 1.0")
    unknown = sorted(set(table) - _ROPE_KEYS[kind] - {"rope_type", "type", "partial_rotary_factor"})
    if unknown:
        raise ValueError(f"{key} of type {kind!r} has {unknown[0]!r}; allowed: {', '.join(sorted(_ROPE_KEYS[kind]))}")
    if kind in ("default", "dynamic"):
        # The dynamic base grows only beyond max_position_embeddings, and no request gets that far: it is plain rope.
        return None
    if kind == "linear":
        return RopeScaling("linear", _positive(table, "factor", key=key))
    low, high = (_positive(table, name, key=key) for name in ("low_freq_factor", "high_freq_factor"))
    if not low < high:
        raise ValueError(f"{key}.low_freq_factor is {low}; allowed: less than high_freq_factor ({high})")
    original = _whole(table, "original_max_position_embeddings")
    return RopeScaling("llama3", _positive(table, "factor", key=key), low, high, original)


def _context(config: dict[str, Any], family: str, max_len: int) -> int:
    """The longest text: `max_position_embeddings`, or less where a window would start to hide tokens."""
    context = _whole(config, "max_position_embeddings", 2048)
    kinds = set(config.get("layer_types") or ())
    if kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types has {sorted(kinds)}; allowed: full_attention, sliding_attention")
    window = config.get("sliding_window")
    # Qwen2 files carry a window that is off unless the switch says otherwise.
    active = _flag(config, "use_sliding_window", family != "qwen2")
    if not window or not active or kinds == {"full_attention"}:
        return context
    window = _whole(config, "sliding_window")
    longest = min(max_len or context, context)
    if longest > window:
        raise ValueError(
            f"sliding_window is {window} and texts may have {longest} tokens; allowed: max_model_len <= {window}, "
            "where the window hides nothing"
        )
    return min(context, window)


def _biases(config: dict[str, Any], family: str, has_tensor: Callable[[str], bool] | None) -> tuple[bool, bool, bool]:
    """Whether q/k/v, o and the mlp have biases, told by the config and checked against the tensors."""
    attention = family == "qwen2" or _flag(config, "attention_bias")
    output = family != "qwen2" and attention
    mlp = _flag(config, "mlp_bias")
    if has_tensor is None:
        return attention, output, mlp
    found = []
    for said, key, tensor in (
        (attention, "attention_bias", "self_attn.q_proj.bias"),
        (output, "attention_bias", "self_attn.o_proj.bias"),
        (mlp, "mlp_bias", "mlp.up_proj.bias"),
    ):
        name = f"model.layers.0.{tensor}"
        there = has_tensor(name)
        if there != said and (said or config.get(key) is not None):
            raise ValueError(f"{key} is {said} but tensor {name!r} is {'there' if there else 'missing'}")
        found.append(there)
    return found[0], found[1], found[2]


def _whole(table: dict[str, Any], key: str, default: int | None = None) -> int:
    value = table.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}; allowed: a whole number >= 1")
    return value


def _positive(table: dict[str, Any], name: str, default: float | None = None, key: str = "") -> float:
    value = table.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{f'{key}.' if key else ''}{name} is {value!r}; allowed: a number > 0")
    return float(value)


def _flag(config: dict[str, Any], key: str, default: bool = False) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}; allowed: true, false or null")
    return value
