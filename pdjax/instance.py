"""One model replica on its mesh: pages, decode rows and compiled programs. Enters: commands of the controller and KV
units of peers, through one lane thread. Leaves: tokens (as `Pending`, still being computed) and KV units.

An instance obeys: pages and slots come with the commands, it checks none of them. Nothing here waits for a device but
`Pending.wait`. The host side of a pass is numpy only: one packed vector goes to the device, one vector of tokens comes
back, and every other value stays there.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdjax.latency import Load
from pdjax.messages import Chunk, InstanceSpec, Iteration, Join, Sampled, StartTransfer
from pdjax.models.buckets import Buckets, chunk_buckets, layer_groups, row_buckets, slice_sizes, wire_buckets
from pdjax.models.config import ModelConfig
from pdjax.models.kv import WIRE_SPEC, LayerKV, kv_dtype, make_pool
from pdjax.models.params import Weights
from pdjax.models.plan import SAMPLING_WORDS, PassShape, RowArrays, pack_pass, sampling_words, table_of
from pdjax.models.programs import (
    Columns,
    PassPrograms,
    columns_of,
    extract_program,
    insert_program,
    outer_leaves,
    pack_insert,
    pass_programs,
    slice_program,
)
from pdjax.request import SamplingParams
from pdjax.transfer.base import Unit, UnitHeader
from pdjax.warmup import Progress, warm_up


@dataclasses.dataclass(frozen=True, slots=True)
class Pending:
    """The tokens of an iteration, maybe still being computed."""

    tokens: jax.Array | None  # [2, R]: tokens, bits of their log probabilities (0 where nobody wants them)
    slots: tuple[int, ...]  # of the decode rows, which are the last of the R rows
    firsts: tuple[tuple[int, int], ...]  # (request, index into tokens)
    first_row: int  # index of the first decode row

    def wait(self) -> Sampled:
        """Blocks until the tokens are here."""
        if self.tokens is None:
            return Sampled((), ())
        values, bits = np.asarray(self.tokens)
        tokens = values.tolist()
        rows = tuple((slot, tokens[self.first_row + i]) for i, slot in enumerate(self.slots))
        firsts = tuple((request, tokens[i]) for request, i in self.firsts)
        if not bits.any():
            return Sampled(rows, firsts)
        scores = bits.view(np.float32).tolist()
        mine = [i for _, i in self.firsts] + [self.first_row + i for i in range(len(rows))]
        return Sampled(rows, firsts, tuple(scores[i] for i in mine))


class Instance:
    """A replica. All methods are called by one thread; `Pending.wait` by any.

    Args:
        spec: its limits; empty bucket fields are chosen by `pdjax.models.buckets`.
        weights: placed on `mesh` with the specs of `pdjax.models.params`.
        stream_layers: layers per group, the unit of streaming; 0: nothing streams, groups of about 3.
        peer_buckets: padded token counts of the units that peers may send (`pdjax.models.buckets.wire_buckets`).
        exchanges: False for an instance that never sends or takes KV: nothing is compiled for it.
    """

    def __init__(
        self,
        spec: InstanceSpec,
        config: ModelConfig,
        weights: Weights,
        mesh: Mesh,
        *,
        stream_layers: int = 0,
        peer_buckets: Sequence[int] = (),
        exchanges: bool = True,
    ):
        self.spec, self.config, self.mesh = spec, config, mesh
        self.buckets = Buckets(
            spec.chunk_buckets or chunk_buckets(spec.max_chunk), spec.row_buckets or row_buckets(spec.max_rows)
        )
        self.streams = stream_layers > 0 and exchanges
        sizes = sorted({*wire_buckets(spec.max_chunk, self.streams), *peer_buckets})
        self._insert_sizes = tuple(sizes) if exchanges and spec.max_rows else ()
        self._extract_sizes = wire_buckets(spec.max_chunk, streams=False) if exchanges else ()
        self.kv_sharding = NamedSharding(mesh, WIRE_SPEC)
        self.kv_shardings = (self.kv_sharding,) * config.num_layers
        self._outer = outer_leaves(config, weights, mesh.size)
        self._groups: list[tuple[tuple[int, ...], Columns]] = [
            (layers, columns_of(config, weights, mesh.size, layers))
            for layers in layer_groups(config.num_layers, stream_layers)
        ]
        self._weights_dtype = weights.layers[0]["wq"].dtype
        self._dtype = kv_dtype(self._weights_dtype, mesh.devices.flat)
        self._pool = make_pool(config, mesh, spec.num_pages, spec.page_size, self._dtype)
        self._last = jax.device_put(np.zeros(spec.max_rows + 1, np.int32), NamedSharding(mesh, PartitionSpec()))
        self._rows = _Rows(spec.max_rows, spec.pages_for(spec.max_model_len))

    def run(self, iteration: Iteration, emit: Callable[[Unit], None]) -> Pending:
        """Changes the batch, then dispatches the pass without waiting; offers streamed chunks group by group."""
        self._rows.change(iteration)
        chunks, rows = iteration.chunks, self._rows.step() if iteration.decode else None
        return self._pass(chunks, rows, emit)

    def extract(self, transfer: StartTransfer) -> Iterator[Unit]:
        """The KV of a whole transfer as fresh arrays, one unit per token slice and layer group, read when asked for."""
        P, buckets = self.spec.page_size, self._extract_sizes
        for start in range(0, transfer.tokens, buckets[-1]):
            n = min(buckets[-1], transfer.tokens - start)
            T = next(size for size in buckets if size >= n)
            pages = table_of(transfer.src_pages[start // P :][: _span(T, P)], _span(T, P))
            for layers, _ in self._groups:
                kv = extract_program(self.mesh, T)(self._caches(layers), pages, np.int32(start % P))
                yield self._unit(transfer.key, layers, start, n, kv)

    def insert(self, unit: Unit, pages: tuple[int, ...]) -> None:
        """Writes a unit, which lies on this mesh with `kv_sharding`, into the pages of its request's block table."""
        header, P = unit.header, self.spec.page_size
        T = header.shape[2]
        layers = range(header.layer, header.layer + header.layers)
        vector = pack_insert(P, T, header.start, header.tokens, pages)
        self._keep(layers, insert_program(self.mesh, P, T)(self._caches(layers), vector, unit.kv))

    def rehearse(self, load: Load) -> Pending:
        """Dispatches a pass of this load that changes no page and no slot: warm-up and measurements use it."""
        chunks, rows = self._rehearsal(load)
        return self._pass(chunks, rows, lambda unit: None, dry=True)

    def program_of(self, load: Load) -> tuple[Any, ...]:
        """Identifies the compiled pass that serves a load: equal for instances that share it."""
        return self._programs(*self._shape_of(load))[1], self._weights_dtype

    def kind_of(self, load: Load) -> tuple[Any, ...]:
        """Equal for instances on which the load takes equal time: other meshes and pools of the same kind."""
        kind = self.mesh.size, self.mesh.devices.flat[0].device_kind, self._weights_dtype
        return self.config, self._shape_of(load), self.spec.page_size, *kind

    def _shape_of(self, load: Load) -> tuple[int, int]:
        return self.buckets.program_for(sum(tokens for tokens, _ in load.chunks), load.rows)

    def rehearse_transfers(self) -> None:
        """Calls every program of `insert`, `extract` and streaming once, with no token to write, and waits."""
        for name, fn, args in self._transfer_programs():
            if not name.startswith("insert"):
                jax.block_until_ready(fn(*args))
        for layers, _ in self._group_sizes():
            for T in self._insert_sizes:
                self.insert(self._blank_unit(layers, T), ())

    def warmup(self, progress: Progress | None = None) -> list[tuple[Load, float]]:
        """Compiles every program by calling it, and measures: see `pdjax.warmup.warm_up`."""
        return warm_up(self, progress)

    def programs(self) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
        """(name, jitted function, arguments it can be called or lowered with) of every program that serves."""
        heads: set[int] = set()
        for T, B in self.buckets.pairs:
            load = Load(((T, 0),) if T else (), B, B, min(B, 1))
            chunks, rows = self._rehearsal(load)
            shape, programs = self._programs(T, B)
            args = (self._outer, self._last, pack_pass(shape, chunks, rows, dry=True))
            yield f"embed {T}+{B}", programs.embed, args
            x, step, head = programs.embed(*args)
            for layers, columns in self._group_sizes():
                yield f"group of {len(layers)} {T}+{B}", programs.group, (columns, self._caches(layers), x, step)
            if shape.sampled not in heads:
                heads.add(shape.sampled)
                picked = jax.device_put(np.zeros((shape.sampled, x.shape[1]), np.float32), x.sharding)
                yield f"head {shape.sampled}", programs.head, (self._outer, self._last, picked, head)
        yield from self._transfer_programs()

    def fill_pages(self, pages: Sequence[int], value: float) -> None:
        """Overwrites whole pages, for tests. Goes through the host."""
        for i, cache in enumerate(self._pool):
            arrays = [np.array(array) for array in cache]
            for array in arrays:
                array[list(pages)] = value
            self._pool[i] = LayerKV(*(jax.device_put(a, old.sharding) for a, old in zip(arrays, cache, strict=True)))

    def read_kv(self, pages: Sequence[int], tokens: int) -> np.ndarray:
        """The first `tokens` tokens of a block table, [L, 2, tokens, K, H], for tests. Goes through the host."""
        table, layers = list(pages), []
        for cache in self._pool:
            k = np.asarray(cache.k)[table].transpose(0, 3, 1, 2)  # [M, P, K, H]
            v = np.asarray(cache.v)[table].transpose(0, 2, 1, 3)
            layers.append(np.stack([a.reshape(-1, *a.shape[2:])[:tokens] for a in (k, v)]))
        return np.stack(layers)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _pass(
        self, chunks: Sequence[Chunk], rows: RowArrays | None, emit: Callable[[Unit], None], dry: bool = False
    ) -> Pending:
        tokens = sum(len(chunk.tokens) for chunk in chunks)
        T, B = self.buckets.program_for(tokens, 0 if rows is None else len(rows.slots))
        if not T and not B:
            return Pending(None, (), (), 0)
        shape, programs = self._programs(T, B)
        x, step, head = programs.embed(self._outer, self._last, pack_pass(shape, chunks, rows, dry=dry))
        streamed = [(at, chunk) for at, chunk in _offsets(chunks) if chunk.stream is not None]
        for layers, columns in self._groups:
            x, picked, caches, fresh = programs.group(columns, self._caches(layers), x, step)
            self._keep(layers, caches)
            for at, chunk in streamed:
                emit(self._fresh_unit(chunk, at, layers, T, fresh, packed=len(chunks) > 1))
        firsts = tuple((chunk.request, i) for i, chunk in enumerate(chunks) if chunk.last)
        if not B and not firsts:
            return Pending(None, (), (), 0)
        result, self._last = programs.head(self._outer, self._last, picked, head)
        result.copy_to_host_async()
        slots = () if rows is None else tuple(rows.slots.tolist())
        return Pending(result, slots, firsts, shape.sampled - B)

    def _rehearsal(self, load: Load) -> tuple[list[Chunk], RowArrays | None]:
        spec, width = self.spec, self.spec.pages_for(self.spec.max_model_len)
        pages = tuple(1 + i % spec.usable_pages for i in range(width))
        greedy = SamplingParams(temperature=0.0)
        chunks = [
            Chunk(0, (0,) * tokens, prior, pages[: spec.pages_for(prior + tokens)], spec.max_rows, True, greedy)
            for tokens, prior in load.chunks
        ]
        if not load.rows:
            return chunks, None
        n = load.rows
        table = table_of(pages[: spec.pages_for(load.max_context)], width)
        rows = RowArrays(
            np.arange(n, dtype=np.int32),
            np.zeros(n, np.int32),
            np.full(n, load.max_context - 1, np.int32),
            np.tile(table, (n, 1)),
            np.tile(sampling_words(greedy), (n, 1)),
        )
        return chunks, rows

    def _transfer_programs(self) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
        P = self.spec.page_size
        for layers, _ in self._group_sizes():
            caches, g = self._caches(layers), len(layers)
            for T in self._insert_sizes:
                vector = pack_insert(P, T, 0, 0, ())
                yield (
                    f"insert {g}x{T}",
                    insert_program(self.mesh, P, T),
                    (caches, vector, self._blank_unit(layers, T).kv),
                )
            for T in self._extract_sizes:
                pages = np.zeros(_span(T, P), np.int32)
                yield f"extract {g}x{T}", extract_program(self.mesh, T), (caches, pages, np.int32(0))
            for T in self.buckets.chunks if self.streams else ():
                fresh = self._blank_unit(layers, T).kv
                for size in slice_sizes(self.buckets.chunks, T) if self.spec.max_chunks > 1 else ():
                    yield f"slice {g}x{T}:{size}", slice_program(self.mesh, size), (fresh, np.int32(0))

    def _group_sizes(self) -> list[tuple[tuple[int, ...], Columns]]:
        """One group of every size: programs are the same for groups of equal size."""
        return list({len(layers): (layers, columns) for layers, columns in self._groups}.values())

    def _blank_unit(self, layers: Sequence[int], tokens: int) -> Unit:
        shape = (len(layers), 2, tokens, self.config.num_kv_heads, self.config.head_dim)
        kv = jax.device_put(np.zeros(shape, self._dtype), self.kv_sharding)
        return Unit(UnitHeader(0, layers[0], len(layers), 0, 0, shape, str(self._dtype)), kv)

    def _programs(self, T: int, B: int) -> tuple[PassShape, PassPrograms]:
        spec = self.spec
        prompts = spec.max_chunks if T else 0
        table = spec.pages_for(spec.max_model_len)
        shape = PassShape(T, B, prompts, table, spec.page_size, spec.num_pages, spec.max_rows + 1)
        return shape, pass_programs(self.config, self.mesh, shape, self.streams)

    def _caches(self, layers: Sequence[int]) -> tuple[LayerKV, ...]:
        return tuple(self._pool[layer] for layer in layers)

    def _keep(self, layers: Sequence[int], caches: Sequence[LayerKV]) -> None:
        for layer, cache in zip(layers, caches, strict=True):
            self._pool[layer] = cache

    def _fresh_unit(self, chunk: Chunk, at: int, layers: tuple[int, ...], T: int, fresh: Any, *, packed: bool) -> Unit:
        n = len(chunk.tokens)
        if packed:
            size = next(size for size in slice_sizes(self.buckets.chunks, T) if size >= n)
            fresh = slice_program(self.mesh, size)(fresh, np.int32(at))
        assert chunk.stream is not None
        return self._unit(chunk.stream, layers, chunk.start, n, fresh)

    def _unit(self, key: int, layers: tuple[int, ...], start: int, tokens: int, kv: jax.Array) -> Unit:
        header = UnitHeader(key, layers[0], len(layers), start, tokens, kv.shape, str(kv.dtype))
        return Unit(header, kv)


class _Rows:
    """The decode batch as arrays over slots, changed by deltas."""

    def __init__(self, slots: int, table: int):
        self._order: list[int] = []
        self._tables = np.zeros((slots, table), np.int32)
        self._pages = np.zeros(slots, np.int32)
        self._tokens = np.zeros(slots, np.int32)
        self._positions = np.zeros(slots, np.int32)
        self._sampling = np.zeros((slots, SAMPLING_WORDS), np.int32)

    def change(self, iteration: Iteration) -> None:
        for slot in iteration.leaves:
            self._order.remove(slot)
        for join in iteration.joins:
            self._join(join)
        for slot, page in iteration.grows:
            self._tables[slot, self._pages[slot]] = page
            self._pages[slot] += 1

    def step(self) -> RowArrays:
        """The arrays of one decode step; afterwards every row has moved on by one token, which its slot holds."""
        order = np.array(self._order, np.int32)
        arrays = RowArrays(
            order, self._tokens[order], self._positions[order], self._tables[order], self._sampling[order]
        )
        self._tokens[order] = -1
        self._positions[order] += 1
        return arrays

    def _join(self, join: Join) -> None:
        slot = join.slot
        self._order.append(slot)
        self._tables[slot] = table_of(join.pages, self._tables.shape[1])
        self._pages[slot] = len(join.pages)
        self._tokens[slot] = -1 if join.token is None else join.token
        self._positions[slot] = join.position
        self._sampling[slot] = sampling_words(join.sampling)


def _offsets(chunks: Sequence[Chunk]) -> Iterator[tuple[int, Chunk]]:
    """Each chunk with the flat index of its first token."""
    at = 0
    for chunk in chunks:
        yield at, chunk
        at += len(chunk.tokens)


def _span(tokens: int, page_size: int) -> int:
    """Most pages that `tokens` consecutive tokens touch."""
    return -(-(tokens + page_size - 1) // page_size)
