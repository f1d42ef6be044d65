"""Steps that tokens of a chunk share, where their keys are near each other.

The gradients of a chunk are all taken at its start (memory/README.md, Chunks and anchors). So n tokens with the same
key, each with a step that removes the share s of its error, remove n s of it together, and overshoot where that is more
than 2; one after the other, each would remove its share of the error that was left. A token's step is therefore
multiplied by

    product, over the earlier tokens j of its chunk, of  1 - min(s_j, 1) max(0, k_j . k_t)^4

For equal keys that is the token-by-token rule; for keys at right angles the factor is 1 (derived;
memory/what_was_tried.md). The memory core sees nothing but a smaller step size.

Shapes: b batch, t time, h heads, d head_dim, c chunk_size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from titans_jax.layers import shared_steps_pallas
from titans_jax.layers.implementations import Implementation, dispatch

NEARNESS = 4
"""Power of the cosine: keys of different tokens, whose cosine is 0.1 to 0.3, leave each other's steps alone."""
MOST_SHARED = 0.98
"""The most of a step that one earlier token may take away, so that the logarithm of what is left is finite."""


class StepTail(NamedTuple):
    """What is carried from call to call: keys [b, c-1, h, d] and shares [b, c-1, h] of the last c-1 tokens."""

    keys: jax.Array
    shares: jax.Array


def init_tail(heads: int, head_dim: int, chunk_size: int, dtype: jnp.dtype, wide: jnp.dtype) -> StepTail:
    """The tail before any token, without the batch axis: keys of `dtype`, shares of `wide`."""
    shape = (chunk_size - 1, heads)
    return StepTail(jnp.zeros((*shape, head_dim), dtype), jnp.zeros(shape, wide))


def shared_steps(
    shares: jax.Array, keys: jax.Array, tail: StepTail, position: int | jax.Array, chunk_size: int
) -> tuple[jax.Array, StepTail]:
    """The factor of every token's step, [b, t, h] in (0, 1], and the next tail.

    Args:
      shares: the share of its error that each step removes alone, [b, t, h], at least 0; 0 at padding.
      keys: of unit norm, [b, t, h, d].
      position: tokens of the open chunk that were read before, 0 to c-1.
    """
    left = dispatch(FACTORS, shares, keys, tail, position, chunk_size)
    return left, StepTail(*(x[:, shares.shape[1] :] for x in joined(tail, shares, keys)))


def joined(tail: StepTail, shares: jax.Array, keys: jax.Array) -> StepTail:
    """The last tokens and the new ones."""
    return StepTail(*(jnp.concatenate([old, new], axis=1) for old, new in zip(tail, (keys, shares), strict=True)))


def logarithm_of_left(shares: jax.Array, cosines: jax.Array) -> jax.Array:
    """The logarithm of what an earlier token, of this share and cosine, leaves of a step."""
    taken = jnp.minimum(shares, 1.0) * jnp.maximum(cosines, 0.0) ** NEARNESS
    return jnp.log1p(-jnp.minimum(taken, MOST_SHARED))


def factors_xla(
    shares: jax.Array, keys: jax.Array, tail: StepTail, position: int | jax.Array, chunk_size: int
) -> jax.Array:
    """The factors of `shared_steps` in plain JAX."""
    batch, time, heads = shares.shape
    # Whole chunks from the open one's first token on; where the position is traced, as many as there may be.
    opened = position if isinstance(position, int) else chunk_size - 1
    count = -(-(time + opened) // chunk_size)

    def chunks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, count * chunk_size), *[(0, 0)] * (x.ndim - 2)))
        x = jax.lax.dynamic_slice_in_dim(x, chunk_size - 1 - position, count * chunk_size, axis=1)
        return x.reshape(batch, count, chunk_size, *x.shape[2:])

    keys, shares = map(chunks, joined(tail, shares, keys))
    cosines = jnp.einsum("bnthd,bnjhd->bnhtj", keys, keys, preferred_element_type=shares.dtype)
    left = jnp.tril(logarithm_of_left(shares.transpose(0, 1, 3, 2)[..., None, :], cosines), -1)
    factors = jnp.exp(jnp.sum(left, axis=-1)).transpose(0, 1, 3, 2).reshape(batch, -1, heads)
    return jax.lax.dynamic_slice_in_dim(factors, position, time, axis=1)


def factors_pallas(
    shares: jax.Array, keys: jax.Array, tail: StepTail, position: int | jax.Array, chunk_size: int
) -> jax.Array:
    """`factors_xla` as one TPU kernel, from a chunk's first token on, where no token of `tail` is asked for."""
    return shared_steps_pallas.factors(logarithm_of_left, chunk_size, shares, keys)


def _kernel_supports(
    shares: jax.Array, keys: jax.Array, tail: StepTail, position: int | jax.Array, chunk_size: int
) -> bool:
    return shared_steps_pallas.supports(shares, keys, position, chunk_size)


FACTORS = (Implementation("pallas", factors_pallas, _kernel_supports), Implementation("xla", factors_xla))
