"""Rotary position embedding."""

import jax
import jax.numpy as jnp

from titans_jax.ops.matmul import wide_dtype


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Turn pair i of every head by positions * theta^(-2i / head_dim) radians (RoFormer eq 34, halves as pairs).

    Args:
      x: [..., time, heads, head_dim], head_dim even.
      positions: int32 [..., time], counted from the document's first token; leading axes broadcast.
      theta: base of the frequencies.
    """
    half = x.shape[-1] // 2
    wide = wide_dtype(x.dtype)
    frequencies = theta ** (-jnp.arange(half, dtype=wide) / half)
    angles = positions.astype(wide)[..., None, None] * jnp.expand_dims(frequencies, tuple(range(positions.ndim + 1)))
    angles = jnp.expand_dims(angles, tuple(range(x.ndim - angles.ndim)))
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, first * sine + second * cosine], axis=-1).astype(x.dtype)
