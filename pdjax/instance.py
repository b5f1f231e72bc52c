"""One model replica: pipeline stages, decode rows and compiled programs. Enters: commands of the controller and KV
units of peers, through one lane thread. Leaves: tokens (as `Pending`, still being computed) and KV units.

An instance obeys: pages and slots come with the commands, it checks none of them. Nothing here waits for a device but
`Pending.wait`; over several processes `run` may wait, too, until the others have come to the same pass: on a CPU that
stands idle a short program runs in its caller's thread, its collectives included. The host side of a pass is numpy
only: one packed vector goes to each stage, one array of tokens comes back, and every other value stays on the devices:
activations go from stage to stage, the last token of each row from the last stage to the first. So the first stage
starts the next chunk while later ones compute this one.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pdjax import catalogue, probes
from pdjax.catalogue import Program
from pdjax.latency import Probe, Sample
from pdjax.messages import Chunk, InstanceSpec, Iteration, Join, Sampled, StartTransfer
from pdjax.models import attention
from pdjax.models.buckets import slice_sizes
from pdjax.models.config import ModelConfig
from pdjax.models.kv import LayerKV, kv_dtype
from pdjax.models.params import Weights
from pdjax.models.plan import SAMPLING_WORDS, PassShape, RowArrays, pack_pass, sampling_words, table_of
from pdjax.models.programs import PassPrograms, pass_programs, slice_program
from pdjax.models.sharding import shares
from pdjax.request import SamplingParams
from pdjax.stage import Layers, Stage, blank
from pdjax.transfer.base import Unit, UnitHeader
from pdjax.warmup import Progress, warm_up


@dataclasses.dataclass(frozen=True, slots=True)
class Pending:
    """The tokens of an iteration, maybe still being computed.

    `done`: a result of the last stage; what an iteration that samples nothing is over with.
    """

    done: jax.Array | None  # None: there was nothing to do
    tokens: jax.Array | None  # [2, R]: tokens, bits of their log probabilities (0 where nobody wants them)
    slots: tuple[int, ...]  # of the decode rows, which are the last of the R rows
    firsts: tuple[tuple[int, int], ...]  # (request, index into tokens)
    first_row: int  # index of the first decode row

    def wait(self) -> Sampled:
        """Blocks until the tokens are here, or without any, until the iteration is computed."""
        if self.tokens is None:
            jax.block_until_ready(self.done)
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
        weights: of each stage, as `pdjax.models.sharding.shares` cuts the model, placed on its mesh.
        meshes: of the stages, ("kv", "rep") each.
        stream_layers: layers per group, the unit of streaming; 0: nothing streams, groups of about 3.
        cuts: where stages begin, its own and those of its peers: no group may cross one.
        peer_buckets: padded token counts of the units that peers may send (`pdjax.models.buckets.wire_buckets`).
        exchanges: False for an instance that never sends or takes KV: nothing is compiled for it.
    """

    def __init__(
        self,
        spec: InstanceSpec,
        config: ModelConfig,
        weights: Sequence[Weights],
        meshes: Sequence[Mesh],
        *,
        stream_layers: int = 0,
        cuts: Sequence[int] = (),
        peer_buckets: Sequence[int] = (),
        exchanges: bool = True,
    ):
        self.spec, self.config = spec, config
        self._sizes = catalogue.sizes_of(
            spec,
            config.num_layers,
            stream_layers=stream_layers,
            cuts=cuts,
            peer_buckets=peer_buckets,
            exchanges=exchanges,
        )
        self.buckets, self.streams = self._sizes.buckets, self._sizes.streams
        self._weights_dtype = next(iter(weights[0].layers.values()))["wq"].dtype
        held = shares(config.num_layers, len(meshes))
        self._stages = [
            Stage(
                share,
                config,
                mine,
                mesh,
                self._sizes.groups,
                page_size=spec.page_size,
                num_pages=spec.num_pages,
                dtype=kv_dtype(self._weights_dtype, mesh.devices.flat),
            )
            for share, mine, mesh in zip(held, weights, meshes, strict=True)
        ]
        self._stage_of = {layer: stage for stage in self._stages for layer in stage.share.layers}
        # The last token of each slot: the last stage writes it, the first stage reads its copy.
        self._last = self._stages[-1].carry(np.zeros(spec.max_rows + 1, np.int32))
        self._held = self._copy_of_last()
        self._rows = _Rows(spec.max_rows, spec.pages_for(spec.max_model_len))
        self._insert_s: dict[tuple[int, int], float] = {}  # (layers, padded tokens) -> seconds

    @property
    def kv_dtype(self) -> np.dtype[Any]:
        """Of pages and units."""
        return self._stages[0].dtype

    def unit_bytes(self, tokens: int) -> int:
        """Bytes of the largest unit of so many tokens."""
        layers = max(len(layers) for stage in self._stages for layers, _, _ in stage.group_sizes())
        K, H = self.config.num_kv_heads, self.config.head_dim
        return layers * 2 * tokens * K * H * self.kv_dtype.itemsize

    @property
    def alone(self) -> bool:
        """Whether one process has all devices: else others run the same programs, and must run as many."""
        return all(stage.kv_sharding.is_fully_addressable for stage in self._stages)

    @property
    def kv_shardings(self) -> tuple[NamedSharding, ...]:
        """Of the units that hold a layer, by layer."""
        return tuple(self._stage_of[layer].kv_sharding for layer in range(self.config.num_layers))

    def run(self, iteration: Iteration, emit: Callable[[Unit], None]) -> Pending:
        """Changes the batch, then dispatches the pass without waiting; offers streamed chunks group by group."""
        self._rows.change(iteration)
        chunks, rows = iteration.chunks, self._rows.step() if iteration.decode else None
        return self._pass(chunks, rows, emit)

    def extract(self, transfer: StartTransfer) -> Iterator[Unit]:
        """The KV of a whole transfer as fresh arrays, one unit per token slice and layer group, read when asked for."""
        buckets = self._sizes.extracts
        for start in range(0, transfer.tokens, buckets[-1]):
            n = min(buckets[-1], transfer.tokens - start)
            T = next(size for size in buckets if size >= n)
            for stage in self._stages:
                for layers, kv in stage.extract(start, T, transfer.src_pages):
                    yield _unit(transfer.key, layers, start, n, kv)

    def insert(self, unit: Unit, pages: tuple[int, ...]) -> None:
        """Writes a unit, sharded as `kv_shardings` say for its layers, into the pages of its request's block table."""
        self._stage_of[unit.header.layer].insert(unit, pages)

    def insert_s(self, unit: Unit) -> float:
        """Seconds that `insert` takes on the device, as measured at warm-up; inf if it was not."""
        return self._insert_s.get((unit.header.layers, unit.header.shape[2]), math.inf)

    def rehearse(self, probe: Probe) -> Pending:
        """Dispatches such a pass, which changes no page and no slot: warm-up and measurements use it."""
        chunks, rows = self._rehearsal(probe)
        return self._pass(chunks, rows, lambda unit: None, dry=True)

    def program_of(self, probe: Probe) -> tuple[Any, ...]:
        """Identifies the compiled pass that serves a probe: equal for instances that share it."""
        return self._programs(*self._shape_of(probe))[1], self._weights_dtype

    def kind_of(self, probe: Probe) -> tuple[Any, ...]:
        """Equal for instances on which a probe takes equal time: other meshes and pools of the same kind."""
        mesh = self._stages[0].mesh
        kind = len(self._stages), mesh.size, mesh.devices.flat[0].device_kind, self._weights_dtype
        return self.config, self._shape_of(probe), self.spec.page_size, *kind

    def _shape_of(self, probe: Probe) -> tuple[int, int]:
        return self.buckets.program_for(sum(tokens for tokens, _ in probe.chunks), len(probe.contexts))

    def rehearse_transfers(self) -> None:
        """Calls every program of `insert`, `extract` and streaming, waits, and measures inserts. Changes no page."""
        for program in catalogue.transfer_programs(self.spec, self.config, self._sizes, self._stages):
            if program.kind != "insert":
                jax.block_until_ready(program.fn(*jax.tree.map(_real, program.args)))
        pages = tuple(range(1, self.spec.num_pages))
        for stage in self._stages:
            for layers, _, _ in stage.group_sizes():
                for T in self._sizes.inserts:
                    self._insert_s[len(layers), T] = stage.rehearse_insert(layers, T, pages[: self.spec.pages_for(T)])

    def warmup(self, progress: Progress | None = None, probes: Sequence[Probe] | None = None) -> list[Sample]:
        """Compiles every program by calling it, and measures: see `pdjax.warmup.warm_up`."""
        return warm_up(self, progress, probes)

    def programs(self) -> Iterator[Program]:
        """Every program that serves; it can be lowered with its arguments."""
        return catalogue.programs(self.spec, self.config, self._sizes, self._weights_dtype, self._stages)

    def fill_pages(self, pages: Sequence[int], value: float) -> None:
        """Overwrites whole pages, for tests. Goes through the host."""
        for stage in self._stages:
            axis = attention.backend_for(stage.mesh).layout.pages_axis
            for layer, cache in stage.pool.items():
                arrays = [np.array(array) for array in cache]
                for array in arrays:
                    np.moveaxis(array, axis, 0)[list(pages)] = value
                put = (jax.device_put(a, old.sharding) for a, old in zip(arrays, cache, strict=True))
                stage.pool[layer] = LayerKV(*put)

    def held_kv(self, pages: Sequence[int], tokens: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """(layer, head, KV [2, tokens, H]) of the first `tokens` tokens of a block table, as far as this process holds
        them. Goes through the host."""
        for stage in self._stages:
            yield from stage.held_kv(pages, tokens)

    def read_kv(self, pages: Sequence[int], tokens: int) -> np.ndarray:
        """The first `tokens` tokens of a block table, [L, 2, tokens, K, H], of an instance of one process. Goes through
        the host."""
        heads = np.stack([kv for _, _, kv in self.held_kv(pages, tokens)])
        by_layer = heads.reshape(self.config.num_layers, self.config.num_kv_heads, *heads.shape[1:])
        return by_layer.transpose(0, 2, 3, 1, 4)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _pass(
        self, chunks: Sequence[Chunk], rows: RowArrays | None, emit: Callable[[Unit], None], dry: bool = False
    ) -> Pending:
        tokens = sum(len(chunk.tokens) for chunk in chunks)
        T, B = self.buckets.program_for(tokens, 0 if rows is None else len(rows.slots))
        if not T and not B:
            return Pending(None, None, (), (), 0)
        shape, programs = self._programs(T, B)
        vector = pack_pass(shape, chunks, rows, dry=dry)
        streamed = [(at, chunk) for at, chunk in _offsets(chunks) if chunk.stream is not None]

        def offer(layers: Layers, fresh: Any) -> None:
            for at, chunk in streamed:
                emit(self._fresh_unit(chunk, at, layers, T, fresh, packed=len(chunks) > 1))

        for stage, its in zip(self._stages, programs, strict=True):
            if stage.share.first:
                x, step, head = its.embed(stage.embedding, self._held, vector)
            else:
                x, (step, head) = stage.carry(x), its.unpack(vector)
            x, picked = stage.run(its, x, step, offer)
        firsts = tuple((chunk.request, i) for i, chunk in enumerate(chunks) if chunk.last)
        if not B and not firsts:
            return Pending(x, None, (), (), 0)
        result, self._last = its.head(stage.head, self._last, picked, head)
        self._held = self._copy_of_last()
        result.copy_to_host_async()
        slots = () if rows is None else tuple(rows.slots.tolist())
        return Pending(x, result, slots, firsts, shape.sampled - B)

    def _copy_of_last(self) -> jax.Array:
        first = self._stages[0]
        return self._last if first.share.last else first.carry(self._last)

    def _rehearsal(self, probe: Probe) -> tuple[list[Chunk], RowArrays | None]:
        width = self.spec.pages_for(self.spec.max_model_len)
        held = probes.pages(self.spec, probe)
        greedy = SamplingParams(temperature=0.0)
        chunks = [
            Chunk(0, (0,) * tokens, prior, next(held), self.spec.max_rows, True, greedy)
            for tokens, prior in probe.chunks
        ]
        n = len(probe.contexts)
        if not n:
            return chunks, None
        rows = RowArrays(
            np.arange(n, dtype=np.int32),
            np.zeros(n, np.int32),
            np.array(probe.contexts, np.int32) - 1,
            np.stack([table_of(pages, width) for pages in held]),
            np.tile(sampling_words(greedy), (n, 1)),
        )
        return chunks, rows

    def _programs(self, T: int, B: int) -> tuple[PassShape, tuple[PassPrograms, ...]]:
        """The shape of a pass and each stage's programs of it."""
        shape = catalogue.pass_shape(self.spec, T, B)
        common = shape, self.streams, self._weights_dtype
        return shape, tuple(pass_programs(self.config, stage.mesh, *common) for stage in self._stages)

    def _fresh_unit(self, chunk: Chunk, at: int, layers: Layers, T: int, fresh: Any, *, packed: bool) -> Unit:
        """A chunk's KV, cut out of its pass where that has other chunks too."""
        n = len(chunk.tokens)
        if packed:
            size = next(size for size in slice_sizes(self.buckets.chunks, T) if size >= n)
            fresh = slice_program(self._stage_of[layers[0]].mesh, size)(fresh, np.int32(at))
        assert chunk.stream is not None
        return _unit(chunk.stream, layers, chunk.start, n, fresh)


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


def _real(argument: Any) -> Any:
    """An argument that a program can be called with: zeros where only the shape is known."""
    return blank(argument) if isinstance(argument, jax.ShapeDtypeStruct) else argument


def _offsets(chunks: Sequence[Chunk]) -> Iterator[tuple[int, Chunk]]:
    """Each chunk with the flat index of its first token."""
    at = 0
    for chunk in chunks:
        yield at, chunk
        at += len(chunk.tokens)


def _unit(key: int, layers: Layers, start: int, tokens: int, kv: jax.Array) -> Unit:
    return Unit(UnitHeader(key, layers[0], len(layers), start, tokens, kv.shape, str(kv.dtype)), kv)
