"""Newton-Schulz: the orthogonal matrix nearest to a matrix, by a few products (Muon).

    X_0 = S / ||S||_F ,   X <- a X + (b A + c A^2) X ,   A = X X^T

An odd polynomial of S: it keeps the singular vectors and takes every singular value towards 1, so that a step keeps its
directions and loses its size. Coefficients are those of public code, chosen to raise small singular values fast: they
end near 1, not exactly at 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from titans_jax.ops.matmul import inner_products, matmul
from titans_jax.ops.whole_matrix import over_all

if TYPE_CHECKING:
    from jaxtyping import Array, Float

COEFFICIENTS: Mapping[str, tuple[tuple[float, float, float], ...]] = {
    "muon": ((3.4445, -4.7750, 2.0315),) * 5,
    "lact": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""(a, b, c) of every step, by name: Muon's (its public code; ATLAS, arXiv 2505.23735, names no others), which leave
singular values of 0.68 to 1.14 where the input's are at least 0.01 of its norm; and those of LaCT's code (arXiv
2505.23884), 0.97 to 1.04 from 0.01 on (measured, and tested)."""
EPSILON = 1e-7
"""Added to the norm, so that a matrix of zeros stays zero and has a finite gradient."""


def newton_schulz(
    matrix: Float[Array, "*leading rows columns"],
    operand_dtype: jnp.dtype,
    coefficients: str = "muon",
    unrolled: bool = False,
) -> Float[Array, "*leading rows columns"]:
    """The matrix, tall or wide, with its singular values taken near 1, in its own dtype; products as in `ops.matmul`.

    coefficients: a name of `COEFFICIENTS`. unrolled: without a loop, of which a kernel has no gradient; elsewhere that
    takes five times as long to compile. Differentiable, through its steps.
    """
    if matrix.ndim > 2:
        return jax.vmap(lambda one: newton_schulz(one, operand_dtype, coefficients, unrolled))(matrix)
    rows, columns = matrix.shape
    x = matrix if rows <= columns else matrix.T
    x = x / jnp.sqrt(over_all(jnp.sum, jnp.square(x)) + EPSILON**2)

    def step(x, numbers):
        a, b, c = numbers
        gram = inner_products(x, x, operand_dtype)
        return a * x + matmul(b * gram + c * matmul(gram, gram, operand_dtype), x, operand_dtype), None

    if unrolled:
        for numbers in COEFFICIENTS[coefficients]:
            x, _ = step(x, numbers)
    else:
        x, _ = jax.lax.scan(step, x, jnp.array(COEFFICIENTS[coefficients], matrix.dtype))
    return x if rows <= columns else x.T
