"""Rotary position embedding. Enters: positions, and q or k with heads as axes. Leaves: the same, rotated.

Called by the programs (angles, once a pass) and by the attention block (rotation). Pairs are (i, i + H/2).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.models.config import ModelConfig


def frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each pair, [H/2] float64, scaling applied.

    Raises:
        ValueError: a scaling kind that is not "linear" or "llama3".
    """
    half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    freq = 1.0 / config.rope_theta**half
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    if scaling.kind == "linear":
        return freq / scaling.factor
    if scaling.kind != "llama3":
        raise ValueError(f"rope_scaling.kind is {scaling.kind!r}; allowed: linear, llama3")
    # Long wavelengths are stretched by factor, short ones kept, those between blended by how often they turn
    # within the original context.
    turns = scaling.original_max_position * freq / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return freq * (keep + (1 - keep) / scaling.factor)


def angles(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) of `positions` [R] int32, each [R, H/2] float32."""
    freq = jnp.asarray(frequencies(config), jnp.float32)
    turned = positions.astype(jnp.float32)[:, None] * freq[None]
    return jnp.cos(turned), jnp.sin(turned)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [R, ..., H] float32 by the angles [R, H/2] of its rows."""
    lead = (x.shape[0],) + (1,) * (x.ndim - 2) + (cos.shape[-1],)
    cos, sin = cos.reshape(lead), sin.reshape(lead)
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
