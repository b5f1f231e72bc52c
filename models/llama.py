"""LLaMA as flax modules: the arithmetic of one layer, of the embedding and of the head.

Enters: rows of activations [R, D] float32 and parameter arrays with the names of `models.params`. Leaves: rows,
logits, and each row's fresh K and V. Called inside traced programs only (`models.programs`), once per device of the
mesh: with tp > 1 every array here is the local shard and the sums over shards are written out.

R rows may be tokens of prompts, decode rows, or both: how rows see each other is up to the `attend` that is passed in.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from pdjax.models.config import ModelConfig
from pdjax.models.kv import LayerKV
from pdjax.models.linear import linear, linear_columns
from pdjax.models.params import embed_params, head_params, layer_params
from pdjax.models.rope import rotate
from pdjax.models.sharding import TP

Attend = Callable[[jax.Array, jax.Array, jax.Array, LayerKV], tuple[jax.Array, LayerKV]]


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x [R, D] float32 over its root mean square, times scale [D]."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale[None]


class Attention(nnx.Module):
    """Norm, q/k/v, rotation, attention over pages, output projection. Residual not included."""

    def __init__(self, config: ModelConfig, tp: int, params: Mapping[str, Any]):
        self.config, self.tp = config, tp
        self.attn_norm = nnx.Param(params["attn_norm"])
        self.wq, self.wkv, self.wo = (nnx.Param(params[name]) for name in ("wq", "wkv", "wo"))
        self.bq, self.bkv, self.bo = (_optional(params, name) for name in ("bq", "bkv", "bo"))

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Attend, cache: LayerKV
    ) -> tuple[jax.Array, LayerKV, tuple[jax.Array, jax.Array]]:
        """x [R, D], angles [R, H/2] -> ([R, D], the cache with these rows in it, fresh (k, v), each [R, K, H])."""
        wq, wkv, wo = self.wq[...], self.wkv[...], self.wo[...]
        (K, G, H, D), R = wq.shape, x.shape[0]
        h = rms_norm(x, self.attn_norm[...], self.config.rms_eps)
        q = linear(h, wq.reshape(K * G * H, D)).reshape(R, K, G, H)
        kv = linear(h, wkv.reshape(2 * K * H, D)).reshape(R, 2, K, H)
        if self.bq is not None and self.bkv is not None:
            q = q + self.bq[...].astype(jnp.float32)[None]
            kv = kv + self.bkv[...].astype(jnp.float32)[None]
        q, k = rotate(q, cos, sin), rotate(kv[:, 0], cos, sin)
        k, v = k.astype(cache.k.dtype), kv[:, 1].astype(cache.v.dtype)
        o, cache = attend(q, k, v, cache)  # [R, K, G, H]
        y = _sum_shards(linear(o.reshape(R, K * G * H), wo.reshape(D, K * G * H)), self.tp)
        if self.bo is not None:
            y = y + self.bo[...].astype(jnp.float32)[None]
        return y, cache, (k, v)


class Mlp(nnx.Module):
    """Norm and SwiGLU. Residual not included."""

    def __init__(self, config: ModelConfig, tp: int, params: Mapping[str, Any]):
        self.config, self.tp = config, tp
        self.mlp_norm = nnx.Param(params["mlp_norm"])
        self.w_gate_up, self.w_down = nnx.Param(params["w_gate_up"]), nnx.Param(params["w_down"])
        self.b_gate_up, self.b_down = (_optional(params, name) for name in ("b_gate_up", "b_down"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[R, D] -> [R, D]."""
        w = self.w_gate_up[...]
        _, F, D = w.shape
        h = rms_norm(x, self.mlp_norm[...], self.config.rms_eps)
        h = linear(h, w.reshape(2 * F, D)).reshape(x.shape[0], 2, F)
        if self.b_gate_up is not None:
            h = h + self.b_gate_up[...].astype(jnp.float32)[None]
        y = _sum_shards(linear(nnx.silu(h[:, 0]) * h[:, 1], self.w_down[...]), self.tp)
        if self.b_down is not None:
            y = y + self.b_down[...].astype(jnp.float32)[None]
        return y


class Layer(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig, tp: int, params: Mapping[str, Any]):
        self.attention = Attention(config, tp, params)
        self.mlp = Mlp(config, tp, params)

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Attend, cache: LayerKV
    ) -> tuple[jax.Array, LayerKV, tuple[jax.Array, jax.Array]]:
        """As `Attention`, residuals included."""
        y, cache, fresh = self.attention(x, cos, sin, attend, cache)
        x = x + y
        return x + self.mlp(x), cache, fresh


class Embedding(nnx.Module):
    """The embedding. The vocabulary is sharded over all devices of the mesh."""

    def __init__(self, config: ModelConfig, tp: int, params: Mapping[str, Any]):
        self.tp = tp
        self.table = nnx.Param(params["embed"])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens [R] int32 -> [R, D] float32."""
        table = self.table[...]
        local = tokens - _first_id(table.shape[0], self.tp)
        here = (local >= 0) & (local < table.shape[0])
        rows = table[jnp.where(here, local, 0)].astype(jnp.float32)
        return _sum_shards(jnp.where(here[:, None], rows, 0.0), self.tp)


class Head(nnx.Module):
    """Final norm and head, which is the embedding where they are tied. The vocabulary is sharded over all devices."""

    def __init__(self, config: ModelConfig, tp: int, params: Mapping[str, Any]):
        self.config, self.tp = config, tp
        self.final_norm = nnx.Param(params["final_norm"])
        self.table = nnx.Param(params["embed" if config.tied else "head"])

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [R, D] -> this shard's logits, [V / tp, R] float32; -inf for ids that only pad the vocabulary."""
        w = self.table[...]  # [V / tp, D]
        y = linear_columns(rms_norm(x, self.final_norm[...], self.config.rms_eps), w)
        if w.shape[0] * self.tp == self.config.vocab_size:
            return y
        ids = _first_id(w.shape[0], self.tp) + jnp.arange(w.shape[0])
        return jnp.where(ids[:, None] < self.config.vocab_size, y, -jnp.inf)


@functools.cache
def layer_graph(config: ModelConfig, tp: int) -> tuple[nnx.GraphDef[Layer], Any, tuple[str, ...]]:
    """What turns the leaves of one layer into a module: (graph, tree of the state, parameter names in leaf order)."""
    return _graph(lambda params: Layer(config, tp, params), list(layer_params(config, tp, 0)))


@functools.cache
def embed_graph(config: ModelConfig, tp: int) -> tuple[nnx.GraphDef[Embedding], Any, tuple[str, ...]]:
    """As `layer_graph`, for the embedding."""
    return _graph(lambda params: Embedding(config, tp, params), list(embed_params(config, tp)))


@functools.cache
def head_graph(config: ModelConfig, tp: int) -> tuple[nnx.GraphDef[Head], Any, tuple[str, ...]]:
    """As `layer_graph`, for final norm and head."""
    return _graph(lambda params: Head(config, tp, params), list(head_params(config, tp)))


def merge(graph: tuple[nnx.GraphDef[Any], Any, tuple[str, ...]], leaves: tuple[jax.Array, ...]) -> Any:
    """The module with these leaves. Only inside a trace: outside, an nnx call costs milliseconds."""
    return nnx.merge(graph[0], jax.tree.unflatten(graph[1], leaves))


def _graph(build: Callable[[dict[str, Any]], nnx.Module], names: list[str]) -> Any:
    # Parameters are told apart by a size: nnx orders the leaves, and this is how the order is learnt from it.
    module = build({name: jax.ShapeDtypeStruct((i,), jnp.float32) for i, name in enumerate(names)})
    graph, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    return graph, tree, tuple(names[leaf.shape[0]] for leaf in leaves)


def _optional(params: Mapping[str, Any], name: str) -> nnx.Param[Any] | None:
    return nnx.Param(params[name]) if name in params else None


def _first_id(shard: int, tp: int) -> jax.Array | int:
    """The token id of the first row of this device's part of the vocabulary."""
    return lax.axis_index(TP) * shard if tp > 1 else 0


def _sum_shards(x: jax.Array, tp: int) -> jax.Array:
    return lax.psum(x, TP) if tp > 1 else x
