"""Rotary position embedding."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from titans_jax.ops.matmul import wide_dtype

MIDDLE, HIGH = 12, 22
"""The lowest bits of the second and of the third part into which a position is cut (`angles`)."""


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Turn pair i of every head by positions * theta^(-2i / head_dim) radians (RoFormer eq 34, halves as pairs).

    Args:
      x: [..., time, heads, head_dim], head_dim even.
      positions: int32 [..., time], counted from the document's first token; leading axes broadcast.
      theta: base of the frequencies.
    """
    half = x.shape[-1] // 2
    wide = wide_dtype(x.dtype)
    turned = angles(positions[..., None], (theta ** (-np.arange(half) / half)).astype(wide))[..., None, :]
    turned = jnp.expand_dims(turned, tuple(range(x.ndim - turned.ndim)))
    cosine, sine = jnp.cos(turned), jnp.sin(turned)
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, first * sine + second * cosine], axis=-1).astype(x.dtype)


def angles(positions: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """positions * frequencies, without whole turns from position 2^12 on: int32 [..., 1] and [half] -> [..., half].

    The product itself is rounded to more than a tenth of a turn where a text has tens of millions of tokens. So a
    position is cut into three parts, and the later two are multiplied by what their lowest bit turns beyond whole
    turns.
    """
    low, middle = positions & ((1 << MIDDLE) - 1), (positions >> MIDDLE) & ((1 << HIGH - MIDDLE) - 1)
    exact = frequencies.astype(np.float64)
    rates = [exact, *((exact * 2.0**bit + math.pi) % math.tau - math.pi for bit in (MIDDLE, HIGH))]
    parts = zip((low, middle, positions >> HIGH), rates, strict=True)
    wide = frequencies.dtype
    return sum(
        part.astype(wide) * jnp.expand_dims(rate.astype(wide), tuple(range(positions.ndim - 1))) for part, rate in parts
    )
