"""The programs of an instance on devices that are not there. Enter: an instance of an engine and its meshes, of
compile-only devices (`pdjax.aot.targets`). Leave: the programs that it would be warmed up with, their arguments as
shapes. Called by whoever compiles them.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from pdjax import catalogue
from pdjax.build import exchange_of
from pdjax.catalogue import Program
from pdjax.messages import InstanceSpec
from pdjax.models import weights
from pdjax.models.config import ModelConfig
from pdjax.models.kv import LayerKV, kv_dtype, pool_shapes
from pdjax.models.params import Weights
from pdjax.models.programs import Columns, Leaves, columns_of, embed_leaves, head_leaves
from pdjax.models.sharding import Share, shares
from pdjax.stage import Layers

__all__ = ["Program", "catalog"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Described:
    """What `pdjax.stage.Stage` would hold, as shapes: a `pdjax.catalogue.Part`."""

    share: Share
    mesh: Mesh
    config: ModelConfig
    weights: Weights
    pool: dict[int, LayerKV]
    groups: tuple[Layers, ...]

    @property
    def embedding(self) -> Leaves:
        return embed_leaves(self.config, self.weights, self.mesh.size) if self.share.first else ()

    @property
    def head(self) -> Leaves:
        return head_leaves(self.config, self.weights, self.mesh.size) if self.share.last else ()

    def group_sizes(self) -> list[tuple[Layers, Columns, tuple[LayerKV, ...]]]:
        sizes = {len(layers): layers for layers in self.groups if layers[0] in self.share.layers}
        return [
            (
                layers,
                columns_of(self.config, self.weights, self.mesh.size, layers),
                tuple(self.pool[layer] for layer in layers),
            )
            for layers in sizes.values()
        ]


def catalog(
    spec: InstanceSpec,
    specs: Sequence[InstanceSpec],
    config: ModelConfig,
    meshes: Sequence[Mesh],
    dtype: str,
    stream_layers: int,
) -> Iterator[Program]:
    """Every program of an instance.

    Args:
        spec: one of `specs`, the instances of its engine.
        meshes: of its stages.
        dtype: of the weights: "float32" or "bfloat16".
        stream_layers: as in `pdjax.config.EngineConfig`.

    Returns:
        Programs with `jax.ShapeDtypeStruct`s as arguments: with a sharding, or without one what comes from the host.
    """
    sizes = catalogue.sizes_of(spec, config.num_layers, **exchange_of(spec, specs, config, stream_layers))
    parts, weights_dtype = [], np.dtype(jax.numpy.dtype(dtype))
    for share, mesh in zip(shares(config.num_layers, spec.pp), meshes, strict=True):
        kv = kv_dtype(weights_dtype, mesh.devices.flat)
        pool = pool_shapes(config, mesh, spec.num_pages, spec.page_size, kv, len(share.layers))
        pages = dict(zip(share.layers, pool, strict=True))
        parts.append(_Described(share, mesh, config, weights.shapes(config, mesh, dtype, share), pages, sizes.groups))
    for program in catalogue.programs(spec, config, sizes, weights_dtype, parts):
        yield dataclasses.replace(program, args=jax.tree.map(_shape, program.args))


def _shape(argument: Any) -> jax.ShapeDtypeStruct:
    if isinstance(argument, jax.ShapeDtypeStruct):
        return argument
    return jax.ShapeDtypeStruct(argument.shape, argument.dtype)
