"""Numbers that belong to a whole matrix, as rows of equal numbers: a TPU kernel has no scalars, nor gradients of [1, 1]
arrays.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from titans_jax.ops.matmul import Transposed


def norm(matrix: jax.Array, q: float) -> jax.Array:
    """||matrix||_q over all entries, as a row, with a finite gradient at 0; the largest entry is divided out."""
    largest = jax.lax.stop_gradient(jnp.maximum(over_all(jnp.max, jnp.abs(matrix)), 1e-30))
    return largest * (over_all(jnp.sum, jnp.abs(matrix / largest) ** q) + 1e-30) ** (1 / q)


def over_all(reduce: Callable, matrix: jax.Array) -> jax.Array:
    """jnp.sum or jnp.max of all entries, repeated along a row [1, out]."""
    return reduce(jnp.broadcast_to(reduce(matrix, axis=1, keepdims=True), matrix.shape), axis=0, keepdims=True)


def scale_matrix(row: jax.Array, matrix):
    """A matrix times the number that fills a row [1, lanes], repeated to its width."""
    lanes = matrix.array.shape[1] if isinstance(matrix, Transposed) else matrix.shape[1]
    if row.shape[1] > 1:
        row = jnp.concatenate([row] * -(-lanes // row.shape[1]), axis=1)[:, :lanes]
    return row * matrix
