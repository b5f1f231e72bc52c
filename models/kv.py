"""The KV pool of one instance: what its arrays look like and how large they are.

Enters: a model, a mesh and a number of pages. Leaves: one pair of arrays per layer, which the programs take as
donated arguments and give back updated in place. Page 0 is the zero page: block tables are padded with it and nothing
ever writes to it.
"""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdjax.models import attention
from pdjax.models.attention import LayerKV as LayerKV  # whoever has pages has them from here
from pdjax.models.config import ModelConfig
from pdjax.models.sharding import KV

WIRE_SPEC = PartitionSpec(None, None, None, KV)  # [layers, 2, T, K, H]


def kv_dtype(weights_dtype: Any, devices: Iterable[Any]) -> np.dtype:
    """The dtype KV is kept in: float32 on CPU (XLA widens a whole bf16 cache to update it), else the weights'."""
    return kv_dtype_on("cpu" if any(device.platform == "cpu" for device in devices) else "", weights_dtype)


def kv_dtype_on(platform: str, weights_dtype: Any) -> np.dtype:
    """The same, of a platform that this process may have no device of."""
    return np.dtype(np.float32 if platform == "cpu" else weights_dtype)


def kv_bytes_per_token(config: ModelConfig, dtype: Any) -> int:
    """Bytes of K and V of one token over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * np.dtype(dtype).itemsize


def make_pool(
    config: ModelConfig, mesh: Mesh, num_pages: int, page_size: int, dtype: Any, layers: int | None = None
) -> list[LayerKV]:
    """Zeroed pages for so many layers (None: all), in the layout of the mesh's backend, kv heads sharded over "kv"."""
    shapes = pool_shapes(config, mesh, num_pages, page_size, dtype, layers)
    return [LayerKV(*(_zeros(each.shape, each.dtype.name, each.sharding)() for each in layer)) for layer in shapes]


def pool_shapes(
    config: ModelConfig, mesh: Mesh, num_pages: int, page_size: int, dtype: Any, layers: int | None = None
) -> list[Any]:
    """The same without memory: `LayerKV`s of `jax.ShapeDtypeStruct`."""
    backend = attention.backend_for(mesh)
    sharding = NamedSharding(mesh, backend.spec)
    shapes = backend.shape(num_pages, config.num_kv_heads, config.head_dim, page_size)
    pair: list[Any] = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in shapes]
    return [LayerKV(*pair)] * (config.num_layers if layers is None else layers)


def unit_shape(config: ModelConfig, mesh: Mesh, layers: int, tokens: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """Of a unit of KV on a mesh, as instances exchange it, whatever their pages look like: [g, 2, tokens, K, H]."""
    shape = (layers, 2, tokens, config.num_kv_heads, config.head_dim)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, WIRE_SPEC))


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: str, sharding: NamedSharding) -> Any:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
