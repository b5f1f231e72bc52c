"""Every program of an instance. Enter: its limits, what it exchanges with others, and its stages, with weights and
pages or with their shapes only. Leave: programs by name, each with the arguments it is compiled for. Called by
`pdjax.instance`, whose warm-up compiles them, and by `pdjax.aot`, so that what is compiled for chips that are not there
is what would serve on them.

Nothing here computes. What only a pass would make is an argument as `jax.ShapeDtypeStruct`: jit finds what was compiled
for it when the arrays come.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdjax.messages import InstanceSpec, Role
from pdjax.models.buckets import Buckets, chunk_buckets, layer_groups, row_buckets, slice_sizes, wire_buckets
from pdjax.models.config import ModelConfig
from pdjax.models.kv import LayerKV, unit_shape
from pdjax.models.plan import PassShape, pack_pass
from pdjax.models.programs import (
    Columns,
    Leaves,
    extract_program,
    insert_program,
    pack_insert,
    pass_programs,
    slice_program,
)
from pdjax.models.sharding import Share, shares
from pdjax.stage import Layers, span


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """One compiled program.

    Attributes:
        name: its kind, the layers of its group, "TOKENS+ROWS" of its pass, and its stage where there are several.
        role: of the instance.
        stage: number of the pipeline stage.
        fn: jitted.
        args: what it can be lowered with: arrays, their shapes, and small arrays of the host.
    """

    name: str
    role: Role
    stage: int
    fn: Any
    args: tuple[Any, ...]

    @property
    def kind(self) -> str:
        """embed, unpack, group, head, insert, extract or slice."""
        return self.name.split()[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What the programs of an instance are compiled for.

    Attributes:
        buckets: padded tokens and rows of its passes.
        groups: the layer groups of the whole model; none crosses the ends of a stage.
        streams: groups also give the fresh K/V of the prompt tokens.
        inserts, extracts: padded tokens of the units it takes, and of those it sends of whole prompts.
        slices: (tokens of a pass, tokens cut out of it) of the units it streams of packed prompts.
    """

    buckets: Buckets
    groups: tuple[Layers, ...]
    streams: bool
    inserts: tuple[int, ...]
    extracts: tuple[int, ...]
    slices: tuple[tuple[int, int], ...]


class Part(Protocol):
    """A pipeline stage, or what one would hold."""

    @property
    def share(self) -> Share: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def embedding(self) -> Leaves: ...
    @property
    def head(self) -> Leaves: ...
    def group_sizes(self) -> list[tuple[Layers, Columns, tuple[LayerKV, ...]]]:
        """One group of every size with its leaves and pages: groups of equal size are one program."""
        ...


def sizes_of(
    spec: InstanceSpec,
    num_layers: int,
    *,
    stream_layers: int = 0,
    cuts: Sequence[int] = (),
    peer_buckets: Sequence[int] = (),
    exchanges: bool = True,
) -> Sizes:
    """What an instance of these limits is compiled for; the options are those of `pdjax.instance.Instance`."""
    chunks = spec.chunk_buckets or chunk_buckets(spec.max_chunk)
    streams = stream_layers > 0 and exchanges
    inserts = sorted({*wire_buckets(spec.max_chunk, streams), *peer_buckets}) if exchanges and spec.max_rows else ()
    longest = spec.max_chunk or (max(peer_buckets, default=0) if spec.moves else 0)
    packed = chunks if streams and spec.max_chunks > 1 else ()
    return Sizes(
        buckets=Buckets(chunks, spec.row_buckets or row_buckets(spec.max_rows)),
        groups=layer_groups(
            num_layers, stream_layers, {*cuts, *(share.layers[0] for share in shares(num_layers, spec.pp))}
        ),
        streams=streams,
        inserts=tuple(inserts),
        extracts=wire_buckets(longest, streams=False) if exchanges else (),
        slices=tuple((T, size) for T in packed for size in slice_sizes(chunks, T)),
    )


def pass_shape(spec: InstanceSpec, T: int, B: int) -> PassShape:
    """The sizes of a pass of T padded tokens and B padded rows."""
    prompts, table = spec.max_chunks if T else 0, spec.pages_for(spec.max_model_len)
    return PassShape(T, B, prompts, table, spec.page_size, spec.num_pages, spec.max_rows + 1)


def programs(
    spec: InstanceSpec, config: ModelConfig, sizes: Sizes, dtype: Any, parts: Sequence[Part]
) -> Iterator[Program]:
    """Every program that serves; `dtype` is that of the weights."""
    heads: set[int] = set()
    slots = spec.max_rows + 1
    for T, B in sizes.buckets.pairs:
        shape = pass_shape(spec, T, B)
        vector = pack_pass(shape, (), None)
        x: Any = None
        head: Any = None
        for number, part in enumerate(parts):
            mesh, name = part.mesh, f"{T}+{B}{_where(number, parts)}"
            its = pass_programs(config, mesh, shape, sizes.streams, dtype)
            if part.share.first:
                args: tuple[Any, ...] = (part.embedding, _everywhere(mesh, (slots,), np.int32), vector)
                yield Program(f"embed {name}", spec.role, number, its.embed, args)
                x, step, head = jax.eval_shape(its.embed, *args)
            else:
                yield Program(f"unpack {name}", spec.role, number, its.unpack, (vector,))
                step, head = jax.eval_shape(its.unpack, vector)
            x, step, head = _carried(mesh, (x, step, head))
            for layers, columns, caches in part.group_sizes():
                args = (columns, caches, x, step)
                yield Program(f"group of {len(layers)} {name}", spec.role, number, its.group, args)
        if shape.sampled not in heads:
            heads.add(shape.sampled)
            picked = _everywhere(mesh, (shape.sampled, x.shape[1]), x.dtype)
            args = (part.head, _everywhere(mesh, (slots,), np.int32), picked, head)
            yield Program(f"head {shape.sampled}", spec.role, number, its.head, args)
    yield from transfer_programs(spec, config, sizes, parts)


def transfer_programs(
    spec: InstanceSpec, config: ModelConfig, sizes: Sizes, parts: Sequence[Part]
) -> Iterator[Program]:
    """Those that move KV."""
    P = spec.page_size
    for number, part in enumerate(parts):
        mesh, where = part.mesh, _where(number, parts)
        for layers, _, caches in part.group_sizes():
            g, dtype = len(layers), caches[0].k.dtype
            for T in sizes.inserts:
                args: tuple[Any, ...] = (caches, pack_insert(P, T, 0, 0, ()), unit_shape(config, mesh, g, T, dtype))
                yield Program(f"insert {g}x{T}{where}", spec.role, number, insert_program(mesh, P, T), args)
            for T in sizes.extracts:
                args = (caches, np.zeros(span(T, P), np.int32), np.int32(0))
                yield Program(f"extract {g}x{T}{where}", spec.role, number, extract_program(mesh, T), args)
            for T, size in sizes.slices:
                args = (unit_shape(config, mesh, g, T, dtype), np.int32(0))
                yield Program(f"slice {g}x{T}:{size}{where}", spec.role, number, slice_program(mesh, size), args)


def _where(stage: int, parts: Sequence[Part]) -> str:
    return f" of stage {stage}" if len(parts) > 1 else ""


def _everywhere(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An array that every device of the mesh has whole."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def _carried(mesh: Mesh, shapes: Any) -> Any:
    """The same on every device of a stage, as `Stage.carry` leaves it there."""
    return jax.tree.map(lambda each: _everywhere(mesh, each.shape, each.dtype), shapes)
