"""Fills the parameters of a model: from a checkpoint reader, or with reproducible random numbers.

What enters is a `TensorReader` (or a seed), the config, a ("kv", "rep") mesh, a dtype and the share of a pipeline
stage; what leaves is `Weights` on that mesh, laid out and padded as `models.params` says. Called by `models.source`.

Nothing is built whole first: every device's shard is filled from the rows it needs, a few MB at a time, and given to
its device before the next one is started. So a load needs, beside the weights that stay, about one shard.
"""

import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pdjax.models.checkpoints.base import TensorReader
from pdjax.models.config import ModelConfig
from pdjax.models.params import Param, Weights, embed_params, head_params, layer_params
from pdjax.models.sharding import Share

_BLOCK_BYTES = 8 << 20  # rows read at a time, counted in float32

Array = np.ndarray[Any, Any]
Index = tuple[slice, ...]
Part = Callable[[Index], Array]  # part of a parameter -> its values


def load(reader: TensorReader, config: ModelConfig, mesh: Mesh, dtype: str, share: Share | None = None) -> Weights:
    """Reads what one stage holds of a checkpoint to its mesh.

    Args:
        reader: tensors of the checkpoint.
        mesh: as `models.sharding.make_mesh` builds it.
        dtype: "float32" or "bfloat16" (rounded to nearest, ties to even). Norms are always float32.
        share: of the stage; None: the whole model.

    Raises:
        ValueError: a tensor is missing, has another shape, or belongs to nothing in the model; or a file is broken.
    """
    _check(reader, config)

    def fill(param: Param, exact: Param, kind: np.dtype[Any]) -> Part:
        return lambda index: _read_part(reader, exact, index, kind)

    return _build(config, mesh, dtype, share, fill)


def copy_to(weights: Weights, mesh: Mesh) -> Weights:
    """The same weights on another mesh of as many devices, from device to device."""

    def sharding(array: jax.Array) -> NamedSharding:
        assert isinstance(array.sharding, NamedSharding)
        return NamedSharding(mesh, array.sharding.spec)

    def copy(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return jax.device_put(arrays, {name: sharding(array) for name, array in arrays.items()})

    return Weights(copy(weights.outer), {number: copy(layer) for number, layer in weights.layers.items()})


def random(config: ModelConfig, mesh: Mesh, dtype: str, seed: int = 0, share: Share | None = None) -> Weights:
    """Random weights, the same for every mesh: each parameter's numbers follow from its name and the seed.

    Matrices are scaled by their input size, so activations stay of order one through any number of layers.
    """

    def fill(param: Param, exact: Param, kind: np.dtype[Any]) -> Part:
        key = zlib.crc32(" ".join(param.sources).encode())
        values = np.random.Generator(np.random.Philox(key=[key, seed])).standard_normal(exact.shape, np.float32)
        if param.norm:
            values = 1 + 0.1 * values
        elif exact.in_axes:
            values /= np.sqrt(np.prod([exact.shape[_unstacked(axis, exact)] for axis in exact.in_axes]))
        else:
            values *= 0.1
        values = np.pad(values, [(0, big - small) for big, small in zip(param.shape, exact.shape, strict=True)])
        return lambda index: values[index].astype(kind)

    return _build(config, mesh, dtype, share, fill)


def shapes(config: ModelConfig, mesh: Mesh, dtype: str, share: Share | None = None) -> Weights:
    """What `load` would make, without memory: `jax.ShapeDtypeStruct`s in place of arrays."""

    def described(table: dict[str, Param]) -> dict[str, Any]:
        return {
            name: jax.ShapeDtypeStruct(param.shape, kind_of(param, dtype), sharding=NamedSharding(mesh, param.spec))
            for name, param in table.items()
        }

    outer, layers = tables(config, mesh.size, share)
    return Weights(described(outer), {number: described(table) for number, table in layers.items()})


def tables(config: ModelConfig, tp: int, share: Share | None = None) -> tuple[dict[str, Param], dict[int, Any]]:
    """The parameter tables of a stage: the outer one, and layer number -> table. None: of the whole model."""
    share = share or Share(range(config.num_layers))
    outer = (embed_params(config, tp) if share.first else {}) | (head_params(config, tp) if share.last else {})
    return outer, {layer: layer_params(config, tp, layer) for layer in share.layers}


def kind_of(param: Param, dtype: str) -> np.dtype[Any]:
    """The dtype that a parameter has when the weights have `dtype`."""
    return np.dtype("float32") if param.norm else np.dtype(jax.numpy.dtype(dtype))


def _build(
    config: ModelConfig,
    mesh: Mesh,
    dtype: str,
    share: Share | None,
    fill: Callable[[Param, Param, np.dtype[Any]], Part],
) -> Weights:
    """Makes every parameter, device by device; `fill` is told the parameter as it is on this mesh and unpadded."""

    def made(table: dict[str, Param], exact: dict[str, Param]) -> dict[str, jax.Array]:
        arrays: dict[str, jax.Array] = {}
        for name, param in table.items():
            sharding = NamedSharding(mesh, param.spec)
            shards: dict[tuple[tuple[int, int], ...], list[Any]] = {}
            for device, index in sharding.addressable_devices_indices_map(param.shape).items():
                bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), param.shape, strict=True))
                shards.setdefault(bounds, []).append(device)
            part_of = fill(param, exact[name], kind_of(param, dtype))
            pieces = []
            for bounds, devices in shards.items():
                data = part_of(tuple(slice(*b) for b in bounds))
                # Waiting keeps one shard's host copy alive, not all of them.
                pieces += jax.block_until_ready([jax.device_put(data, device) for device in devices])
            arrays[name] = jax.make_array_from_single_device_arrays(param.shape, sharding, pieces)
        return arrays

    (outer, layers), (outer_exact, layers_exact) = tables(config, mesh.size, share), tables(config, 1, share)
    return Weights(made(outer, outer_exact), {i: made(layers[i], layers_exact[i]) for i in layers})


def _unstacked(axis: int, param: Param) -> int:
    """An axis of one source (stack axis left out) as an axis of the parameter."""
    return axis if param.stack is None or axis < param.stack else axis + 1


def _source_shape(exact: Param) -> tuple[int, ...]:
    """[out, in] or [out] of one source of an unpadded parameter."""
    sizes = [exact.shape[_unstacked(axis, exact)] for axis in (*exact.out_axes, *exact.in_axes)]
    split = len(exact.out_axes)
    out, into = int(np.prod(sizes[:split])), int(np.prod(sizes[split:]))
    return (out, into) if exact.in_axes else (out,)


def _read_part(reader: TensorReader, exact: Param, index: Index, kind: np.dtype[Any]) -> Array:
    """The part `index` of a parameter, which is `exact` without padding. Padding is zero."""
    shard = np.zeros([part.stop - part.start for part in index], kind)
    # What of the part is not padding, in the parameter and in the shard.
    real = [
        slice(part.start, max(part.start, min(part.stop, size))) for part, size in zip(index, exact.shape, strict=True)
    ]
    filled = shard[tuple(slice(0, part.stop - part.start) for part in real)]
    out_axes = [_unstacked(axis, exact) for axis in exact.out_axes]
    in_axes = [_unstacked(axis, exact) for axis in exact.in_axes]
    out_sizes, in_sizes = ([exact.shape[axis] for axis in axes] for axes in (out_axes, in_axes))
    columns = tuple(real[axis] for axis in in_axes)
    for position, source in enumerate(exact.sources):
        # A view of what this source fills, with the axes in its order: [*out, *in].
        view = filled if exact.stack is None else np.moveaxis(filled, exact.stack, 0)[position]
        view = view.transpose(*exact.out_axes, *exact.in_axes)
        *heads, last = (real[axis] for axis in out_axes)
        step = max(1, _BLOCK_BYTES // (4 * max(1, int(np.prod(in_sizes)))))
        for head in np.ndindex(*(part.stop - part.start for part in heads)):
            # Rows of the source are numbered by the out axes, the last one fastest.
            base = 0
            for i, part, size in zip(head, heads, out_sizes[:-1], strict=True):
                base = base * size + part.start + i
            base *= out_sizes[-1]
            for start in range(last.start, last.stop, step):
                stop = min(start + step, last.stop)
                rows = reader.read(source, slice(base + start, base + stop))
                block = rows.reshape(stop - start, *in_sizes)[(slice(None), *columns)]
                view[head][start - last.start : stop - last.start] = block.astype(kind)
    return shard


def _check(reader: TensorReader, config: ModelConfig) -> None:
    """Every tensor of the model is there with its shape, and there is no other."""
    there = reader.names()
    outer, layers = tables(config, 1)
    expected = {
        source: _source_shape(param)
        for table in (outer, *layers.values())
        for param in table.values()
        for source in param.sources
    }
    for name, shape in expected.items():
        if name not in there:
            fused = name.replace("gate_proj", "gate_up_proj").replace("q_proj", "qkv_proj")
            hint = ""
            if name == "lm_head.weight":
                hint = "; if the head is the embedding, set tie_word_embeddings to true in config.json"
            elif fused != name and fused in there:
                hint = f"; the checkpoint has {fused!r} instead: fused weights are not read"
            raise ValueError(f"tensor {name!r} is missing in {_where(reader, there)}{hint}")
        if reader.shape(name) != shape:
            raise ValueError(
                f"{reader.file(name)}: tensor {name!r} has shape {list(reader.shape(name))}; allowed by the config: "
                f"{list(shape)}"
            )
    for name in sorted(there - set(expected)):
        if name.endswith("rotary_emb.inv_freq"):
            continue  # a table that follows from the config; old checkpoints store it
        if name == "lm_head.weight" and config.tied:
            _check_tied(reader, name, expected)
            continue
        raise ValueError(
            f"{reader.file(name)}: tensor {name!r} belongs to nothing in the model that config.json describes"
        )


def _where(reader: TensorReader, there: set[str]) -> str:
    files = sorted({reader.file(name) for name in there})
    return files[0] if len(files) == 1 else f"{len(files)} files like {files[0]}" if files else "an empty checkpoint"


def _check_tied(reader: TensorReader, name: str, expected: dict[str, tuple[int, ...]]) -> None:
    """A stored head beside a tied embedding must equal it."""
    embed = "model.embed_tokens.weight"
    size, width = expected[embed]
    step = max(1, _BLOCK_BYTES // (4 * width))
    same = reader.shape(name) == (size, width) and all(
        np.array_equal(reader.read(name, slice(i, i + step)), reader.read(embed, slice(i, i + step)))
        for i in range(0, size, step)
    )
    if not same:
        raise ValueError(
            f"{reader.file(name)}: tensor {name!r} differs from {embed!r} although tie_word_embeddings is true; "
            "allowed: equal, absent, or tie_word_embeddings false"
        )
