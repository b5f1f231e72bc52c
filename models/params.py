"""The parameters of a model: names, shapes, shardings, and where each comes from in a checkpoint.

One table, used by the flax modules (to declare), by the loaders (to fill) and by converters (to write). Checkpoint
tensors have their Hugging Face names and layout ([out, in] for linear weights); `Param.out_axes`, `in_axes` and
`sources` say how to get from there to the layout below, which keeps that order (`models.linear` says why) and makes the
heads axes of their own:

    embed [V, D]      head [V, D] (untied)     final_norm [D]
    layers.i:  attn_norm [D]  wq [K, G, H, D]  wkv [2, K, H, D]  wo [D, K, G, H]   (bq [K, G, H], bkv [2, K, H], bo [D])
               mlp_norm [D]   w_gate_up [2, F, D]  w_down [D, F]                   (b_gate_up [2, F], b_down [D])

V and F are zero-padded to a multiple of tp.
"""

import dataclasses

import jax
from jax.sharding import PartitionSpec

from pdjax.models.config import ModelConfig
from pdjax.models.sharding import KV, REP, TP, padded


@dataclasses.dataclass(frozen=True, slots=True)
class Param:
    """One parameter array.

    Attributes:
        shape: logical shape, padding included.
        spec: how it is sharded over ("kv", "rep").
        sources: checkpoint tensor names; two when they are stacked along axis `stack` of `shape`.
        stack: that axis, or None.
        out_axes: axes of one source (the stack axis left out) that its [out] dimension unfolds to, in order.
        in_axes: likewise for [in]; empty for vectors.
            Example wo: source [D, K*G*H], out_axes (0,), in_axes (1, 2, 3).
        norm: kept in float32 whatever the dtype of the weights.
    """

    shape: tuple[int, ...]
    spec: PartitionSpec
    sources: tuple[str, ...]
    out_axes: tuple[int, ...]
    in_axes: tuple[int, ...] = ()
    stack: int | None = None
    norm: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """The arrays of one pipeline stage, placed on its mesh with their specs.

    Attributes:
        outer: by the names of `outer_params`; what this stage holds of them.
        layers: layer number -> the arrays of that layer, by the names of `layer_params`.
    """

    outer: dict[str, jax.Array]
    layers: dict[int, dict[str, jax.Array]]


def layer_params(config: ModelConfig, tp: int, layer: int) -> dict[str, Param]:
    """The table of one layer: parameter name -> Param."""
    D, K, G, H = config.hidden_size, config.num_kv_heads, config.group, config.head_dim
    F = padded(config.ffn_size, tp)
    at = f"model.layers.{layer}."
    q, k, v, o = (f"{at}self_attn.{name}_proj" for name in "qkvo")
    gate, up, down = (f"{at}mlp.{name}_proj" for name in ("gate", "up", "down"))

    def w(name: str) -> str:
        return f"{name}.weight"

    def b(name: str) -> str:
        return f"{name}.bias"

    P = PartitionSpec
    table = {
        "attn_norm": Param((D,), P(), (w(f"{at}input_layernorm"),), (0,), norm=True),
        "wq": Param((K, G, H, D), P(KV, REP), (w(q),), (0, 1, 2), (3,)),
        "wkv": Param((2, K, H, D), P(None, KV), (w(k), w(v)), (0, 1), (2,), stack=0),
        "wo": Param((D, K, G, H), P(None, KV, REP), (w(o),), (0,), (1, 2, 3)),
        "mlp_norm": Param((D,), P(), (w(f"{at}post_attention_layernorm"),), (0,), norm=True),
        "w_gate_up": Param((2, F, D), P(None, TP), (w(gate), w(up)), (0,), (1,), stack=0),
        "w_down": Param((D, F), P(None, TP), (w(down),), (0,), (1,)),
    }
    if config.attention_bias:
        table["bq"] = Param((K, G, H), P(KV, REP), (b(q),), (0, 1, 2))
        table["bkv"] = Param((2, K, H), P(None, KV), (b(k), b(v)), (0, 1), stack=0)
    if config.output_bias:
        table["bo"] = Param((D,), P(), (b(o),), (0,))
    if config.mlp_bias:
        table["b_gate_up"] = Param((2, F), P(None, TP), (b(gate), b(up)), (0,), stack=0)
        table["b_down"] = Param((D,), P(), (b(down),), (0,))
    return table


def embed_params(config: ModelConfig, tp: int) -> dict[str, Param]:
    """The table of the embedding, which the first stage holds."""
    return {"embed": _vocabulary(config, tp, "model.embed_tokens.weight")}


def head_params(config: ModelConfig, tp: int) -> dict[str, Param]:
    """The table of final norm and head, which the last stage holds; a tied head is the embedding."""
    norm = Param((config.hidden_size,), PartitionSpec(), ("model.norm.weight",), (0,), norm=True)
    if config.tied:
        return embed_params(config, tp) | {"final_norm": norm}
    return {"final_norm": norm, "head": _vocabulary(config, tp, "lm_head.weight")}


def outer_params(config: ModelConfig, tp: int) -> dict[str, Param]:
    """The table of what is not in a layer."""
    return embed_params(config, tp) | head_params(config, tp)


def _vocabulary(config: ModelConfig, tp: int, source: str) -> Param:
    return Param((padded(config.vocab_size, tp), config.hidden_size), PartitionSpec(TP), (source,), (0,), (1,))
