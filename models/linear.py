"""x @ W.T in the form that each platform runs fastest. Enters: rows [R, I] and a weight [O, I], inside traced programs.
Leaves: float32 rows [R, O], or columns [O, R]. Called by `models.llama`.

Weights lie [out, in], as checkpoints have them. XLA:CPU multiplies a large left operand by a thin right one at the
speed of memory or of arithmetic, whichever is less; the other order (rows on the left, which is also what XLA makes of
a dot that is transposed) takes twice as long from 2 to 32 rows, on jax 0.10.2 and 0.12, and a tenth less from 128 on.
bfloat16 weights are widened inside the kernel that multiplies them, unless the processor multiplies bfloat16 itself.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_EXACT = lax.Precision.HIGHEST
_MANY = 128  # rows, from which on float32 products have them on the left
# From jax 0.11 on, the kernel that widens its left operand writes it out after all, and a large one goes to fresh
# memory in every call: the head of a 135M model takes 110 ms for 8 rows, and 17 with rows on the left (jax 0.12.0.1; on
# 0.10.2 it takes 12 and 19).
_WRITES_OUT_LARGE, _LARGE = jax.__version_info__ >= (0, 11), 8 << 20


def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [R, I] float32 times w [O, I], accumulated and returned in float32: [R, O]."""
    return lax.platform_dependent(x, w, cpu=_cpu_rows, default=lambda x, w: _product("ri,oi->ro", x, w))


def linear_columns(x: jax.Array, w: jax.Array) -> jax.Array:
    """The same transposed, [O, R], for a caller who does not need rows."""
    return lax.platform_dependent(x, w, cpu=_cpu_columns, default=lambda x, w: _product("oi,ri->or", w, x))


def compiler_options(platform: str, dtype: Any) -> dict[str, Any] | None:
    """Options of `jax.jit` for programs with weights of this dtype on this platform."""
    if platform != "cpu" or jnp.dtype(dtype) == jnp.float32 or multiplies_bfloat16():
        return None
    # XLA:CPU's product then takes the widening of its operand in. By default the wide weights would be written out
    # first, to memory that is fresh in every call: 40 ms where the product takes 5. What needs no widening, attention
    # and float32 weights, would lose 5 to 10 % by it.
    return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"}


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this machine's processor has instructions for products of bfloat16."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def _product(dims: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product in the narrower of the two dtypes."""
    dtype = min(a.dtype, b.dtype, key=lambda d: d.itemsize)
    exact: Any = _EXACT if dtype == jnp.float32 else None
    return jnp.einsum(dims, a.astype(dtype), b.astype(dtype), precision=exact, preferred_element_type=jnp.float32)


def _cpu_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    if w.dtype != jnp.float32 and multiplies_bfloat16():
        # This kernel is quick with rows on the left, and from two rows on: 88 ms against 7 for a 135M model's layers.
        return _product("ri,oi->ro", _at_least_two(x), w)[: x.shape[0]]
    if w.dtype == jnp.float32 and x.shape[0] >= _MANY:
        return _product("ri,oi->ro", x, w)
    # Behind the barrier the transpose stays one: XLA would turn it into a dot with rows on the left.
    return lax.optimization_barrier(_cpu_columns(x, w)).T


def _cpu_columns(x: jax.Array, w: jax.Array) -> jax.Array:
    if w.dtype == jnp.float32:
        return jnp.einsum("oi,ri->or", w, x, precision=_EXACT)
    if multiplies_bfloat16():
        return _cpu_rows(x, w).T
    if _WRITES_OUT_LARGE and w.size > _LARGE:
        return jnp.einsum("ri,oi->ro", _at_least_two(x), w.astype(jnp.float32), precision=_EXACT)[: x.shape[0]].T
    # A matrix times a single column is a product of another kind, which does not take the widening in.
    two = jnp.einsum("oi,ri->or", w.astype(jnp.float32), _at_least_two(x), precision=_EXACT)
    return two[:, : x.shape[0]]


def _at_least_two(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x, x]) if x.shape[0] == 1 else x
