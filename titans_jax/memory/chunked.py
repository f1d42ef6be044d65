"""The chunked form: a chunk's gradients at once, every token's read by matmuls, no per-token weight (papers 1.6.4)."""

from __future__ import annotations

import jax

from titans_jax.memory import engine, linear_block
from titans_jax.memory.coefficients import of_chunks
from titans_jax.memory.grid import memorize_blocks
from titans_jax.memory.types import MemoryRule, MemoryState


def memorize(rule: MemoryRule, params, state: MemoryState, queries, keys, values, gates, resets, initial):
    """Sequential over chunks, parallel inside; a linear memory takes the exact triangular-solve path."""
    arguments = (rule, params, state, queries, keys, values, gates, resets, initial)
    if linear_block.runs(rule):
        return memorize_blocks(linear_block.memorize, linear_block.block_size(rule), *arguments, prepare=of_chunks)
    # A reset replaces a chunk's start state as a whole, so the chunk's coefficients do not see it.
    return memorize_blocks(
        memorize_chunk, rule.chunk_size, *arguments, prepare=lambda gates, resets: of_chunks(gates, None)
    )


def memorize_chunk(rule: MemoryRule, params, start: MemoryState, initial: MemoryState, inputs):
    """One chunk: ((weights, momentum, anchor), reads, surprise) from its start state (papers 1.6.3-1.6.4)."""
    queries, keys, values, _, resets, scales = inputs
    if resets is not None:
        start = engine.select_state(resets[0], initial, start)
    operand_dtype = keys.dtype
    inner, deltas, surprise = engine.taps(rule, params, start.anchor, keys, values)
    momenta = start.momentum or (None,) * len(start.weights)
    scales = [jax.tree.map(lambda leaf: leaf[i], scales) for i in range(len(start.weights))]  # noqa: B023

    def fast_linear(i, x):
        c = scales[i]
        past = engine.matmul(x, inner[i].T, operand_dtype) * c.G
        out = c.beta[:, None] * engine.matmul(x, start.weights[i], operand_dtype)
        if momenta[i] is not None:
            out += c.f[:, None] * engine.matmul(x, momenta[i], operand_dtype)
        return out + engine.matmul(past, deltas[i], operand_dtype)

    reads = rule.architecture.read(fast_linear, params, engine.widen(queries))

    weights, momentum = [], []
    for c, w, s, x, delta in zip(scales, start.weights, momenta, inner, deltas, strict=True):
        moved = c.beta[-1] * w + engine.matmul(x.T, c.G[-1][:, None] * delta, operand_dtype)
        if s is not None:
            moved += c.f[-1] * s
            momentum.append(c.p[-1] * s + engine.matmul(x.T, c.N[:, None] * delta, operand_dtype))
        weights.append(moved)
    return (tuple(weights), tuple(momentum), start.anchor), reads, surprise
