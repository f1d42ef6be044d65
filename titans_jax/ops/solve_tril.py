"""Unit lower-triangular systems, (I + strictly lower) x = right, by substitution.

No Newton-Schulz, no powers of the nilpotent part: [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]].
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from titans_jax.ops import recursive_blocks
from titans_jax.ops.matmul import inner_products, matmul, matmul_three_pass, outer_products
from titans_jax.ops.platform import SUBLANES

if TYPE_CHECKING:
    from jaxtyping import Array, Float

ROWS = SUBLANES
"""Rows of a block on the diagonal, which is solved row by row: as many as a register has."""


def inverse(lower: Float[Array, "n n"], operand_dtype) -> Float[Array, "n n"]:
    """(I + lower)^-1, [n, n], for `solve`, in the dtype of `lower` whatever operand_dtype is. It has no gradient of its
    own: `solve` has it."""
    size = len(lower)
    return by_halvings(jax.lax.stop_gradient(recursive_blocks.padded(lower, 2)))[:size, :size]


def inverse_in_kernel(lower: Float[Array, "n n"], operand_dtype) -> Float[Array, "n n"]:
    """`inverse` in a TPU kernel, n a power of two. For a memory with bfloat16 operands it takes half of the passes: its
    errors are then 1e-5, while the operands themselves are rounded by 4e-3."""
    return by_rows(jax.lax.stop_gradient(lower), operand_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def solve(
    transposed: bool, lower: Float[Array, "n n"], inverse: Float[Array, "n n"], right: Float[Array, "n columns"]
) -> Float[Array, "n columns"]:
    """The solution x [n, columns] of (I + lower) x = right, or of the transposed system, by the inverse."""
    product = outer_products if transposed else matmul
    return product(inverse, right, right.dtype)


def solve_forward(transposed, lower, inverse, right):
    x = solve(transposed, lower, inverse, right)
    return x, (lower, inverse, x)


def solve_backward(transposed, residuals, cotangent):
    lower, inverse, x = residuals
    of_right = solve(not transposed, lower, inverse, cotangent)
    pair = (x, of_right) if transposed else (of_right, x)
    return -inner_products(*pair, cotangent.dtype), None, of_right


solve.defvjp(solve_forward, solve_backward)


def by_halvings(lower: jax.Array) -> jax.Array:
    """The inverse, n a power of two, from single rows up: in the fewest multiplications."""
    diagonal, squares = recursive_blocks.squares(lower)
    found = jnp.ones_like(diagonal)[:, None, None]
    for across in squares:
        earlier, later = recursive_blocks.halves(found)
        right = matmul(across, earlier, lower.dtype)
        found = recursive_blocks.join(found, -matmul(later, right, lower.dtype))
    return found[0]


def by_rows(lower: jax.Array, operand_dtype) -> jax.Array:
    """The inverse, n a power of two: row by row in blocks on the diagonal, and from there up by products as wide as the
    matrix. Narrower products would take a matrix unit as long, and this way no number moves to another lane."""
    size = len(lower)
    rows = min(size, ROWS)
    t, i = (jax.lax.broadcasted_iota(jnp.int32, lower.shape, axis) for axis in (0, 1))
    found = jnp.where(t == i, 1, jnp.zeros_like(lower)).reshape(-1, rows, size)
    blocks = jnp.stack([lower[at : at + rows, at : at + rows] for at in range(0, size, rows)])
    for row in range(rows - 1):
        found = found - blocks[:, :, row : row + 1] * found[:, row : row + 1]
    while len(found) > 1:
        (earlier, later), (_, across) = (
            recursive_blocks.halves(found),
            recursive_blocks.halves(lower.reshape(found.shape)),
        )
        part, column = (jax.lax.broadcasted_iota(jnp.int32, across.shape, axis) for axis in (0, 2))
        across = jnp.where(column // across.shape[1] == 2 * part, across, 0)
        right = matmul_three_pass(across.reshape(-1, size), found.reshape(lower.shape), operand_dtype)
        right = right.reshape(later.shape)
        right = recursive_blocks.merge(jnp.zeros_like(right), right).reshape(lower.shape)
        later = later - matmul_three_pass(later.reshape(-1, size), right, operand_dtype).reshape(later.shape)
        found = recursive_blocks.merge(earlier, later)
    return found[0]
