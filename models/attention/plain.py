"""Attention over paged KV, in plain lax: what CPUs run, and every other platform where a kernel does not take the
shapes. Enters: q and fresh K/V of a pass, the pages of one layer, and the pass's index arrays. Leaves: attention
outputs and the pages with the fresh K/V written in place. Called by the layer programs, through a `Backend`.

Fresh K/V are written first and then read back through the block tables, so a prompt's earlier chunks, packed prompts
and decode rows need no case of their own. Only pages named by a table are read, and page 0 (zeros) where tables are
padded; scores of positions a query must not see are masked, so whatever an owned page still holds there is harmless
as long as it is finite.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pdjax.models.attention.base import (
    MASKED,
    QUERY_BLOCK,
    ROW_BLOCK,
    Backend,
    LayerKV,
    Layout,
    PageWrites,
    QueryBlocks,
    Rows,
)

LAYOUT = Layout("NKHP", "NKPH")  # k lies transposed: its product with q then reads 1.8 times faster on CPU


@functools.cache
def backend() -> Backend:
    """What CPUs run."""
    return Backend(
        name="cpu",
        layout=LAYOUT,
        prefill="plain",
        decode="plain",
        refused=lambda H, P, dtype: {},
        write_pages=write_pages,
        read_pages=read_pages,
        write_rows=write_rows,
        attend_prompts=lambda q, k, v, cache, blocks: attend_blocks(LAYOUT, q, cache, blocks),
        attend_rows=lambda q, cache, rows: attend_rows(LAYOUT, q, cache, rows),
    )


def write_pages(cache: LayerKV, k: jax.Array, v: jax.Array, writes: PageWrites) -> LayerKV:
    """Writes consecutive tokens, k and v [T, K, H], page by page."""
    P = cache.v.shape[2]
    # A page may begin before the first token and end behind the last.
    k = jnp.pad(k, ((P, P), (0, 0), (0, 0)))
    v = jnp.pad(v, ((P, P), (0, 0), (0, 0)))
    offsets = jnp.arange(P)

    def write(i: jax.Array, cache: LayerKV) -> LayerKV:
        page, at = writes.page[i], writes.first[i] + P
        fresh = (writes.low[i] <= offsets) & (offsets < writes.high[i])
        new_k = lax.dynamic_slice_in_dim(k, at, P).transpose(1, 2, 0)  # [K, H, P]
        new_v = lax.dynamic_slice_in_dim(v, at, P).transpose(1, 0, 2)  # [K, P, H]
        new_k = jnp.where(fresh[None, None], new_k, lax.dynamic_index_in_dim(cache.k, page, keepdims=False))
        new_v = jnp.where(fresh[None, :, None], new_v, lax.dynamic_index_in_dim(cache.v, page, keepdims=False))
        return LayerKV(
            lax.dynamic_update_index_in_dim(cache.k, new_k, page, 0),
            lax.dynamic_update_index_in_dim(cache.v, new_v, page, 0),
        )

    return lax.fori_loop(0, writes.used, write, cache)


def read_pages(cache: LayerKV, pages: jax.Array, offset: jax.Array, tokens: int) -> jax.Array:
    """`tokens` consecutive tokens from `offset` of the first of `pages` [W] on: [2, tokens, K, H]."""
    k = cache.k[pages].transpose(0, 3, 1, 2)  # [W, P, K, H]
    v = cache.v[pages].transpose(0, 2, 1, 3)
    flat = jnp.stack([k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])])
    return lax.dynamic_slice_in_dim(flat, offset, tokens, axis=1)


def write_rows(cache: LayerKV, k: jax.Array, v: jax.Array, rows: Rows) -> LayerKV:
    """Writes one token per row, k and v [B, K, H]."""
    offset = rows.position % cache.v.shape[2]
    return LayerKV(
        cache.k.at[rows.page, :, :, offset].set(k, mode="drop"),
        cache.v.at[rows.page, :, offset].set(v, mode="drop"),
    )


def attend_blocks(layout: Layout, q: jax.Array, cache: LayerKV, blocks: QueryBlocks) -> jax.Array:
    """Causal attention of prompt tokens q [T, K, G, H] to their prompts' pages; [T, K, G, H] float32."""
    T, K, G, H = q.shape
    size = min(T, QUERY_BLOCK)
    # Every block computes `size` queries. What it computes beyond its own is overwritten by the next block.
    q = jnp.pad(q * H**-0.5, ((0, size), (0, 0), (0, 0), (0, 0)))
    row = jnp.arange(size * G) // G

    def attend(i: jax.Array, out: jax.Array) -> jax.Array:
        first = blocks.first[i]
        mine = lax.dynamic_slice_in_dim(q, first, size).transpose(1, 0, 2, 3).reshape(K, size * G, H)
        table = lax.dynamic_index_in_dim(blocks.tables, blocks.prompt[i], keepdims=False)

        def page(m: jax.Array, state: _Softmax) -> _Softmax:
            k, v = layout.page(cache, table[m])
            return _add_page(state, mine, k, v, m, (blocks.position[i] + row)[None, :, None])

        o = _finish(lax.fori_loop(0, blocks.pages[i], page, _start(K, size * G, H)))
        o = o.reshape(K, size, G, H).transpose(1, 0, 2, 3)
        return lax.dynamic_update_slice_in_dim(out, o, first, axis=0)

    return lax.fori_loop(0, blocks.used, attend, jnp.zeros(q.shape, jnp.float32))[:T]


def attend_rows(layout: Layout, q: jax.Array, cache: LayerKV, rows: Rows) -> jax.Array:
    """Attention of one query per decode row, q [B, K, G, H], to the row's pages; [B, K, G, H] float32."""
    B, K, G, H = q.shape
    size = ROW_BLOCK if B % ROW_BLOCK == 0 else B
    P = cache.v.shape[layout.page_size_axis]
    q = q * H**-0.5

    def attend(i: jax.Array, out: jax.Array) -> jax.Array:
        mine, position, tables = (
            lax.dynamic_slice_in_dim(array, i * size, size) for array in (q, rows.position, rows.tables)
        )
        mine, seen = mine.reshape(size * K, G, H), jnp.repeat(position, K)[:, None, None]

        def page(m: jax.Array, state: _Softmax) -> _Softmax:
            k, v = layout.pages(cache, lax.dynamic_index_in_dim(tables, m, axis=1, keepdims=False))
            return _add_page(state, mine, k.reshape(size * K, H, P), v.reshape(size * K, P, H), m, seen)

        o = _finish(lax.fori_loop(0, position.max() // P + 1, page, _start(size * K, G, H)))
        return lax.dynamic_update_slice_in_dim(out, o.reshape(size, K, G, H), i * size, axis=0)

    return lax.fori_loop(0, B // size, attend, jnp.zeros(q.shape, jnp.float32))


_Softmax = tuple[jax.Array, jax.Array, jax.Array]  # running maximum [n, r, 1], sum [n, r, 1], weighted values [n, r, H]


def _start(n: int, r: int, H: int) -> _Softmax:
    return jnp.full((n, r, 1), MASKED), jnp.zeros((n, r, 1)), jnp.zeros((n, r, H))


def _add_page(state: _Softmax, q: jax.Array, k: jax.Array, v: jax.Array, m: jax.Array, position: jax.Array) -> _Softmax:
    """One page more: q [n, r, H], k [n, H, P], v [n, P, H]; queries at `position` [1 or n, r or 1, 1] see up to it."""
    top, total, value = state
    P = v.shape[1]
    exact = lax.Precision.HIGHEST if k.dtype == jnp.float32 else None
    scores = jnp.einsum("nrh,nhp->nrp", q.astype(k.dtype), k, precision=exact, preferred_element_type=jnp.float32)
    keys = (m * P + jnp.arange(P))[None, None]
    scores = jnp.where(keys <= position, scores, MASKED)
    new_top = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - new_top)
    shrink = jnp.exp(top - new_top)
    added = jnp.einsum("nrp,nph->nrh", weights.astype(v.dtype), v, precision=exact, preferred_element_type=jnp.float32)
    return new_top, total * shrink + weights.sum(axis=-1, keepdims=True), value * shrink + added


def _finish(state: _Softmax) -> jax.Array:
    _, total, value = state
    return value / total
