"""The chunked form: a chunk's gradients at once, every token's read by matmuls, no per-token weight (papers 1.6.4)."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from titans_jax.memory.forms import delta_rule, gated_delta_rule, intra_chunk, lag_token
from titans_jax.memory.forms.inner_gradient import close_chunk, inner_gradients, split_columns, weights_for_gradient
from titans_jax.memory.forms.scan_chunks import memorize_blocks
from titans_jax.memory.rule import algorithms
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, select_state
from titans_jax.ops.platform import target_platform
from titans_jax.ops.matmul import broadcast_column, matmul, outer_products, to_state_dtype

TOKENS_PER_TILE = 16
"""Where a read is many products, its chunk is read in tiles: fewer, smaller ones, as long as a core keeps busy."""


def memorize(rule: MemoryRule, params, state: MemoryState, queries, keys, values, gates, resets, initial):
    """Sequential over chunks, parallel inside; a linear memory takes an exact triangular-solve path where one is."""
    arguments = (rule, params, state, queries, keys, values, gates, resets, initial)
    for exact in (delta_rule, gated_delta_rule):
        if exact.runs(rule, gates):
            prepare = functools.partial(exact.prepare, rule)
            tokens, group = delta_rule.grouping(rule, gates)
            return memorize_blocks(exact.memorize, tokens, *arguments, prepare=prepare, group=group)
    if rule.retention.lags:
        return memorize_blocks(lag_token.first_token(memorize_chunk), rule.chunk_size, *arguments)
    if isinstance(rule.algorithm, algorithms.LeastSquares) and target_platform() == "cpu" and not gates.channel_wise:
        return memorize_blocks(memorize_tiles, rule.chunk_size, *arguments, prepare=weigh_tiles)
    return memorize_blocks(memorize_chunk, rule.chunk_size, *arguments, prepare=weigh)


def weigh(queries, keys, values, gates, resets):
    """The weighings of a chunk, which take of its inputs the gates only."""
    return intra_chunk.of_blocks(gates)


def memorize_chunk(rule: MemoryRule, params, start: MemoryState, initial: MemoryState, inputs):
    """One chunk: ((weights, momentum, anchor), reads, surprise) from its start state (papers 1.6.3-1.6.4)."""
    queries, keys, values, gates, resets, weighings = inputs
    if resets is not None:
        start = select_state(resets[0], initial, start)
    operand_dtype, retention = keys.dtype, rule.retention
    anchor = retention.weights(start.anchor, params)
    # Only a chunk of one token may decay first.
    judged = weights_for_gradient(rule, anchor, jax.tree.map(lambda x: x[0], gates))
    inner, deltas, surprise = inner_gradients(rule, params, judged, keys, values, gates)
    momenta = start.momentum or (None,) * len(start.weights)
    slopes = retention.slope(start.anchor, params)

    def linears(parts):
        both = zip(split_columns(start.weights, parts), split_columns(deltas, parts), strict=True)
        return [functools.partial(linear, *matrices) for matrices in both]

    def linear(carried, deltas, i, x):
        moved = weighings[i].read(x, carried[i], momenta[i], inner[i], deltas[i], operand_dtype)
        if retention.linear:
            return moved
        if retention.homogeneous:
            return slopes[i] * moved
        return matmul(x, anchor[i] - slopes[i] * start.anchor[i], operand_dtype) + slopes[i] * moved

    reads = rule.algorithm.read(rule.architecture, linears, params, to_state_dtype(queries))
    ends = zip(weighings, start.weights, momenta, inner, deltas, strict=True)
    carried, momentum = zip(*(w.carry(*matrices, operand_dtype) for w, *matrices in ends), strict=True)
    if not retention.linear:
        carried, reads = close_chunk(rule, params, start, carried, reads, queries, gates.mask)
    return (carried, momentum if start.momentum else (), start.anchor), reads, surprise


def to_tiles(x, axis: int = 0):
    """Leaves' `axis` of tokens as tiles and tokens."""

    def split(leaf):
        tile = math.gcd(leaf.shape[axis], TOKENS_PER_TILE)
        return leaf.reshape(*leaf.shape[:axis], -1, tile, *leaf.shape[axis + 1 :])

    return jax.tree.map(split, x)


def weigh_tiles(queries, keys, values, gates, resets):
    """`weigh` of the tiles of every chunk, leaves [chunks, tiles, ...]."""
    (tiles,) = jax.vmap(intra_chunk.of_blocks)(to_tiles(gates, axis=1))
    return tiles


def memorize_tiles(rule: MemoryRule, params, start: MemoryState, initial: MemoryState, inputs):
    """`memorize_chunk` for least squares: states from tile to tile first, then the reads of all tiles at once."""
    queries, keys, values, gates, resets, weighings = inputs
    if resets is not None:
        start = select_state(resets[0], initial, start)
    operand_dtype = keys.dtype
    (inner,), (deltas,), surprise = inner_gradients(rule, params, start.anchor, keys, values, gates)
    inner, deltas = to_tiles((inner, deltas))

    def add(weighing, inner, deltas):
        return outer_products(intra_chunk.G[-1:].T * inner, deltas, operand_dtype)

    (state,), starts = start.weights, []
    for kept, added in zip(weighings.ends, jax.vmap(add)(weighings, inner, deltas), strict=True):
        starts.append(state)
        state = kept * state + added

    def read(queries, weights, weighing, inner, deltas):
        # Widened, or the gradient of what is left of the start is a sum of elementwise products.
        left = broadcast_column(intra_chunk.beta, queries.shape[1])

        def linears(parts):
            return [linear(*columns) for columns in split_columns((weights, deltas), parts)]

        def linear(weights, deltas):
            both = jnp.concatenate([weights, inner.T], axis=1)

            def apply(_, x):
                out, scores = jnp.split(matmul(x, both, operand_dtype), [weights.shape[1]], axis=1)
                return left * out + matmul(intra_chunk.G * scores, deltas, operand_dtype)

            return apply

        return rule.algorithm.read(rule.architecture, linears, params, to_state_dtype(queries))

    reads = jax.vmap(read)(to_tiles(queries), jnp.stack(starts), weighings, inner, deltas).reshape(queries.shape)
    return ((state,), (), start.anchor), reads, surprise
