"""Prefill by kernels that know neither pages nor where a chunk begins. Enters: q, K/V and index arrays of a pass, the
pages of a layer, and two kernels. Leaves: attention outputs. Called by the backends for TPU and GPU.

A token of a chunk sees two kinds of keys. Those of the pass itself: the tokens of its prompt up to itself. Chunks are
packed one behind the other, so that is a causal mask over the pass and an id for each prompt, which flash kernels know;
they need no pages, since K and V are at hand. And those of earlier chunks: all tokens of a prompt see all of them, so
there is no mask but a length; they are gathered from their pages, `_CONTEXT` tokens at a time, one prompt after the
other. Each part comes with the logarithm of its sum of weights, by which they are put together: o = sum of w_i o_i with
w_i = exp(lse_i - lse) (Dao, FlashAttention-2, arXiv:2307.08691, section 3.1).

So a pass costs the upper bound of T * T / 2 scores for itself, whatever is packed, and T * `_CONTEXT` for each turn of
an earlier context; a pass without one has no turn. No pass looks at the width of a block table.
"""

import math
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pdjax.models.attention.base import MASKED, LayerKV, QueryBlocks
from pdjax.models.attention.paged import context

Part = tuple[jax.Array, jax.Array]  # outputs [K, G, T, H] float32, logarithm of the sum of weights [K, G, T] float32

_CONTEXT = 1024  # tokens; more would compute more beyond the end of a context, fewer would merge more often
_LANES = 128  # the tokens of a turn are a multiple of it: the blocks of all kernels divide it, or are divided by it


class Fresh(Protocol):
    """A kernel for the tokens of a pass among themselves."""

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, prompt: jax.Array) -> Part:
        """q [K, G, T, H] scaled, k and v [K, T, H], prompt [T] int32: a token sees those of its prompt up to itself."""


class Prior(Protocol):
    """A kernel for tokens and an earlier context."""

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, mine: jax.Array, length: jax.Array) -> Part:
        """q [K, G, T, H] scaled, k and v [K, C, H], mine [T] bool, length [] >= 1: tokens of `mine` see the first
        `length` keys; what others get is finite and does not matter."""


def attend_prompts(
    fresh: Fresh,
    prior: Prior,
    tile: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: LayerKV,
    blocks: QueryBlocks,
) -> jax.Array:
    """As `Backend.attend_prompts`, by these kernels; `tile`: they take multiples of so many tokens."""
    T, H = q.shape[0], q.shape[-1]
    pad = -T % tile
    q = jnp.pad(q * H**-0.5, ((0, pad), (0, 0), (0, 0), (0, 0))).transpose(1, 2, 0, 3).astype(cache.k.dtype)
    k, v = (jnp.pad(x, ((0, pad), (0, 0), (0, 0))).transpose(1, 0, 2) for x in (k, v))
    prompt, before = prompt_of_tokens(blocks, T + pad), tokens_before(blocks)
    P, pages = cache.k.shape[2], _pages_of_a_turn(blocks.tables.shape[1], cache.k.shape[2])
    tables = jnp.pad(blocks.tables, ((0, 0), (0, -blocks.tables.shape[1] % pages)))  # by the zero page
    turns = -(-before // (pages * P))
    ends = jnp.cumsum(turns)

    def turn(i: jax.Array, part: Part) -> Part:
        s = (ends <= i).sum()
        at = (i - (ends[s] - turns[s])) * pages
        table = lax.dynamic_slice(tables, (s, at), (1, pages))[0]
        mine = prompt == s
        keys, values = (context(array, table) for array in cache)
        o, lse = prior(q, keys, values, mine, jnp.minimum(before[s] - at * P, pages * P))
        return _merge(part, (o, jnp.where(mine[None, None], lse, MASKED)))

    o, _ = lax.fori_loop(0, ends[-1], turn, fresh(q, k, v, prompt))
    return o.transpose(2, 0, 1, 3)[:T]


def prompt_of_tokens(blocks: QueryBlocks, tokens: int) -> jax.Array:
    """[tokens] int32: whose each token is, as a row of `tables`; what pads a pass counts to its last prompt."""
    first = jnp.where(_used(blocks), blocks.first, tokens)
    block = (first[None] <= jnp.arange(tokens)[:, None]).sum(axis=1) - 1
    return blocks.prompt[jnp.maximum(block, 0)]


def tokens_before(blocks: QueryBlocks) -> jax.Array:
    """[S] int32: how many tokens of each prompt came in earlier passes; 0 where it has none in this one."""
    mine = _used(blocks)[:, None] & (blocks.prompt[:, None] == jnp.arange(len(blocks.tables))[None])  # [blocks, S]
    position = jnp.where(mine, blocks.position[:, None], jnp.iinfo(jnp.int32).max).min(axis=0)
    return jnp.where(mine.any(axis=0), position, 0)


def _used(blocks: QueryBlocks) -> jax.Array:
    return jnp.arange(len(blocks.first)) < blocks.used


def _pages_of_a_turn(M: int, P: int) -> int:
    step = _LANES // math.gcd(P, _LANES)
    return min(M + -M % step, max(_CONTEXT // P // step, 1) * step)


def _merge(one: Part, other: Part) -> Part:
    (o, lse), (more, its) = one, other
    top = jnp.maximum(lse, its)
    mine, its = jnp.exp(lse - top), jnp.exp(its - top)
    total = mine + its
    return (o * mine[..., None] + more * its[..., None]) / total[..., None], top + jnp.log(total)
