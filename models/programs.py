"""The compiled programs of an instance. Enters: parameter leaves, donated pages, the packed vector of a pass. Leaves:
activations, pages updated in place, fresh KV, tokens. Called by `pdjax.instance` and by nobody else.

A pass is embed -> layer groups -> head; a pipeline stage without the embedding unpacks the vector instead. One body
serves prefill (T tokens), decode (B rows) and mixed passes (the linear layers run over all T + B rows, reading every
weight once). A group takes its layers' leaves and pages as
arguments, so one compiled program serves all groups of a size. Programs are cached per process by what they are made
from: engines built in turn share them and compile nothing twice.

Each body runs once per device of the mesh on its shard (`jax.shard_map`); on one device it is called directly.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdjax.models import attention
from pdjax.models.config import ModelConfig
from pdjax.models.kv import WIRE_SPEC, LayerKV
from pdjax.models.linear import compiler_options
from pdjax.models.llama import embed_graph, head_graph, layer_graph, merge
from pdjax.models.params import Weights, embed_params, head_params, layer_params
from pdjax.models.plan import HeadRows, PassShape, Step, page_writes, unpack_pass, write_entries
from pdjax.models.rope import angles
from pdjax.models.sampling import sample

Leaves = tuple[jax.Array, ...]
Columns = tuple[Leaves, ...]
Caches = tuple[LayerKV, ...]
Grouped = tuple[jax.Array, jax.Array, Caches, jax.Array | None]
_EVERYWHERE = PartitionSpec()


@dataclasses.dataclass(frozen=True, slots=True)
class PassPrograms:
    """One pass of a given shape.

    Attributes:
        embed: (embedding leaves, last [slots], vector) -> (x [T + B, D], Step, HeadRows)
        unpack: (vector) -> (Step, HeadRows): what a later stage needs beside the x of the one before it
        group: (columns, caches donated, x, step) -> (x, picked [R, D], caches, fresh [g, 2, T, K, H] or None);
            columns hold, for every parameter of a layer, that leaf of each layer of the group (`columns_of`)
        head: (head leaves, last donated, picked, head rows) -> ([2, R] int32: tokens, bits of their log
            probabilities; last). Every group picks the R rows, though only the last one's count, so that one head
            serves all passes of equal R.
    """

    embed: Callable[[Leaves, jax.Array, Any], tuple[jax.Array, Step, HeadRows]]
    unpack: Callable[[Any], tuple[Step, HeadRows]]
    group: Callable[[Columns, Caches, jax.Array, Step], Grouped]
    head: Callable[[Leaves, jax.Array, jax.Array, HeadRows], tuple[jax.Array, jax.Array]]


def embed_leaves(config: ModelConfig, weights: Weights, tp: int) -> Leaves:
    """The leaves that embed takes."""
    return tuple(weights.outer[name] for name in embed_graph(config, tp)[2])


def head_leaves(config: ModelConfig, weights: Weights, tp: int) -> Leaves:
    """The leaves that the head takes."""
    return tuple(weights.outer[name] for name in head_graph(config, tp)[2])


def columns_of(config: ModelConfig, weights: Weights, tp: int, layers: Sequence[int]) -> Columns:
    """The leaves that a group of these layers takes: by parameter, so that one spec serves all layers."""
    names = layer_graph(config, tp)[2]
    return tuple(tuple(weights.layers[i][name] for i in layers) for name in names)


@functools.cache
def pass_programs(config: ModelConfig, mesh: Mesh, shape: PassShape, fresh: bool, dtype: Any) -> PassPrograms:
    """The programs of one pass shape and dtype of weights; `fresh`: groups also return the K/V of the prompt tokens."""
    tp, backend = mesh.size, attention.backend_for(mesh)
    embedding, layer = embed_graph(config, tp), layer_graph(config, tp)
    embed_table, layer_table = embed_params(config, tp), layer_params(config, tp, 0)
    embed_specs = tuple(embed_table[name].spec for name in embedding[2])
    layer_specs = tuple(layer_table[name].spec for name in layer[2])

    def embed(leaves: Leaves, last: jax.Array, vector: jax.Array) -> tuple[jax.Array, Step, HeadRows]:
        tokens, step, head = unpack_pass(shape, vector, last)
        return merge(embedding, leaves)(tokens), step, head

    def unpack(vector: jax.Array) -> tuple[Step, HeadRows]:
        _, step, head = unpack_pass(shape, vector, jnp.zeros(shape.slots, jnp.int32))  # tokens are the first stage's
        return step, head

    def group(columns: Columns, caches: Caches, x: jax.Array, step: Step) -> Grouped:
        cos, sin = angles(config, step.positions)
        attend = functools.partial(_attend, backend, shape, step)
        done: list[LayerKV] = []
        kv: list[jax.Array] = []
        for leaves, cache in zip(zip(*columns, strict=True), caches, strict=True):
            x, cache, (k, v) = merge(layer, leaves)(x, cos, sin, attend, cache)
            done.append(cache)
            kv.append(jnp.stack([k[: shape.tokens], v[: shape.tokens]]))
        return x, x[step.pick], tuple(done), jnp.stack(kv) if fresh and shape.tokens else None

    R, pages = _EVERYWHERE, backend.spec
    return PassPrograms(
        embed=_compiled(embed, mesh, (embed_specs, R, R), R),
        unpack=_compiled(unpack, mesh, (R,), R),
        group=_compiled(group, mesh, (layer_specs, pages, R, R), (R, R, pages, WIRE_SPEC), donate=1, dtype=dtype),
        head=_head_program(config, mesh, dtype),
    )


@functools.cache
def _head_program(config: ModelConfig, mesh: Mesh, dtype: Any) -> Any:
    graph = head_graph(config, mesh.size)
    table = head_params(config, mesh.size)

    def head(leaves: Leaves, last: jax.Array, picked: jax.Array, rows: HeadRows) -> tuple[jax.Array, jax.Array]:
        logits = merge(graph, leaves)(picked)
        tokens, scores = sample(logits, rows.sampling, rows.position, config.vocab_size, mesh.size)
        result = jnp.stack([tokens, lax.bitcast_convert_type(scores, jnp.int32)])
        return result, last.at[rows.slot].set(tokens, mode="drop")

    R = _EVERYWHERE
    return _compiled(head, mesh, (tuple(table[name].spec for name in graph[2]), R, R, R), R, donate=1, dtype=dtype)


@functools.cache
def insert_program(mesh: Mesh, page_size: int, tokens: int) -> Callable[[Caches, Any, jax.Array], Caches]:
    """(caches donated, vector, kv [g, 2, T, K, H]) -> caches with the tokens in the pages of `pack_insert`."""
    backend = attention.backend_for(mesh)

    def insert(caches: Caches, vector: jax.Array, kv: jax.Array) -> Caches:
        width = write_entries(tokens, page_size, 1)
        columns = lax.slice(vector, (1,), (1 + 4 * width,)).reshape(4, width)
        writes = attention.PageWrites(vector[0], *columns)
        return tuple(backend.write_pages(cache, kv[i, 0], kv[i, 1], writes) for i, cache in enumerate(caches))

    return _compiled(insert, mesh, (backend.spec, _EVERYWHERE, WIRE_SPEC), backend.spec, donate=0)


def pack_insert(page_size: int, padded: int, start: int, tokens: int, pages: Sequence[int]) -> Any:
    """The vector of `insert_program`: `tokens` tokens at `start` of the block table `pages`."""
    import numpy as np

    fields = page_writes([(0, tokens, start, pages)], page_size, write_entries(padded, page_size, 1))
    return np.concatenate([np.ravel(value) for value in fields.values()]).astype(np.int32)


@functools.cache
def extract_program(mesh: Mesh, tokens: int) -> Callable[[Caches, Any, Any], jax.Array]:
    """(caches, pages [W] int32, offset [] int32) -> kv [g, 2, T, K, H]: T tokens from `offset` of the first page on."""
    backend = attention.backend_for(mesh)

    def extract(caches: Caches, pages: jax.Array, offset: jax.Array) -> jax.Array:
        return jnp.stack([backend.read_pages(cache, pages, offset, tokens) for cache in caches])

    return _compiled(extract, mesh, (backend.spec, _EVERYWHERE, _EVERYWHERE), WIRE_SPEC)


@functools.cache
def slice_program(mesh: Mesh, tokens: int) -> Callable[[jax.Array, Any], jax.Array]:
    """(fresh [g, 2, T', K, H], first []) -> [g, 2, T, K, H]: one chunk of a packed pass; T' >= T.

    Past the end of T' the last token is repeated: a padded unit says how many of its tokens count.
    """

    def cut(fresh: jax.Array, first: jax.Array) -> jax.Array:
        return jnp.take(fresh, first + jnp.arange(tokens), axis=2, mode="clip")

    return _compiled(cut, mesh, (WIRE_SPEC, _EVERYWHERE), WIRE_SPEC)


def _attend(
    backend: attention.Backend,
    shape: PassShape,
    step: Step,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: LayerKV,
) -> tuple[jax.Array, LayerKV]:
    """Writes the fresh K/V of both parts, then lets the T prompt tokens and the B rows attend, each in its own way."""
    T = shape.tokens
    if step.writes is not None:
        cache = backend.write_pages(cache, k[:T], v[:T], step.writes)
    if step.rows is not None:
        cache = backend.write_rows(cache, k[T:], v[T:], step.rows)
    parts = []
    if step.blocks is not None:
        parts.append(backend.attend_prompts(q[:T], k[:T], v[:T], cache, step.blocks))
    if step.rows is not None:
        parts.append(backend.attend_rows(q[T:], cache, step.rows))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts), cache


def _compiled(
    body: Callable[..., Any],
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    donate: int | None = None,
    dtype: Any = jnp.float32,
) -> Any:
    """jit of the body on every shard. Outputs have named shardings like the inputs: donated arrays come back as they
    went in, and the next call finds the same executable. `dtype`: of the weights among the arguments."""
    inner = body
    if mesh.size > 1:
        inner = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), out_specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    return jax.jit(
        inner,
        out_shardings=shardings,
        donate_argnums=() if donate is None else (donate,),
        compiler_options=compiler_options(mesh.devices.flat[0].platform, dtype),
    )
