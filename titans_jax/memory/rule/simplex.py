"""Weights that are a softmax of logits over the inputs of a matrix, times a size: that size, and where they start
(Memora; memory/README.md, Retention gates that are not linear)."""

import jax

from titans_jax.ops.softmax import random_share_spread


def check_size(size: float | None) -> None:
    """Raises ValueError for a simplex whose sum is not above 0; None stands for the root of the number of inputs."""
    if size is not None and not size > 0:
        raise ValueError(f"size is {size!r}: a simplex needs a size above 0, for example 1.0.")


def simplex_size(size: float | None, inputs: int) -> float:
    """The sum of an output unit's weights."""
    return size or inputs**0.5


def start_logits(weights: jax.Array, deviation: float = 1.0) -> jax.Array:
    """The logits [inputs, out] of a fresh memory, with this standard deviation, from weights drawn with standard
    deviation 1 / sqrt(inputs)."""
    return deviation * len(weights) ** 0.5 * weights


def simplex_start_size(size: float | None, shape: tuple[int, int], deviation: float = 1.0) -> float:
    """`Retention.start_size` of the softmax of `start_logits` times `size`. What all weights of an output unit have in
    common does not count: units have the same sum, so that it adds the same to every one, and a norm takes it out."""
    inputs, _ = shape
    return simplex_size(size, inputs) / inputs**0.5 * random_share_spread(inputs, deviation)
