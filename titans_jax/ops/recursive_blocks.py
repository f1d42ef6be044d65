"""A block of tokens halved again and again: what a later half has of the earlier one, at every scale.

Every two tokens are on both sides of exactly one border, so a lower triangular [tokens, tokens] matrix is its diagonal
and, level by level, the squares that lie left of the diagonal: what later halves have of their earlier ones. Sums of
decays (`channel_decay`) and triangular inverses (`solve_tril`) are then a few batched products, where token by token
they would be as many steps as tokens. A level has parts [parts, size, ...], from single tokens up.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def levels(tokens: int) -> int:
    """Borders that a token is beside."""
    return (tokens - 1).bit_length()


def padded(x: jax.Array, axes: int = 1) -> jax.Array:
    """Zeros behind the first `axes` axes, each to the least power of two that holds it."""
    missing = [(1 << levels(size)) - size for size in x.shape[:axes]]
    return jnp.pad(x, [(0, more) for more in missing] + [(0, 0)] * (x.ndim - axes))


def to_blocks(size: int, x: jax.Array) -> jax.Array:
    """[n, ...] as blocks of `size` rows, [n / size, size, ...]."""
    return x.reshape(-1, size, *x.shape[1:])


def halves(parts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[parts, ...] as (earlier, later), [parts / 2, ...] each."""
    earlier, later = jnp.split(parts.reshape(-1, 2, *parts.shape[1:]), 2, axis=1)
    return earlier[:, 0], later[:, 0]


def merge(earlier: jax.Array, later: jax.Array) -> jax.Array:
    """Halves [parts, size, ...] as parts twice as long, [parts, 2 size, ...]."""
    return jnp.concatenate([earlier, later], axis=1)


def join(squares: jax.Array, across: jax.Array) -> jax.Array:
    """[parts, n, n] as [parts / 2, 2 n, 2 n], with `across` [parts / 2, n, n] left of the diagonal."""
    earlier, later = halves(squares)
    right = jnp.zeros_like(earlier)
    return merge(*(jnp.concatenate(pair, axis=2) for pair in ((earlier, right), (across, later))))


def squares(matrix: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """The diagonal [tokens] of a [tokens, tokens] matrix and, from single tokens up, `across` of every `join`."""
    parts, across = matrix[None], []
    while parts.shape[1] > 1:
        half = parts.shape[1] // 2
        across.insert(0, parts[:, half:, :half])
        parts = jnp.stack([parts[:, :half, :half], parts[:, half:, half:]], axis=1).reshape(-1, half, half)
    return parts[:, 0, 0], across
