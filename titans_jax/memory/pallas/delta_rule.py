"""The fused form of linear memories: `delta_rule` in the kernel, a block of many chunks by one triangular solve.

Its coefficients are made in the kernel of sums made outside, like those of a chunk (`kernels.pack`); the rest, solve and
gradients included, is the chunked form's own block function.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from titans_jax.memory.forms import delta_rule
from titans_jax.memory.forms.scan_chunks import Grid
from titans_jax.memory.gates import Gates
from titans_jax.memory.pallas import kernels
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState
from titans_jax.ops import solve_tril
from titans_jax.ops.backend import LANES, SUBLANES


def runs(rule: MemoryRule, gates: Gates) -> bool:
    """Whether the kernel can run the rule this way: its chunks are tokens, or whole registers, and fill blocks."""
    size, tokens = rule.chunk_size, delta_rule.TOKENS_PER_BLOCK
    fits = size == 1 or (size % SUBLANES == 0 and (tokens % size == 0 or size > tokens))
    return fits and delta_rule.runs(rule, gates)


def tokens(rule: MemoryRule) -> int:
    """Of a block."""
    return max(rule.chunk_size, delta_rule.TOKENS_PER_BLOCK)


def pack(rule: MemoryRule, layout: Grid, opens: bool) -> tuple[jax.Array, Gates]:
    """Of a layout in blocks `kernels.pack`, with documents' starts and, if `opens`, the token that opens the last chunk;
    and the gates that are not in it."""
    *_, gates, resets = layout.inputs
    blocks, size = gates.step_size.shape[:2]
    others = [] if resets is None else [jnp.repeat(resets[:, :: rule.chunk_size], rule.chunk_size, axis=1)]
    if opens:
        slots = jnp.arange(blocks * size, dtype=jnp.int32).reshape(blocks, size)
        others.append(slots == layout.last // rule.chunk_size * rule.chunk_size)
    return kernels.pack(gates, others, resets), gates


def run_block(rule: MemoryRule, watch: bool, opens: bool, slow, state, anchor, initial, block: kernels.Chunks):
    """As `kernels.run_chunk`, for a block."""
    weights, momentum = state
    queries, keys, values = block.queries, block.keys, block.values
    restarted = initial is not None
    (c,), _, others = kernels.coefficients(
        block.rows, 1, rule.algorithm.has_momentum, restarted, restarted + opens, keys.dtype
    )
    columns = [row.T for row in others]
    starts = columns[0] > 0 if restarted else None
    open_at = columns[-1] if opens else None
    invert = functools.partial(solve_tril.inverse_in_kernel, operand_dtype=keys.dtype)
    prepared = delta_rule.prepare_block(rule, queries, keys, c, starts, open_at, LANES, invert)
    start = MemoryState(weights, momentum, weights if anchor is None else anchor, 0)
    fresh = MemoryState(*initial, initial[0], 0) if restarted else None
    inputs = queries, keys, values, None, None, prepared
    (*state, opened), reads, surprise = delta_rule.memorize(rule, slow, start, fresh, inputs)
    # The token that opens the last chunk is in one block; the sum over blocks is that one's.
    opened = tuple(jnp.max(columns[-1], axis=0, keepdims=True) * w for w in opened) if opens else None
    watched = jnp.stack([surprise.loss, surprise.cotangent_norm], axis=1) if watch else None
    return tuple(state), opened, reads, watched
