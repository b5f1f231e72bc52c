"""Attention on GPUs: cuDNN's for prompts where it is installed, else Pallas kernels that come with JAX. Enters and
leaves as `Backend` says. Called by the layer programs.

Decode: `paged_attention` of Pallas, which reads the pages of a row by its block table, split into runs that blocks of
threads share out; cuDNN's form for pages is none of JAX's public functions. Prefill without cuDNN: `attention.mha`
among the tokens of the pass and `decode_attention.mqa` for earlier contexts, put together by `attention.parts`. The
latter is made for one query with many heads; the tokens of a chunk see the same keys, as heads do, and take their
place.

Prefill with cuDNN: prompt by prompt, all of a prompt's pages under a mask. It is one call, because its logarithms come
back in 16 bits, too coarse to put parts together by. The mask is as wide as a block table, so it is not for long ones.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pdjax.models.attention import paged, parts
from pdjax.models.attention.base import Backend, LayerKV, QueryBlocks, Rows

_TILE = 64  # tokens of a pass that go together, twice as many where that divides
_KEYS = 64  # tokens of a context that do
_HEADS = 16  # query heads of a kv head that decode pads to: the smallest product of a tensor core
_SPLITS, _SPLIT = 16, 256  # decode shares a row out to so many runs, if each then has so many tokens
_LARGEST_PAGE = 128  # tokens: a page is loaded whole
_WIDEST = 16384  # tokens of a block table, from which on the mask that cuDNN needs would be larger than K and V
_OPS = "jax.experimental.pallas.ops.gpu"
_NEEDS = (("prefill", "attention"), ("prefill", "decode_attention"), ("decode", "paged_attention"))


@functools.cache
def backend(interpret: bool = False, cudnn: str = "") -> Backend:
    """What GPUs run.

    Args:
        interpret: kernels run as plain operations on any platform and refuse no shape, for tests.
        cudnn: why cuDNN is not used; empty: it is.
    """
    mha = "pallas mha"
    return paged.backend(
        name="gpu",
        prefill=f"{mha} (no cuDNN: {cudnn})" if cudnn else f"cudnn ({mha} from {_WIDEST} tokens of a block table on)",
        decode="pallas paged",
        refused=(lambda H, P, dtype: {}) if interpret else _refused,
        write_pages=paged.write_tokens,
        attend_prompts=functools.partial(_attend_prompts, interpret, not cudnn),
        attend_rows=functools.partial(_attend_rows, interpret),
    )


@functools.cache
def no_cudnn(device: Any) -> str:
    """Why programs for this device cannot have cuDNN's attention; empty: they can. JAX is asked by tracing a call."""
    q = jax.ShapeDtypeStruct((1, _TILE, 1, 128), jnp.bfloat16)
    try:
        here = device in jax.devices(device.platform)
    except RuntimeError:  # this process has none of these devices
        here = False
    if not here:
        return "the device is there for compiling only"
    try:
        jax.eval_shape(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), q, q, q)
    except (RuntimeError, NotImplementedError, ValueError) as error:  # not installed, or too old for the device
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def _refused(H: int, P: int, dtype: np.dtype[Any]) -> dict[str, str]:
    both, decode = "", ""
    if dtype not in (jnp.bfloat16, jnp.float16):
        both = f"the kernels multiply 16-bit numbers, K and V are {dtype}"
    elif not 16 <= H <= 128 or H & (H - 1):
        both = f"head_dim is {H}; kernels take 16, 32, 64 and 128"
    if P > _LARGEST_PAGE or P & (P - 1):
        decode = f"page_size is {P}; the kernel takes powers of two up to {_LARGEST_PAGE}"
    shapes = {phase: why for phase, why in (("prefill", both), ("decode", both or decode)) if why}
    return paged.missing(_OPS, _NEEDS) | shapes


def _attend_prompts(
    interpret: bool, cudnn: bool, q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerKV, blocks: QueryBlocks
) -> jax.Array:
    if cudnn and blocks.tables.shape[1] * cache.k.shape[2] < _WIDEST:
        # Elsewhere than on a GPU the same call is made of plain operations.
        return whole_prompts("xla" if interpret else "cudnn", q, cache, blocks)
    fresh, prior = functools.partial(_fresh, interpret), functools.partial(_prior, interpret)
    return parts.attend_prompts(fresh, prior, _TILE, q, k, v, cache, blocks)


def whole_prompts(implementation: Any, q: jax.Array, cache: LayerKV, blocks: QueryBlocks) -> jax.Array:
    """As `Backend.attend_prompts`, by `jax.nn.dot_product_attention`, prompt by prompt."""
    T, K, G, H = q.shape
    width = blocks.tables.shape[1] * cache.k.shape[2]
    prompt, before = parts.prompt_of_tokens(blocks, T), parts.tokens_before(blocks)
    prompts = jnp.where(blocks.used > 0, prompt[-1] + 1, 0)
    # Every turn computes T queries. What it computes beyond its own is overwritten by the next.
    q = jnp.pad((q * H**-0.5).astype(cache.k.dtype).reshape(T, K * G, H), ((0, T), (0, 0), (0, 0)))

    def attend(s: jax.Array, out: jax.Array) -> jax.Array:
        first, count = (prompt < s).sum(), (prompt == s).sum()
        keys, values = (paged.context(array, blocks.tables[s]).transpose(1, 0, 2)[None] for array in cache)
        seen = jnp.arange(width)[None] <= before[s] + jnp.arange(T)[:, None]
        o = jax.nn.dot_product_attention(
            lax.dynamic_slice_in_dim(q, first, T)[None],
            keys,
            values,
            mask=seen[None, None],
            scale=1.0,
            query_seq_lengths=count[None].astype(jnp.int32),
            key_value_seq_lengths=jnp.minimum(before[s] + count, width)[None].astype(jnp.int32),
            implementation=implementation,
        )
        return lax.dynamic_update_slice_in_dim(out, o[0].astype(jnp.float32), first, axis=0)

    o = lax.fori_loop(0, prompts, attend, jnp.zeros(q.shape, jnp.float32))
    return o[:T].reshape(T, K, G, H)


def _fresh(interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array, prompt: jax.Array) -> parts.Part:
    from jax.experimental.pallas.ops.gpu import attention as ops

    K, G, T, H = q.shape
    sizes = ops.BlockSizes(block_q=_TILE if T % (2 * _TILE) else 2 * _TILE, block_k=_KEYS)
    k, v = (jnp.repeat(x, G, axis=0) for x in (k, v))  # it takes as many heads of K and V as of q
    q, k, v = (x.transpose(1, 0, 2)[None] for x in (q.reshape(K * G, T, H), k, v))
    o, lse = ops.mha(q, k, v, prompt[None], causal=True, block_sizes=sizes, interpret=interpret, return_residuals=True)
    o = o[0].transpose(1, 0, 2).astype(jnp.float32)
    return o.reshape(K, G, T, H), lse.reshape(K, G, T) * math.log(2)  # its logarithm is to the base of 2


def _prior(interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array, mine: jax.Array, length: jax.Array) -> parts.Part:
    from jax.experimental.pallas.ops.gpu import decode_attention as ops

    K, G, T, H = q.shape
    o, (total, top) = ops.mqa(
        q.reshape(K, G * T, H),
        k,
        v,
        kv_seq_len=length,
        sm_scale=1.0,
        block_h=_TILE,
        block_k=_KEYS,
        k_splits=1,
        interpret=interpret,
        return_residuals=True,
        normalize_output=False,  # it would divide in the dtype of q
    )
    o = o.astype(jnp.float32) / total[..., None]
    return o.reshape(K, G, T, H), (top + jnp.log(total)).reshape(K, G, T)


def _attend_rows(interpret: bool, q: jax.Array, cache: LayerKV, rows: Rows) -> jax.Array:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    B, K, G, H = q.shape
    M, P = rows.tables.shape[1], cache.k.shape[2]
    splits = next(n for n in (_SPLITS, 8, 4, 2, 1) if n == 1 or n * _SPLIT <= M * P)
    pages = max(_KEYS // P, 1)
    tables = jnp.pad(rows.tables, ((0, 0), (0, -M % (splits * pages))))  # by the zero page
    o = paged_attention(
        (q * H**-0.5).astype(cache.k.dtype).reshape(B, K * G, H),
        cache.k,
        cache.v,
        tables,
        rows.position + 1,
        block_h=_HEADS,
        pages_per_compute_block=pages,
        k_splits=splits,
        interpret=interpret,
    )
    return o.astype(jnp.float32).reshape(B, K, G, H)
