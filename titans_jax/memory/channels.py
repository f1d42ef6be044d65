"""Channel-wise retention: sums over past tokens in which every channel forgets at its own rate (papers 1.12, 3.6).

A decay between tokens i and t is exp(K_t - K_i), K the cumulative log retention of each channel. Its two factors, taken
apart, overflow (0.5^-64), so tokens are taken in tiles of TILE: what a tile reads from earlier tiles goes through the
tile's first token, where both factors are at most 1; inside a tile the difference is taken before the exponential.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from titans_jax.memory.coefficients import LOG_CUT, TILE


def cumulative(log_gate: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """K [tokens, channels] of log gates [tokens, channels]: sums, 0 at padding, no gate below exp(LOG_CUT)."""
    log_gate = jnp.maximum(log_gate, LOG_CUT)
    return jnp.cumsum(log_gate if mask is None else jnp.where(mask[:, None], log_gate, 0), axis=0)


def decayed_scores(x: jax.Array, K_x: jax.Array, y: jax.Array, K_y: jax.Array, visible: jax.Array) -> jax.Array:
    """[t, i] = sum_c x_tc exp(K_x_tc - K_y_ic) y_ic where visible[t, i], else 0.

    x, y: [tokens, channels]; K: [tokens, channels] or [tokens, 1]; visible: bool, lower triangular. K_x_t is K_y_t, or
    K_y_{t-1} where visible is strictly lower.
    """
    if K_y.shape[1] == 1:
        decay = jnp.exp(jnp.where(visible, K_x - K_y.T, -jnp.inf))
        return jnp.matmul(x, y.T, precision="highest") * decay
    tokens, size, first = tiles(K_y)
    x_tiles, K_tiles = (z.reshape(-1, size, z.shape[-1]) for z in (x, K_x))
    early = (jnp.arange(tokens, dtype=jnp.int32)[None, :] // size) < jnp.arange(len(first), dtype=jnp.int32)[:, None]
    right = y[None] * jnp.exp(jnp.where(early[..., None], first[:, None] - K_y[None], -jnp.inf))
    left = x_tiles * jnp.exp(at_most_zero(K_tiles - first[:, None]))
    scores = jnp.einsum("ntc,nic->nti", left, right, precision="highest").reshape(tokens, tokens)
    inside = diagonal(visible, size)
    y_tiles, K_own = (z.reshape(-1, size, z.shape[-1]) for z in (y, K_y))
    decay = jnp.exp(jnp.where(inside[..., None], K_tiles[:, :, None] - K_own[:, None], -jnp.inf))
    own = jnp.einsum("ntc,nic,ntic->nti", x_tiles, y_tiles, decay, precision="highest")
    return jnp.where(visible, scores, 0) + block_diagonal(own)


def decayed_mix(scores: jax.Array, K: jax.Array, deltas: jax.Array, K_rows: jax.Array | None = None) -> jax.Array:
    """[t, o] = sum_i scores_ti exp(K_rows_to - K_io) deltas_io; scores [tokens, tokens], lower triangular.

    K_rows is K, or K_{t-1} where scores are strictly lower.
    """
    tokens, size, first = tiles(K)
    K_own, own = K.reshape(-1, size, K.shape[1]), diagonal(scores, size)
    K_tiles = K_own if K_rows is None else K_rows.reshape(K_own.shape)
    early = (jnp.arange(tokens, dtype=jnp.int32)[None, :] // size) < jnp.arange(len(first), dtype=jnp.int32)[:, None]
    right = deltas[None] * jnp.exp(jnp.where(early[..., None], first[:, None] - K[None], -jnp.inf))
    before = jnp.einsum("nti,nio->nto", scores.reshape(-1, size, tokens), right, precision="highest")
    before *= jnp.exp(at_most_zero(K_tiles - first[:, None]))
    lower = jnp.tril(jnp.ones((size, size), bool))[None, :, :, None]
    # Above a strict diagonal the difference is positive and the score 0.
    decay = jnp.exp(jnp.where(lower, at_most_zero(K_tiles[:, :, None] - K_own[:, None]), -jnp.inf))
    inside = jnp.einsum("nti,nio,ntio->nto", own, deltas.reshape(K_tiles.shape), decay, precision="highest")
    return (before + inside).reshape(tokens, -1)


def at_most_zero(difference: jax.Array) -> jax.Array:
    """Log decays, which are above 0 only where they do not count; at 0 the gradient is whole, unlike minimum's."""
    return jnp.where(difference > 0, 0, difference)


def tiles(K: jax.Array) -> tuple[int, int, jax.Array]:
    """(tokens, tokens of a tile, K before each tile's first token [tiles, channels])."""
    tokens = K.shape[0]
    size = TILE if tokens % TILE == 0 else tokens
    return tokens, size, jnp.concatenate([jnp.zeros_like(K[:1]), K[size - 1 : -1 : size]])


def diagonal(matrix: jax.Array, size: int) -> jax.Array:
    """The square tiles on the diagonal, [tiles, size, size]."""
    count = matrix.shape[0] // size
    return jnp.stack([matrix[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(count)])


def block_diagonal(blocks: jax.Array) -> jax.Array:
    """`diagonal` undone, with zeros elsewhere."""
    count, size, _ = blocks.shape
    eye = jnp.eye(count, dtype=blocks.dtype)
    return jnp.einsum("nti,nm->ntmi", blocks, eye).reshape(count * size, count * size)
