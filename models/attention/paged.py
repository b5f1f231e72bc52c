"""Pages as kernels of accelerators want them: k and v [K, N, P, H], a head's pages in one run and rows of H whole.

Enters and leaves as in `attention.plain`: fresh K/V of a pass and its index arrays, the pages with them in it. Used by
the backends for TPU and GPU. Nothing here loops: a loop of unknown length costs a GPU a visit of the host per turn. All
that a pass writes is scattered together: whole pages on TPU, tokens on GPU.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pdjax.models.attention import plain
from pdjax.models.attention.base import (
    Backend,
    LayerKV,
    Layout,
    PageWrites,
    QueryBlocks,
    Rows,
    by_head,
    pages_by_head,
)

LAYOUT = Layout("KNPH", "KNPH")


def backend(
    name: str,
    prefill: str,
    decode: str,
    refused: Callable[[int, int, np.dtype[Any]], dict[str, str]],
    write_pages: Callable[[LayerKV, jax.Array, jax.Array, PageWrites], LayerKV],
    attend_prompts: Callable[[jax.Array, jax.Array, jax.Array, LayerKV, QueryBlocks], jax.Array],
    attend_rows: Callable[[jax.Array, LayerKV, Rows], jax.Array],
) -> Backend:
    """A backend with these kernels, which have those names; what they refuse is attended to plainly. Arguments as the
    attributes of `Backend`; `write_pages`: `write_whole` or `write_tokens`."""

    def refuses(phase: str, q: jax.Array, cache: LayerKV) -> bool:
        return phase in refused(q.shape[-1], cache.k.shape[2], cache.k.dtype)

    def prompts(q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerKV, blocks: QueryBlocks) -> jax.Array:
        if refuses("prefill", q, cache):
            return plain.attend_blocks(LAYOUT, q, cache, blocks)
        return attend_prompts(q, k, v, cache, blocks)

    def rows(q: jax.Array, cache: LayerKV, rows: Rows) -> jax.Array:
        if refuses("decode", q, cache):
            return plain.attend_rows(LAYOUT, q, cache, rows)
        return attend_rows(q, cache, rows)

    return Backend(
        name=name,
        layout=LAYOUT,
        prefill=prefill,
        decode=decode,
        refused=refused,
        write_pages=write_pages,
        read_pages=read_pages,
        write_rows=write_rows,
        attend_prompts=prompts,
        attend_rows=rows,
    )


def missing(package: str, kernels: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Of (phase, module of `package` that it needs): the phases whose module this jax has not, with that reason."""

    def there(module: str) -> bool:
        try:
            return importlib.util.find_spec(f"{package}.{module}") is not None
        except ModuleNotFoundError:  # not even the package
            return False

    return {phase: f"this jax has no {module}" for phase, module in kernels if not there(module)}


def write_whole(cache: LayerKV, k: jax.Array, v: jax.Array, writes: PageWrites) -> LayerKV:
    """Writes consecutive tokens, k and v [T, K, H], as whole pages: what was in them before and behind is put back.
    A TPU scatters one entry after the other, so they had better be few."""
    used, fresh, token = _targets(writes, cache.k.shape[2], len(k))

    def write(pages: jax.Array, rows: jax.Array) -> jax.Array:
        flat, at = by_head(pages), pages_by_head(pages, writes.page)
        new = rows[token].transpose(2, 0, 1, 3)  # [K, W, P, H]
        new = jnp.where(fresh[None, :, :, None], new, jnp.take(flat, at, axis=0, mode="clip"))
        return flat.at[jnp.where(used[None], at, len(flat))].set(new, mode="drop").reshape(pages.shape)

    return LayerKV(write(cache.k, k), write(cache.v, v))


def write_tokens(cache: LayerKV, k: jax.Array, v: jax.Array, writes: PageWrites) -> LayerKV:
    """The same token by token. No page is read: XLA for GPUs would do that in the very kernel that scatters, which then
    could not work in place, and copy all pages first."""
    P = cache.k.shape[2]
    used, fresh, token = _targets(writes, P, len(k))
    wanted = (used[:, None] & fresh)[None]  # [1, W, P]
    offset = jnp.arange(P)[None, None]

    def write(pages: jax.Array, rows: jax.Array) -> jax.Array:
        flat, at = by_head(pages), pages_by_head(pages, writes.page)
        at = jnp.where(wanted, at[:, :, None], len(flat))  # [K, W, P]
        new = rows[token].transpose(2, 0, 1, 3)  # [K, W, P, H]
        return flat.at[at, offset].set(new, mode="drop").reshape(pages.shape)

    return LayerKV(write(cache.k, k), write(cache.v, v))


def read_pages(cache: LayerKV, pages: jax.Array, offset: jax.Array, tokens: int) -> jax.Array:
    """`tokens` consecutive tokens from `offset` of the first of `pages` [W] on: [2, tokens, K, H]."""
    flat = jnp.stack([context(array, pages).transpose(1, 0, 2) for array in cache])  # [2, W * P, K, H]
    return lax.dynamic_slice_in_dim(flat, offset, tokens, axis=1)


def write_rows(cache: LayerKV, k: jax.Array, v: jax.Array, rows: Rows) -> LayerKV:
    """Writes one token per row, k and v [B, K, H]."""
    N, P = cache.k.shape[1:3]

    def write(pages: jax.Array, values: jax.Array) -> jax.Array:
        flat = by_head(pages)
        at = jnp.where((rows.page < N)[None], pages_by_head(pages, rows.page), len(flat))  # [K, B]
        return flat.at[at, rows.position[None] % P].set(values.transpose(1, 0, 2), mode="drop").reshape(pages.shape)

    return LayerKV(write(cache.k, k), write(cache.v, v))


def context(pages: jax.Array, table: jax.Array) -> jax.Array:
    """The rows of pages `table` [m], one after the other: [K, m * P, H]."""
    K, _, _, H = pages.shape
    return jnp.take(by_head(pages), pages_by_head(pages, table), axis=0, mode="clip").reshape(K, -1, H)


def _targets(writes: PageWrites, P: int, tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which entries count [W], which offsets of their pages are written [W, P], and with which token [W, P]."""
    offset = jnp.arange(P)[None]
    used = jnp.arange(len(writes.page)) < writes.used
    fresh = (writes.low[:, None] <= offset) & (offset < writes.high[:, None])
    token = jnp.clip(writes.first[:, None] + offset, 0, tokens - 1)
    return used, fresh, token
