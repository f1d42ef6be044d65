"""Steps that tokens of a chunk share, where their keys are near each other.

The gradients of a chunk are all taken at its start (memory/README.md, Chunks and anchors). So n tokens with the same
key, each with a step that removes the share s of its error, remove n s of it together, and overshoot where that is more
than 2; one after the other, each would have found the error that was left. A token's step is therefore multiplied by

    product, over the earlier tokens j of its chunk, of  1 - min(s_j, 1) max(0, k_j . k_t)^4

For equal keys that is what the token-by-token rule does, for keys at right angles 1 (derived; memory/README.md, What
was tried). It is a gate like any other: the memory core sees a smaller step size.

Shapes: b batch, t time, h heads, d head_dim, c chunk_size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

NEARNESS = 4
"""Power of the cosine: keys of different tokens, whose cosine is 0.1 to 0.3, leave each other's steps alone."""
MOST_SHARED = 0.98
"""Of a step that one earlier token may take away, so that the logarithm of what is left is finite."""


def init_tail(heads: int, head_dim: int, chunk_size: int, dtype: jnp.dtype) -> jax.Array:
    """What is carried from call to call before any token, without the batch axis: [c-1, h, d+1] zeros."""
    return jnp.zeros((chunk_size - 1, heads, head_dim + 1), dtype)


def shared_steps(
    shares: jax.Array, keys: jax.Array, tail: jax.Array, position: int | jax.Array, chunk_size: int
) -> tuple[jax.Array, jax.Array]:
    """What is left of every token's step, [b, t, h] in (0, 1], and the next tail, of the tail's dtype.

    Args:
      shares: the share of its error that each step removes alone, [b, t, h], at least 0; 0 at padding.
      keys: of unit norm, [b, t, h, d].
      tail: keys and shares of the last c-1 tokens, [b, c-1, h, d+1].
      position: tokens of the open chunk that were read before, 0 to c-1.
    """
    time, before = shares.shape[1], chunk_size - 1
    entries = jnp.concatenate([keys, shares[..., None]], axis=-1, dtype=tail.dtype)
    entries = jnp.concatenate([tail, entries], axis=1)
    # Whole chunks from the open one's first token on; where the position is traced, as many as there may be.
    opened = position if isinstance(position, int) else before
    count = -(-(time + opened) // chunk_size)
    padded = jnp.pad(entries, ((0, 0), (0, count * chunk_size), (0, 0), (0, 0)))
    chunks = jax.lax.dynamic_slice_in_dim(padded, before - position, count * chunk_size, axis=1)
    chunks = chunks.reshape(len(chunks), count, chunk_size, *chunks.shape[2:])
    keys, shares = chunks[..., :-1].astype(keys.dtype), jnp.minimum(chunks[..., -1], 1.0).transpose(0, 1, 3, 2)
    cosines = jnp.einsum("bnthd,bnjhd->bnhtj", keys, keys, preferred_element_type=tail.dtype)
    taken = shares[..., None, :] * jnp.maximum(cosines, 0.0) ** NEARNESS
    left = jnp.tril(jnp.log1p(-jnp.minimum(taken, MOST_SHARED)), -1)
    factors = jnp.exp(jnp.sum(left, axis=-1)).transpose(0, 1, 3, 2).reshape(len(chunks), -1, chunks.shape[3])
    return jax.lax.dynamic_slice_in_dim(factors, position, time, axis=1), entries[:, time:]
