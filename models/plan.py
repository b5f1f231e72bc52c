"""What one pass computes, as one vector of int32. Enters: chunks and decode rows, on the host. Leaves: the vector,
which goes to the device in one copy, and there, inside a program, the index arrays of attention and head.

Called by the instance (`pack_pass`) and by the embed program (`unpack_pass`). All of it is numpy or static slicing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pdjax.messages import Chunk
from pdjax.models.attention import QUERY_BLOCK, PageWrites, QueryBlocks, Rows
from pdjax.request import SamplingParams

SAMPLING_WORDS = 6  # temperature bits, top_k, top_p bits, seed high, seed low, logprobs wanted


@dataclasses.dataclass(frozen=True, slots=True)
class PassShape:
    """The static sizes of a pass: programs are compiled per value.

    Attributes:
        tokens: T, padded prompt tokens; 0: a decode step.
        rows: B, padded decode rows; 0: prefill only.
        prompts: S, most chunks.
        table: M, pages in a block table.
        page_size, num_pages: of the pool.
        slots: how many row slots the instance has, the scratch slot included.
    """

    tokens: int
    rows: int
    prompts: int
    table: int
    page_size: int
    num_pages: int
    slots: int

    @property
    def sampled(self) -> int:
        """How many rows the head computes: one per chunk and one per decode row."""
        return (self.prompts if self.tokens else 0) + self.rows


class RowArrays(NamedTuple):
    """The decode rows of one step on the host, in batch order; n <= B rows."""

    slots: np.ndarray  # [n]
    tokens: np.ndarray  # [n] input token; -1: what the slot holds
    positions: np.ndarray  # [n] of the input token
    tables: np.ndarray  # [n, M]
    sampling: np.ndarray  # [n, SAMPLING_WORDS]


class HeadRows(NamedTuple):
    """Which rows get a next token: chunks first, then decode rows."""

    slot: jax.Array  # [R] where the token is kept; out of range for rows that sample nothing
    position: jax.Array  # [R] of the new token
    sampling: jax.Array  # [R, SAMPLING_WORDS]


class Step(NamedTuple):
    """What the layer programs need to know; parts that a pass has not are None."""

    positions: jax.Array  # [T + B]
    writes: PageWrites | None
    blocks: QueryBlocks | None
    rows: Rows | None
    pick: jax.Array  # [R] index of the rows that the head computes


def sampling_words(params: SamplingParams) -> np.ndarray:
    """The device's view of sampling options, [SAMPLING_WORDS] int32; a seed counts modulo 2**64."""
    # Above 1e6 all tokens are alike anyway, and in the end float32 overflows.
    floats = np.array([min(params.temperature, 1e6), params.top_p], np.float32).view(np.int32)
    seed = np.array([(params.seed or 0) & (2**64 - 1)], np.uint64).view(np.int32)  # low word, high word
    top_k = min(params.top_k, 2**31 - 1)
    return np.array([floats[0], top_k, floats[1], seed[1], seed[0], params.logprobs], np.int32)


def table_of(pages: Sequence[int], width: int) -> np.ndarray:
    """A block table [width] int32, padded with the zero page."""
    table = np.zeros(width, np.int32)
    table[: len(pages)] = pages
    return table


def page_writes(parts: Sequence[tuple[int, int, int, Sequence[int]]], page_size: int, width: int) -> dict[str, Any]:
    """Fields of `PageWrites` for parts (first flat token, how many, position of the first, block table)."""
    entries = [
        (pages[j], at + j * page_size - start, max(0, start - j * page_size), min(page_size, start + n - j * page_size))
        for at, n, start, pages in parts
        for j in range(start // page_size, -(-(start + n) // page_size))
        if n
    ]
    columns = np.zeros((4, width), np.int32)
    if entries:
        columns[:, : len(entries)] = np.array(entries, np.int32).T
    return {"used": len(entries), **dict(zip(("page", "first", "low", "high"), columns, strict=True))}


def write_entries(tokens: int, page_size: int, parts: int) -> int:
    """Most pages that `tokens` tokens in `parts` runs touch."""
    return min(tokens, tokens // page_size + 2 * parts)


def pack_pass(shape: PassShape, chunks: Sequence[Chunk], rows: RowArrays | None, *, dry: bool = False) -> np.ndarray:
    """The vector for these chunks and rows; they must fit the shape. `dry`: compute, but keep no K/V and no token."""
    T, B, S = shape.tokens, shape.rows, shape.prompts
    fields: dict[str, Any] = {}
    positions = np.zeros(T + B, np.int32)
    pick = np.zeros(shape.sampled, np.int32)
    slot = np.full(shape.sampled, shape.slots, np.int32)
    new_position = np.zeros(shape.sampled, np.int32)
    sampling = np.zeros((shape.sampled, SAMPLING_WORDS), np.int32)
    tokens = np.zeros(T + B, np.int32)
    if T:
        tables = np.zeros((S, shape.table), np.int32)
        blocks: list[tuple[int, int, int, int]] = []
        parts, at, size = [], 0, min(T, QUERY_BLOCK)
        for s, chunk in enumerate(chunks):
            n, start = len(chunk.tokens), chunk.start
            tokens[at : at + n] = chunk.tokens
            positions[at : at + n] = np.arange(start, start + n)
            tables[s] = table_of(chunk.pages, shape.table)
            parts.append((at, n, start, chunk.pages))
            for i in range(0, n, size):
                seen = start + min(i + size, n)
                blocks.append((s, at + i, start + i, -(-seen // shape.page_size)))
            if chunk.last:
                pick[s], slot[s], new_position[s] = at + n - 1, chunk.slot, start + n
                sampling[s] = sampling_words(chunk.sampling)
            at += n
        fields |= {f"writes.{k}": v for k, v in page_writes(parts, shape.page_size, _writes(shape)).items()}
        columns = np.zeros((4, _blocks(shape)), np.int32)
        columns[:, : len(blocks)] = np.array(blocks, np.int32).reshape(-1, 4).T
        names = ("prompt", "first", "position", "pages")
        fields |= {f"blocks.{k}": v for k, v in zip(names, columns, strict=True)}
        fields |= {"blocks.used": len(blocks), "blocks.tables": tables}
    if B:
        n, base = 0, shape.sampled - B
        row_tables, page = np.zeros((B, shape.table), np.int32), np.full(B, shape.num_pages, np.int32)
        if rows is not None and (n := len(rows.slots)):
            row_tables[:n] = rows.tables
            page[:n] = rows.tables[np.arange(n), rows.positions // shape.page_size]
            tokens[T : T + n], positions[T : T + n] = rows.tokens, rows.positions
            slot[base : base + n], new_position[base : base + n] = rows.slots, rows.positions + 1
            sampling[base : base + n] = rows.sampling
        pick[base:] = np.arange(T, T + B)
        fields |= {"rows.tables": row_tables, "rows.page": page}
    if dry:
        fields |= {name: 0 for name in ("writes.used",) if T}
        fields |= {"rows.page": np.full(B, shape.num_pages, np.int32)} if B else {}
        slot[:] = shape.slots
    fields |= {"tokens": tokens, "positions": positions}
    fields |= {"pick": pick, "slot": slot, "new_position": new_position, "sampling": sampling}
    return np.concatenate([np.ravel(fields[name]) for name in _layout(shape)]).astype(np.int32, copy=False)


def unpack_pass(shape: PassShape, vector: jax.Array, last: jax.Array) -> tuple[jax.Array, Step, HeadRows]:
    """Inside a program: (input tokens [T + B], step, head rows); `last` [slots] is each slot's last token."""
    at, fields = 0, {}
    for name, size in _layout(shape).items():
        count = int(np.prod(size))
        fields[name] = lax.slice(vector, (at,), (at + count,)).reshape(size)
        at += count
    T, B = shape.tokens, shape.rows
    tokens, positions = fields["tokens"], fields["positions"]
    writes = blocks = rows = None
    if T:
        writes = PageWrites(*(fields[f"writes.{k}"] for k in PageWrites._fields))
        blocks = QueryBlocks(*(fields[f"blocks.{k}"] for k in QueryBlocks._fields))
    if B:
        given = tokens[T:]
        held = last[fields["slot"][-B:]]  # padding rows read some slot: their result goes nowhere
        tokens = jnp.concatenate([tokens[:T], jnp.where(given >= 0, given, held)])
        rows = Rows(fields["rows.tables"], positions[T:], fields["rows.page"])
    head = HeadRows(fields["slot"], fields["new_position"], fields["sampling"])
    return tokens, Step(positions, writes, blocks, rows, fields["pick"]), head


def _writes(shape: PassShape) -> int:
    return write_entries(shape.tokens, shape.page_size, shape.prompts)


def _blocks(shape: PassShape) -> int:
    return -(-shape.tokens // min(shape.tokens, QUERY_BLOCK)) + shape.prompts - 1


def _layout(shape: PassShape) -> dict[str, tuple[int, ...]]:
    """Names and sizes of the fields, in the order in which they lie in the vector."""
    T, B, R = shape.tokens, shape.rows, shape.sampled
    fields: dict[str, tuple[int, ...]] = {"tokens": (T + B,), "positions": (T + B,)}
    if T:
        fields["writes.used"] = ()
        fields |= {f"writes.{k}": (_writes(shape),) for k in ("page", "first", "low", "high")}
        fields["blocks.used"] = ()
        fields |= {f"blocks.{k}": (_blocks(shape),) for k in ("prompt", "first", "position", "pages")}
        fields["blocks.tables"] = (shape.prompts, shape.table)
    if B:
        fields |= {"rows.tables": (B, shape.table), "rows.page": (B,)}
    return fields | {"pick": (R,), "slot": (R,), "new_position": (R,), "sampling": (R, SAMPLING_WORDS)}
