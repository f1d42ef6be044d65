"""Memory Caching: the share of each kept memory in a read, by scores of the layer's inputs (layers/cached_memory.py).

    u_t = x_t W_u
    score of a kept memory = <u_t, mean of x over its piece> / sqrt(dim) - log(number of kept memories that are read)
    score of the running memory = <u_t, mean of x over its segment up to x_t> / sqrt(dim)

A piece is a segment, or with logarithmic segments several of them merged (memory/cache_segments.py); a segment is
`cache_segment` tokens. Shapes: b batch, t time, n kept memories.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from titans_jax.layers.document_layout import Documents
from titans_jax.memory.cache_segments import CacheSegments
from titans_jax.memory.caching import Aggregation
from titans_jax.memory.state import Matrices
from titans_jax.ops.matmul import inner_products, wide_dtype


class Asked(NamedTuple):
    """Factors of the scores: u of every token and of its chunk's first token [b, t, dim]; the mean input of each kept
    memory's piece [b, n, dim], and of each token's own segment up to the token [b, t, dim]."""

    u: jax.Array
    opening: jax.Array
    means: jax.Array
    running_means: jax.Array


def shares_of(
    aggregation: Aggregation, visible: jax.Array, asked: Asked | None, dtype: jnp.dtype, counted: bool
) -> jax.Array:
    """The shares of the kept memories and of the running one in every token's read.

    visible: bool [b, t, n], the kept memories that a token reads. asked: None where shares need no scores. dtype: of
    the operands of products. counted: the logarithm of the number of kept memories that have a share is subtracted from
    their scores (`MemoryConfig.cache_counted`).

    Returns:
      [b, t, n + 1], the running memory last.
    """
    wide = wide_dtype(dtype)
    opening, own = jnp.zeros(visible.shape, wide), jnp.zeros((*visible.shape[:2], 1), wide)
    scores = opening
    if asked is not None:
        scale = asked.u.shape[-1] ** -0.5
        products = jax.vmap(functools.partial(inner_products, operand_dtype=dtype))
        scores, opening = (scale * products(u, asked.means) for u in (asked.u, asked.opening))
        own = scale * jnp.sum(asked.u.astype(wide) * asked.running_means, axis=-1, keepdims=True)
        if counted:
            number = jnp.sum(visible, axis=2, keepdims=True, dtype=wide)
            scores = scores - jnp.log(jnp.clip(number, 1, aggregation.most))
    visible = jnp.concatenate([visible, jnp.ones(own.shape, bool)], axis=2)
    return aggregation.shares(jnp.concatenate([scores, own], axis=2), opening, visible)


def chosen_alone(aggregation: Aggregation, kept: Matrices, shares: jax.Array) -> tuple[Matrices, jax.Array]:
    """Kept memories [b, n, ...] and shares [b, t, n + 1]; for a single token only the memories that have a share."""
    most = aggregation.most
    if shares.shape[1] > 1 or most is None or most >= kept[0].shape[1]:
        return kept, shares
    best = jax.lax.top_k(shares[:, 0, :-1], most)[1]
    kept = tuple(jnp.take_along_axis(w, best.reshape(*best.shape, 1, 1, 1), axis=1) for w in kept)
    past = jnp.take_along_axis(shares[..., :-1], best[:, None], axis=2)
    return kept, jnp.concatenate([past, shares[..., -1:]], axis=2)


def numbered(count: int, segment: int, documents: Documents | None) -> tuple[jax.Array, jax.Array]:
    """How many segments of its document are before each of a row's first `count` segments, int32 [1 or b, count], and
    whether it is in one document with each of these but the last, bool [1 or b, count, count - 1]."""
    number = jnp.arange(count, dtype=jnp.int32)[None]
    if documents is None:
        return number, jnp.ones((1, count, count - 1), bool)
    starts, index = (leaf[:, ::segment] for leaf in (documents.starts, documents.index))
    return number - jax.lax.cummax(jnp.where(starts, number, 0), axis=1), index[:, None, :-1] == index[..., None]


def opened_by(
    u: jax.Array, chunk: int, segment: int, position: int | jax.Array = 0, carried: jax.Array | None = None
) -> jax.Array:
    """For every token u [b, t, dim] of the first token of its chunk. Chunks are counted from the segment's start.

    position: of the first token in its segment; carried: u of the open chunk's first token [b, dim].
    """
    tokens = jnp.arange(u.shape[1], dtype=jnp.int32)
    opened = tokens - (position + tokens) % segment % chunk
    before = u[:, :1] if carried is None else carried[:, None]
    return jnp.take(jnp.concatenate([before, u], axis=1), jnp.maximum(opened, -1) + 1, axis=1)


def running_means(x: jax.Array, segment: int) -> jax.Array:
    """For every token the mean of x [b, t, dim] over its segment up to the token; x starts with a segment."""
    batch, time, dim = x.shape
    rows = jnp.pad(x.astype(wide_dtype(x.dtype)), [(0, 0), (0, -time % segment), (0, 0)])
    sums = jnp.cumsum(rows.reshape(batch, -1, segment, dim), axis=2)
    counts = 1 + jnp.arange(segment, dtype=sums.dtype)
    return (sums / counts[None, None, :, None]).reshape(batch, -1, dim)[:, :time]


def at_ends(means: jax.Array, segment: int) -> jax.Array:
    """`running_means` at the ends of whole segments, [b, n, dim]."""
    # No slice of every segment-th token: its gradient, which puts zeros between them, ends libtpu 0.0.40 itself.
    whole = means.shape[1] // segment
    return means[:, : whole * segment].reshape(means.shape[0], whole, segment, -1)[:, :, -1]


def means_of_pieces(segments: CacheSegments, before: jax.Array, means: jax.Array, ends: jax.Array) -> jax.Array:
    """`CacheSegments.means` of a batch: means [b, n, dim] of single segments, their ends [1 or b, n], and before, the
    means in slots until then [b, slots, dim]."""
    ends = jnp.broadcast_to(ends, means.shape[:2])
    return jax.vmap(segments.means)(before, means, ends)
