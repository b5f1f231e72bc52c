"""One pipeline stage of an instance: a mesh that owns a run of layers, their weights and their pages. Enters: the
activations of the stage before, and units of KV. Leaves: activations on its own mesh, fresh KV, units. Called by
`pdjax.instance` and by nobody else.

Every method dispatches and returns: what it takes may still be being computed, and so may what it gives.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdjax.models import attention
from pdjax.models.config import ModelConfig
from pdjax.models.kv import WIRE_SPEC, LayerKV, make_pool, unit_shape
from pdjax.models.params import Weights
from pdjax.models.plan import Step, table_of
from pdjax.models.programs import (
    Columns,
    PassPrograms,
    columns_of,
    embed_leaves,
    extract_program,
    head_leaves,
    insert_program,
    pack_insert,
)
from pdjax.models.sharding import Share
from pdjax.transfer.base import Unit, UnitHeader

Layers = tuple[int, ...]


class Stage:
    """A run of layers on a mesh.

    Args:
        share: which layers, and whether embedding and head are here.
        weights: what `share` says, on `mesh`.
        groups: the layer groups of the whole model; none crosses the ends of this stage.
        page_size, num_pages: of the pool.
        dtype: of KV.

    Attributes:
        embedding, head: leaves for the programs of that name; empty where they are not.
        dtype: of pages and units.
        kv_sharding: of the units that `insert` takes and `extract` gives.
    """

    def __init__(
        self,
        share: Share,
        config: ModelConfig,
        weights: Weights,
        mesh: Mesh,
        groups: Sequence[Layers],
        *,
        page_size: int,
        num_pages: int,
        dtype: np.dtype[Any],
    ):
        self.share, self.mesh, self.page_size, self.dtype = share, mesh, page_size, dtype
        self.kv_sharding = NamedSharding(mesh, WIRE_SPEC)
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self.embedding = embed_leaves(config, weights, mesh.size) if share.first else ()
        self.head = head_leaves(config, weights, mesh.size) if share.last else ()
        self._groups: list[tuple[Layers, Columns]] = [
            (layers, columns_of(config, weights, mesh.size, layers)) for layers in groups if layers[0] in share.layers
        ]
        pool = make_pool(config, mesh, num_pages, page_size, dtype, len(share.layers))
        self.pool: dict[int, LayerKV] = dict(zip(share.layers, pool, strict=True))
        self._config = config

    def carry(self, array: Any) -> jax.Array:
        """A copy on every device of this stage, of a host array or one that every device of another stage has.

        Between meshes of one size `jax.device_put` moves shard by shard: it compiles nothing and does not wait for an
        array that is still being computed (0.5 ms for its caller while the array took 400 ms, and with 2 devices each
        800 ms; jax 0.10.2 on CPU). Onto devices of several processes it would compare what each of them gives, by a
        program of its own, so there every process moves what it has.
        """
        if self._everywhere.is_fully_addressable:
            return jax.device_put(array, self._everywhere)
        there = self._everywhere.addressable_devices
        held = (
            [shard.data for shard in array.addressable_shards] if isinstance(array, jax.Array) else [array] * len(there)
        )
        moved = [jax.device_put(data, device) for data, device in zip(held, there, strict=True)]
        return jax.make_array_from_single_device_arrays(array.shape, self._everywhere, moved)

    def run(
        self, programs: PassPrograms, x: jax.Array, step: Step, emit: Callable[[Layers, jax.Array | None], None]
    ) -> tuple[jax.Array, jax.Array]:
        """All layers of a pass. x [R, D] on this stage -> (x, picked [R', D]); `emit` is told each group's fresh KV."""
        picked = x
        for layers, columns in self._groups:
            x, picked, caches, fresh = programs.group(columns, self._caches(layers), x, step)
            self._keep(layers, caches)
            emit(layers, fresh)
        return x, picked

    def extract(self, start: int, tokens: int, pages: Sequence[int]) -> Iterator[tuple[Layers, jax.Array]]:
        """(layers, kv [g, 2, tokens, K, H]) of each group: `tokens` tokens from position `start` of a block table."""
        P = self.page_size
        width = span(tokens, P)
        table = table_of(pages[start // P :][:width], width)
        for layers, _ in self._groups:
            yield layers, extract_program(self.mesh, tokens)(self._caches(layers), table, np.int32(start % P))

    def insert(self, unit: Unit, pages: tuple[int, ...]) -> None:
        """Writes a unit of this stage's layers into the pages of its request's block table."""
        header = unit.header
        layers = tuple(range(header.layer, header.layer + header.layers))
        self._insert(layers, pack_insert(self.page_size, header.shape[2], header.start, header.tokens, pages), unit.kv)

    def rehearse_insert(self, layers: Layers, tokens: int, pages: Sequence[int]) -> float:
        """Seconds that the insert of as many tokens takes on the device. The pages keep what they hold; blocks."""
        vector, kv = pack_insert(self.page_size, tokens, 0, tokens, pages), self.blank_unit(layers, tokens).kv
        # PageWrites.high: no offset is fresh. Whole pages are written as they were, single tokens (GPU) not at all.
        vector[1 + 3 * (len(vector) // 4) :] = 0
        times = []
        for _ in range(3):  # the first call fills jit's fast path and is slower
            began = time.perf_counter()
            self._insert(layers, vector, kv)
            jax.block_until_ready(self._caches(layers))
            times.append(time.perf_counter() - began)
        return min(times)

    def blank_unit(self, layers: Layers, tokens: int) -> Unit:
        """A unit of `tokens` padded tokens, none of which counts."""
        kv = blank(unit_shape(self._config, self.mesh, len(layers), tokens, self.dtype))
        return Unit(UnitHeader(0, layers[0], len(layers), 0, 0, kv.shape, str(self.dtype)), kv)

    def held_kv(self, pages: Sequence[int], tokens: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """(layer, head, KV [2, tokens, H]) of the first `tokens` tokens of a block table, for every layer of this stage
        and every head that a device of this process has. Blocks; goes through the host."""
        table, layout = np.asarray(pages, np.int32), attention.backend_for(self.mesh).layout
        axis = layout.heads_axis
        for layer, cache in sorted(self.pool.items()):
            ks, vs = (
                {shard.index[axis].start or 0: shard.data for shard in array.addressable_shards} for array in cache
            )
            for first, k in sorted(ks.items()):
                own = layout.on_host((np.asarray(k), np.asarray(vs[first])), table)
                for head, kv in enumerate(own):  # [2, M * P, H]
                    yield layer, first + head, kv[:, :tokens]

    def group_sizes(self) -> list[tuple[Layers, Columns, tuple[LayerKV, ...]]]:
        """One group of every size with its leaves and pages: groups of equal size are one program."""
        sizes = {len(layers): (layers, columns) for layers, columns in self._groups}
        return [(layers, columns, self._caches(layers)) for layers, columns in sizes.values()]

    def _insert(self, layers: Layers, vector: Any, kv: jax.Array) -> None:
        self._keep(layers, insert_program(self.mesh, self.page_size, kv.shape[2])(self._caches(layers), vector, kv))

    def _caches(self, layers: Layers) -> tuple[LayerKV, ...]:
        return tuple(self.pool[layer] for layer in layers)

    def _keep(self, layers: Layers, caches: Sequence[LayerKV]) -> None:
        self.pool.update(zip(layers, caches, strict=True))


def blank(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros, each process making what its own devices have of them."""
    sharding = shape.sharding
    zeros = np.zeros(sharding.shard_shape(shape.shape), shape.dtype)
    shards = [jax.device_put(zeros, device) for device in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(shape.shape, sharding, shards)


def span(tokens: int, page_size: int) -> int:
    """Most pages that `tokens` consecutive tokens touch."""
    return -(-(tokens + page_size - 1) // page_size)
