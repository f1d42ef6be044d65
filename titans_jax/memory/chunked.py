"""The chunked form: a chunk's gradients at once, every token's read by matmuls, no per-token weight (papers 1.6.4)."""

from __future__ import annotations

import functools

import jax

from titans_jax.memory import engine, gated_block, lag, linear_block, weighing
from titans_jax.memory.grid import memorize_blocks
from titans_jax.memory.types import MemoryRule, MemoryState


def memorize(rule: MemoryRule, params, state: MemoryState, queries, keys, values, gates, resets, initial):
    """Sequential over chunks, parallel inside; a linear memory takes an exact triangular-solve path where one is."""
    arguments = (rule, params, state, queries, keys, values, gates, resets, initial)
    for exact in (linear_block, gated_block):
        if exact.runs(rule, gates):
            prepare = functools.partial(exact.prepare, rule)
            tokens, group = linear_block.grouping(rule)
            return memorize_blocks(exact.memorize, tokens, *arguments, prepare=prepare, group=group)
    if rule.retention.lags:
        return memorize_blocks(lag.first_token(memorize_chunk), rule.chunk_size, *arguments)
    return memorize_blocks(memorize_chunk, rule.chunk_size, *arguments, prepare=weigh)


def weigh(queries, keys, values, gates, resets):
    """The weighings of a chunk, which take of its inputs the gates only."""
    return weighing.of_blocks(gates)


def memorize_chunk(rule: MemoryRule, params, start: MemoryState, initial: MemoryState, inputs):
    """One chunk: ((weights, momentum, anchor), reads, surprise) from its start state (papers 1.6.3-1.6.4)."""
    queries, keys, values, gates, resets, weighings = inputs
    if resets is not None:
        start = engine.select_state(resets[0], initial, start)
    operand_dtype, retention = keys.dtype, rule.retention
    anchor = retention.weights(start.anchor, params)
    # Only a chunk of one token may decay first.
    judged = engine.judged(rule, anchor, jax.tree.map(lambda x: x[0], gates))
    inner, deltas, surprise = engine.taps(rule, params, judged, keys, values, gates)
    momenta = start.momentum or (None,) * len(start.weights)
    slopes = retention.slope(start.anchor, params)

    def fast_linear(i, x):
        moved = weighings[i].read(x, start.weights[i], momenta[i], inner[i], deltas[i], operand_dtype)
        if retention.linear:
            return moved
        if retention.homogeneous:
            return slopes[i] * moved
        return engine.matmul(x, anchor[i] - slopes[i] * start.anchor[i], operand_dtype) + slopes[i] * moved

    reads = rule.algorithm.read(rule.architecture, fast_linear, params, engine.widen(queries))
    ends = zip(weighings, start.weights, momenta, inner, deltas, strict=True)
    carried, momentum = zip(*(w.carry(*matrices, operand_dtype) for w, *matrices in ends), strict=True)
    if not retention.linear:
        carried, reads = engine.close(rule, params, start, carried, reads, queries, gates.mask)
    return (carried, momentum if start.momentum else (), start.anchor), reads, surprise
