"""Attention on TPUs by the Pallas kernels that come with JAX. Enters and leaves as `Backend` says. Called by the layer
programs.

Decode: `paged_attention`, which copies the pages of a row by its block table, 256 tokens at a time, while it computes
with those before. Prefill: splash attention for the two parts of `attention.parts`; it takes grouped queries and ids of
segments, skips what lies above the diagonal, and gives the logarithm of the sums.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.models.attention import paged, parts
from pdjax.models.attention.base import Backend, LayerKV, QueryBlocks, Rows

_LANES = 128  # of a vector register: rows of K and V are multiples of it, and so are blocks of tokens
_SUBLANES = 16  # bfloat16 rows of a register: pages are multiples of it
_BLOCKS = (512, 256, 128)  # tokens of a block of splash attention, the largest that divides
_STEP = 256  # tokens that decode copies at a time; a row's last step copies the zero page beyond its end
_TABLE_BYTES = 256 << 10  # of block tables in a call: they lie in scalar memory, a megabyte or less on most chips
_OPS = "jax.experimental.pallas.ops.tpu"
_NEEDS = (("prefill", "splash_attention"), ("decode", "paged_attention"))


@functools.cache
def backend(interpret: bool = False) -> Backend:
    """What TPUs run. `interpret`: kernels run as plain operations on any platform and refuse no shape, for tests."""
    return paged.backend(
        name="tpu",
        prefill="pallas splash",
        decode="pallas paged",
        refused=(lambda H, P, dtype: {}) if interpret else _refused,
        write_pages=paged.write_whole,
        attend_prompts=functools.partial(_attend_prompts, interpret),
        attend_rows=functools.partial(_attend_rows, interpret),
    )


def _refused(H: int, P: int, dtype: np.dtype[Any]) -> dict[str, str]:
    both, decode = "", ""
    if dtype != jnp.bfloat16:
        both = f"the kernels multiply bfloat16, K and V are {dtype}"
    elif H % _LANES:
        both = f"head_dim is {H}; kernels take multiples of {_LANES}"
    if P % _SUBLANES:
        decode = f"page_size is {P}; the kernel takes multiples of {_SUBLANES}"
    shapes = {phase: why for phase, why in (("prefill", both), ("decode", both or decode)) if why}
    return paged.missing(_OPS, _NEEDS) | shapes


def _attend_prompts(
    interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerKV, blocks: QueryBlocks
) -> jax.Array:
    def splash(causal: bool, q: jax.Array, k: jax.Array, v: jax.Array, ids: Any) -> parts.Part:
        K, G, T, H = q.shape
        kernel = _splash(K * G, T, k.shape[1], causal, interpret)
        o, (lse,) = kernel(q.reshape(K * G, T, H), k, v, ids)
        return o.astype(jnp.float32).reshape(K, G, T, H), lse.reshape(K, G, T)

    def fresh(q: jax.Array, k: jax.Array, v: jax.Array, prompt: jax.Array) -> parts.Part:
        return splash(True, q, k, v, _segments(prompt, prompt))

    def prior(q: jax.Array, k: jax.Array, v: jax.Array, mine: jax.Array, length: jax.Array) -> parts.Part:
        there = jnp.arange(k.shape[1]) < length
        return splash(False, q, k, v, _segments(mine.astype(jnp.int32), jnp.where(there, 1, 2)))

    return parts.attend_prompts(fresh, prior, _LANES, q, k, v, cache, blocks)


def _attend_rows(interpret: bool, q: jax.Array, cache: LayerKV, rows: Rows) -> jax.Array:
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    B, K, G, H = q.shape
    M, P = rows.tables.shape[1], cache.k.shape[2]
    step = min(max(_STEP // P, 1), M)
    tables = jnp.pad(rows.tables, ((0, 0), (0, -M % step)))  # by the zero page
    # In float32: the kernel keeps what it has of the output in the dtype of q.
    q = (q * H**-0.5).reshape(B, K * G, H)
    at_once = max(_TABLE_BYTES // (4 * tables.shape[1]), 1)
    with pltpu.force_tpu_interpret_mode() if interpret else contextlib.nullcontext():
        outputs = [
            paged_attention(
                q[i : i + at_once],
                cache.k,
                cache.v,
                rows.position[i : i + at_once] + 1,
                tables[i : i + at_once],
                pages_per_compute_block=step,
            )
            for i in range(0, B, at_once)
        ]
    return jnp.concatenate(outputs).reshape(B, K, G, H)


def _segments(q: jax.Array, kv: jax.Array) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as ops

    return ops.SegmentIds(q, kv)


def _splash(heads: int, queries: int, keys: int, causal: bool, interpret: bool) -> Any:
    """(q [heads, queries, H], k and v [K, keys, H], segments) -> (o [heads, queries, H], (lse [heads, queries],))."""
    from jax.experimental.pallas.ops.tpu import splash_attention as ops

    mask = (ops.CausalMask if causal else ops.FullMask)((queries, keys))
    block_q, block_kv = (next(block for block in _BLOCKS if size % block == 0) for size in (queries, keys))
    return ops.make_splash_mha(
        ops.MultiHeadMask([mask] * heads),
        block_sizes=ops.BlockSizes(block_q=block_q, block_kv=block_kv),
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
        interpret=interpret,
    )
