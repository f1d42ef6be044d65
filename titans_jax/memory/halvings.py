"""A block of tokens halved again and again: what a later half has of the earlier one, at every scale.

Every two tokens are on both sides of exactly one border, so a triangular [tokens, tokens] matrix is the sum of its
`across` parts, one per level, and its diagonal. Sums of decays (`channels`) and triangular inverses (`linear_block`)
are then a few batched products, where token by token they would be as many steps as tokens.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SMALLEST = 16
"""Tokens of the smallest parts: halves of 1, 2, 4 and 8 tokens share parts of this size, for larger products."""


class Level(NamedTuple):
    """One halving, in parts of `size` tokens: `half` of them on each side of every border."""

    half: int
    size: int

    def split(self, x: jax.Array) -> jax.Array:
        """[tokens, channels] in parts, [parts, size, channels]."""
        return x.reshape(-1, self.size, x.shape[-1])

    def across(self, matrix: jax.Array) -> jax.Array:
        """What [tokens, tokens], or parts of it [parts, size, size], holds of later halves and their earlier ones."""
        parts = diagonal(matrix, self.size) if matrix.ndim == 2 else matrix
        return jnp.where(self.pairs()[0], parts, 0)

    def pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """bool [size, size] at [t, i]: i in the earlier half of t's later one; i between the border and the later t,
        itself included, or not; i between the earlier t, itself not included, and the border."""
        t, i = np.arange(self.size)[:, None], np.arange(self.size)[None, :]
        late, i_late = t // self.half % 2 == 1, i // self.half % 2 == 1
        together = t // (2 * self.half) == i // (2 * self.half)
        behind = together & late & i_late
        return together & late & ~i_late, behind & (i <= t), behind & (i < t), together & ~late & ~i_late & (i > t)


@functools.cache
def levels(tokens: int) -> tuple[Level, ...]:
    """The halvings of `tokens`, a power of two, from pairs of tokens up."""
    halves = [1 << n for n in range(tokens.bit_length() - 1)]
    return tuple(Level(half, min(max(2 * half, SMALLEST), tokens)) for half in halves)


def power_of_two(tokens: int) -> int:
    """The least power of two that holds them."""
    return 1 << (tokens - 1).bit_length()


def diagonal(matrix: jax.Array, size: int) -> jax.Array:
    """The square parts on the diagonal of [tokens, tokens], [parts, size, size]."""
    return jnp.stack([matrix[i : i + size, i : i + size] for i in range(0, len(matrix), size)])


def on_diagonal(parts: jax.Array, size: int) -> jax.Array:
    """[parts, n, n] as fewer parts [parts, size, size], with zeros elsewhere."""
    count, n, _ = parts.shape
    if n == size:
        return parts
    eye = jnp.eye(size // n, dtype=parts.dtype)
    return jnp.einsum("pati,ab->patbi", parts.reshape(-1, size // n, n, n), eye).reshape(-1, size, size)
