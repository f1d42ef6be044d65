"""Linear memories, exactly: a block of many chunks by one triangular solve, momentum and retention included.

For M(x) = x W and a bias whose cotangent is s * read - value, the errors e_t of a block satisfy a unit lower-triangular
system (design 3.2). With a(t) the tokens of the block before token t's chunk, and rows of `coefficients` at a:

    e_t = s k_t (beta_a W_0 + f_a S_0 + sum_{i<=a} G_ai k_i^T e_i) - v_t
    W_t = beta_t W_0 + f_t S_0 + sum_{i<=t} G_ti k_i^T e_i ,   S_t = p_t S_0 + sum_{i<=t} N_ti k_i^T e_i

chunk_size 1 is the exact online rule (DeltaNet and its momentum form); the block is an implementation size and never
changes the numbers. A document that starts inside the block brings the initial state's terms (`restart`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from titans_jax.memory import algorithms, architectures, biases, engine
from titans_jax.memory.types import Gates, MemoryRule, MemoryState, Surprise

TOKENS_PER_BLOCK = 64
SOLVE_ROWS = 16


def runs(rule: MemoryRule, gates: Gates) -> bool:
    """Whether this path is the rule: a plain linear memory with scalar gates whose bias has a linear cotangent."""
    plain = isinstance(rule.architecture, architectures.Linear) and rule.retention.linear
    plain = plain and isinstance(rule.bias, biases.L2 | biases.DotProduct) and not rule.algorithm.decay_first
    return plain and not isinstance(rule.algorithm, algorithms.LeastSquares) and not gates.channel_wise


def block_size(rule: MemoryRule) -> int:
    """Tokens per block: whole chunks, about 64 tokens."""
    return rule.chunk_size * max(1, TOKENS_PER_BLOCK // rule.chunk_size)


def memorize(rule: MemoryRule, params, start: MemoryState, initial: MemoryState, inputs):
    """One block: ((weights, momentum, open chunk's start), reads, surprise) from its start state."""
    queries, keys, values, gates, resets, scales = inputs
    chunk_size, operand_dtype, slope = rule.chunk_size, keys.dtype, rule.bias.slope(None)
    c = jax.tree.map(lambda leaf: leaf[0], scales)
    sources, weights_scales, momentum_scales = terms(c, start, initial)
    fresh = None if resets is None else jnp.repeat(resets[::chunk_size], chunk_size)

    def chunk_start(rows, at_first, at_reset):
        """`rows` of the token before each token's chunk."""
        rows = jnp.concatenate([jnp.full_like(rows[:1], at_first), rows[chunk_size - 1 : -1 : chunk_size]])
        rows = jnp.repeat(rows, chunk_size, axis=0)
        if fresh is None:
            return rows
        return jnp.where(fresh.reshape(-1, *[1] * (rows.ndim - 1)), at_reset, rows)

    # The carried weights (source 0) count fully at the block's first chunk, the initial ones at a reset, nothing else.
    start_scales = [
        None if scale is None else chunk_start(scale, float(source == 0), float(source == 2))
        for source, scale in enumerate(weights_scales)
    ]
    start_G = chunk_start(c.G, 0, 0)

    def at_chunk_start(rows, first):
        """k_t times the weights of t's chunk start, without the block's own writes."""
        total = 0
        for i, (source, scale) in enumerate(zip(sources, start_scales, strict=True)):
            if scale is not None:
                read = first(source) if i == 0 else engine.matmul(rows, source, operand_dtype)
                total += scale[:, None] * read
        return total

    (anchor,) = start.anchor
    head, tail = keys[:chunk_size], keys[chunk_size:]
    base = at_chunk_start(
        keys,
        lambda carried: jnp.concatenate(
            [engine.matmul(head, anchor, operand_dtype), engine.matmul(tail, carried, operand_dtype)]
        ),
    )
    overlap = -start_G * engine.matmul(keys, keys.T, operand_dtype)
    values = engine.widen(values)
    errors = slope * base - values
    if slope and chunk_size < keys.shape[0]:
        errors = solve_unit_lower(slope * overlap, errors)

    scores = engine.matmul(queries, keys.T, operand_dtype) * c.G
    reads = engine.matmul(scores, errors, operand_dtype)
    for source, scale in zip(sources, weights_scales, strict=True):
        if scale is not None:
            reads += scale[:, None] * engine.matmul(queries, source, operand_dtype)

    def state_at(scales, row, token):
        """The state after `token`, whose sources and errors weigh `scales[token]` and `row` [tokens]."""
        state = engine.matmul(keys.T, row[:, None] * errors, operand_dtype)
        for source, scale in zip(sources, scales, strict=True):
            if scale is not None:
                state += scale[token] * source
        return state

    weights = (state_at(weights_scales, c.G[-1], -1),)
    momentum = (state_at(momentum_scales, c.N, -1),) if rule.algorithm.has_momentum else ()
    opened = (anchor,)
    if gates.mask is not None:
        token = jnp.max(jnp.where(gates.mask, jnp.arange(keys.shape[0], dtype=jnp.int32), 0)) // chunk_size * chunk_size
        here = state_at(start_scales, start_G[token], token)
        first = token == 0 if fresh is None else (token == 0) & ~fresh[0]
        opened = (jnp.where(first, anchor, here),)
    anchor_reads = base - engine.matmul(overlap, errors, operand_dtype)
    surprise = jax.lax.stop_gradient((rule.bias(anchor_reads, values), jnp.linalg.norm(errors, axis=-1)))
    return (weights, momentum, opened), reads, Surprise(*surprise)


def terms(c, start: MemoryState, initial: MemoryState):
    """Source matrices (W_0, S_0, initial W, initial S) and the scales [tokens] they have in W_t and in S_t."""
    (w,), (s,) = start.weights, start.momentum or (None,)
    sources, in_weights, in_momentum = [w, s], [c.beta, c.f], [None, c.p]
    if c.restart is not None:
        (w,), (s,) = initial.weights, initial.momentum or (None,)
        beta, f, p = c.restart
        sources, in_weights, in_momentum = sources + [w, s], in_weights + [beta, f], in_momentum + [None, p]
    return sources, in_weights, in_momentum


@jax.custom_vjp
def solve_unit_lower(lower: jax.Array, right: jax.Array) -> jax.Array:
    """x of (I + strictly lower) x = right, both float32 or float64, [n, n] and [n, m].

    Forward substitution on 16-row blocks: no Newton-Schulz, no powers of the nilpotent part (design 3.2). The gradient
    reuses the inverse.
    """
    return solve_forward(lower, right)[0]


def solve_forward(lower, right):
    inverse = invert_unit_lower(lower)
    solution = engine.matmul(inverse, right, right.dtype)
    return solution, (inverse, solution)


def solve_backward(residuals, cotangent):
    inverse, solution = residuals
    right = engine.matmul(inverse.T, cotangent, cotangent.dtype)
    return jnp.tril(-engine.matmul(right, solution.T, cotangent.dtype), -1), right


solve_unit_lower.defvjp(solve_forward, solve_backward)


def invert_unit_lower(lower: jax.Array) -> jax.Array:
    """(I + strictly lower)^-1, [n, n]."""
    size = lower.shape[0]
    padded = -(-size // SOLVE_ROWS) * SOLVE_ROWS
    lower = jnp.pad(lower, ((0, padded - size), (0, padded - size)))
    blocks = lower.reshape(-1, SOLVE_ROWS, padded // SOLVE_ROWS, SOLVE_ROWS)
    diagonal = jnp.stack([blocks[i, :, i] for i in range(len(blocks))])
    identity = jnp.eye(SOLVE_ROWS, dtype=lower.dtype)
    rows = [jnp.broadcast_to(identity[0], diagonal[:, 0].shape)]
    for i in range(1, SOLVE_ROWS):
        above = jnp.stack(rows, axis=1)
        rows.append(identity[i][None] - jnp.sum(diagonal[:, i, :i, None] * above, axis=1))
    inverses = jnp.stack(rows, axis=1)
    eye = jnp.eye(padded, dtype=lower.dtype).reshape(-1, SOLVE_ROWS, padded)
    result = engine.matmul(inverses[0], eye[0], lower.dtype)
    for i in range(1, len(blocks)):
        above = lower[i * SOLVE_ROWS : (i + 1) * SOLVE_ROWS, : i * SOLVE_ROWS]
        right = eye[i] - engine.matmul(above, result, lower.dtype)
        result = jnp.concatenate([result, engine.matmul(inverses[i], right, lower.dtype)])
    return result[:size, :size]
