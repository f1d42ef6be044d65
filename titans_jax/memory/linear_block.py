"""Linear memories, exactly: a block of many chunks by one triangular solve, momentum and retention included.

For M(x) = x W and a bias whose cotangent is s * read - value, the errors e_t of a block satisfy a unit lower-triangular
system (design 3.2). With a(t) the tokens of the block before token t's chunk, and rows of `coefficients` at a:

    e_t = s k_t (beta_a W_0 + f_a S_0 + sum_{i<=a} G_ai k_i^T e_i) - v_t
    W_t = beta_t W_0 + f_t S_0 + sum_{i<=t} G_ti k_i^T e_i ,   S_t = p_t S_0 + sum_{i<=t} N_ti k_i^T e_i

chunk_size 1 is the exact online rule (DeltaNet and its momentum form); the block is an implementation size and never
changes the numbers. A document that starts inside the block brings the initial state's terms (`restart`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from titans_jax.memory import algorithms, architectures, biases, engine, halvings
from titans_jax.memory.coefficients import Coefficients, of_chunks
from titans_jax.memory.grid import GROUP
from titans_jax.memory.platform import target_platform
from titans_jax.memory.types import Gates, MemoryRule, MemoryState, Surprise

TOKENS_PER_BLOCK = 64


def runs(rule: MemoryRule, gates: Gates) -> bool:
    """Whether this path is the rule: a plain linear memory with scalar gates whose bias has a linear cotangent."""
    plain = isinstance(rule.architecture, architectures.Linear) and rule.retention.linear
    plain = plain and isinstance(rule.bias, biases.L2 | biases.DotProduct) and not rule.algorithm.decay_first
    return plain and not isinstance(rule.algorithm, algorithms.LeastSquares) and not gates.channel_wise


def grouping(rule: MemoryRule, gates: Gates) -> tuple[int, int]:
    """(tokens per block, whole chunks; blocks that are prepared at once); for a CPU, what its cache holds of them, and
    where channels forget at rates of their own, which takes work at every halving, shorter ones."""
    tokens, blocks = TOKENS_PER_BLOCK, GROUP
    if target_platform() == "cpu":
        tokens, blocks = (tokens // 4, blocks) if gates.channel_wise else (tokens // 2, blocks // 2)
    return rule.chunk_size * max(1, tokens // rule.chunk_size), blocks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """What of a block does not depend on its start state; [tokens, tokens] but for the coefficients c.

    start_G, overlap: c.G at each token's chunk start, and times the products of keys, which is how errors weigh in what
    is judged.
    inverse: of the system that the errors solve, None where they depend on no other. scores: how they weigh in reads.
    """

    c: Coefficients
    start_G: jax.Array
    overlap: jax.Array
    inverse: jax.Array | None
    scores: jax.Array


def prepare(rule: MemoryRule, queries, keys, values, gates: Gates, resets) -> Prepared:
    """`Prepared`, leaves [blocks, ...], of inputs [blocks, tokens, ...]."""
    c = jax.tree.map(lambda leaf: leaf[:, 0], of_chunks(gates, resets))
    return jax.vmap(lambda *block: prepare_block(rule, *block))(queries, keys, c, resets)


def prepare_block(rule: MemoryRule, queries, keys, c: Coefficients, resets) -> Prepared:
    """`Prepared` of one block."""
    slope = rule.bias.slope(None)
    start_G = chunk_start(rule, resets, c.G, 0, 0)
    overlap = -start_G * engine.products(keys, keys, keys.dtype)
    solves = slope and rule.chunk_size < keys.shape[0]
    inverse = invert_unit_lower(slope * overlap) if solves else None
    return Prepared(c, start_G, overlap, inverse, engine.products(queries, keys, keys.dtype) * c.G)


def chunk_start(rule: MemoryRule, resets, rows, at_first, at_reset):
    """`rows` of the token before each token's chunk; where there is none, what is said."""
    size = rule.chunk_size
    rows = jnp.concatenate([jnp.full_like(rows[:1], at_first), rows[size - 1 : -1 : size]])
    if resets is not None:
        rows = jnp.where(resets[::size, None], at_reset, rows)
    return jnp.repeat(rows, size, axis=0)


def memorize(rule: MemoryRule, params, start: MemoryState, initial: MemoryState, inputs):
    """One block: ((weights, momentum, open chunk's start), reads, surprise) from its start state."""
    queries, keys, values, gates, resets, prepared = inputs
    chunk_size, operand_dtype, c, slope = rule.chunk_size, keys.dtype, prepared.c, rule.bias.slope(None)
    sources, weights_scales, momentum_scales = terms(c, start, initial)

    # The carried weights (source 0) count fully at the block's first chunk, the initial ones at a reset, nothing else.
    start_scales = [
        None if scale is None else chunk_start(rule, resets, scale, float(source == 0), float(source == 2))
        for source, scale in enumerate(weights_scales)
    ]

    def at_chunk_start(rows, first):
        """k_t times the weights of t's chunk start, without the block's own writes."""
        total = 0
        for i, (source, scale) in enumerate(zip(sources, start_scales, strict=True)):
            if scale is not None:
                read = first(source) if i == 0 else engine.matmul(rows, source, operand_dtype)
                total += scale * read
        return total

    (anchor,) = start.anchor
    head, tail = keys[:chunk_size], keys[chunk_size:]
    base = at_chunk_start(
        keys,
        lambda carried: jnp.concatenate(
            [engine.matmul(head, anchor, operand_dtype), engine.matmul(tail, carried, operand_dtype)]
        ),
    )
    values = engine.widen(values)
    errors = slope * base - values
    if prepared.inverse is not None:
        errors = engine.matmul(prepared.inverse, errors, errors.dtype)

    reads = engine.matmul(prepared.scores, errors, operand_dtype)
    for source, scale in zip(sources, weights_scales, strict=True):
        if scale is not None:
            reads += scale * engine.matmul(queries, source, operand_dtype)

    def state_at(scales, row, token):
        """The state after `token`, whose sources and errors weigh `scales[token]` and `row` [1, tokens]."""
        state = engine.outer(keys, row.T * errors, operand_dtype)
        for source, scale in zip(sources, scales, strict=True):
            if scale is not None:
                state += scale[token][None] * source
        return state

    weights = (state_at(weights_scales, c.G[-1:], -1),)
    momentum = (state_at(momentum_scales, c.N, -1),) if rule.algorithm.has_momentum else ()
    opened = (anchor,)
    if gates.mask is not None:
        token = jnp.max(jnp.where(gates.mask, jnp.arange(keys.shape[0], dtype=jnp.int32), 0)) // chunk_size * chunk_size
        here = state_at(start_scales, prepared.start_G[token][None], token)
        first = token == 0 if resets is None else (token == 0) & ~resets[0]
        opened = (jnp.where(first, anchor, here),)
    anchor_reads = base - engine.matmul(prepared.overlap, errors, operand_dtype)
    surprise = jax.lax.stop_gradient((rule.bias(anchor_reads, values), jnp.linalg.norm(errors, axis=-1)))
    return (weights, momentum, opened), reads, Surprise(*surprise)


def terms(c, start: MemoryState, initial: MemoryState):
    """Source matrices (W_0, S_0, initial W, initial S) and the scales [tokens, 1] they have in W_t and in S_t."""
    (w,), (s,) = start.weights, start.momentum or (None,)
    sources, in_weights, in_momentum = [w, s], [c.beta, c.f], [None, c.p]
    if c.restart is not None:
        (w,), (s,) = initial.weights, initial.momentum or (None,)
        beta, f, p = c.restart
        sources, in_weights, in_momentum = sources + [w, s], in_weights + [beta, f], in_momentum + [None, p]
    return sources, in_weights, in_momentum


@jax.custom_vjp
def invert_unit_lower(lower: jax.Array) -> jax.Array:
    """(I + strictly lower)^-1, [n, n], float32 or float64.

    Substitution block by block, [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]] from single rows up: no
    Newton-Schulz, no powers of the nilpotent part (design 3.2).
    """
    return substitute(lower)


def invert_forward(lower):
    inverse = substitute(lower)
    return inverse, inverse


def invert_backward(inverse, cotangent):
    right = engine.outer(inverse, cotangent, cotangent.dtype)
    return (jnp.tril(-engine.products(right, inverse, cotangent.dtype), -1),)


invert_unit_lower.defvjp(invert_forward, invert_backward)


def substitute(lower: jax.Array) -> jax.Array:
    """`invert_unit_lower` without its gradient."""
    size = len(lower)
    diagonal, squares = halvings.squares(jnp.pad(lower, (0, halvings.power_of_two(size) - size)))
    inverse = jnp.ones_like(diagonal)[:, None, None]
    for across in squares:
        earlier, later = halvings.halves(inverse)
        right = engine.matmul(across, earlier, lower.dtype)
        inverse = halvings.join(inverse, -engine.matmul(later, right, lower.dtype))
    return inverse[0, :size, :size]
