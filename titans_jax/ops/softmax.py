"""A softmax over the rows of a matrix, and how far the shares of a random one lie apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from titans_jax.ops.matmul import matmul


@jax.custom_jvp
def softmax(matrix: jax.Array) -> jax.Array:
    """The softmax of every column. Its derivative sums by matrix products: XLA on a CPU is slow at sums of elementwise
    products."""
    return jax.nn.softmax(matrix, axis=0)


@softmax.defjvp
def softmax_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    shares, (change,) = softmax(*primals), tangents
    ones = jnp.ones((1, len(shares)), shares.dtype)
    total = matmul(ones, shares * change, shares.dtype)
    return shares, shares * (change - matmul(ones.T, total, shares.dtype))


@functools.cache
def random_share_spread(count: int, deviation: float) -> float:
    """The standard deviation of the shares of a softmax of `count` normal logits with this standard deviation, over
    their mean 1 / count: 0 for one, sqrt(e^(deviation^2) - 1) for endlessly many.

    With y = e^z the mean square of a share is that of y_1^2 / (sum y)^2, and 1 / s^2 the integral of t e^(-s t) over t,
    so it is that of t E[y^2 e^(-t y)] E[e^(-t y)]^(count - 1), taken here over log t.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(128)
    y, weights = np.exp(deviation * nodes), weights / np.sum(weights)
    log_t = np.linspace(-40, 10, 2001)
    t = np.exp(log_t)[:, None]
    falling = np.exp(-t * y)
    squares = np.exp(2 * log_t) * (y**2 * falling @ weights) * (falling @ weights) ** (count - 1)
    square = np.sum(squares) * (log_t[1] - log_t[0])
    return float(np.sqrt(max(count**2 * square - 1, 0)))
