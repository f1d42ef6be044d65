"""A block of tokens halved again and again: how later halves depend on earlier ones, at every scale.

Any two tokens lie on the two sides of exactly one border between halves. So a lower triangular [tokens, tokens] matrix
is its diagonal and, level by level, the squares left of the diagonal, with the rows of a later half and the columns of
its earlier one. Sums of decays (`channel_decay`) and triangular inverses (`solve_tril`) are then a few batched products
instead of one step per token. A level has parts [parts, size, ...], from single tokens up.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def levels(tokens: int) -> int:
    """How many levels of halves a block of so many tokens has."""
    return (tokens - 1).bit_length()


def padded(x: jax.Array, axes: int = 1) -> jax.Array:
    """x with zeros appended along each of its first `axes` axes, up to the next power of two."""
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
