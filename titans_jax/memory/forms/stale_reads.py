"""Reads of the chunk's start: a rule that is `stale`, chunk by chunk (arXiv 2511.07343; memory/later_models.md, TNT).

No token sees a write of its own chunk, so no products between the tokens of a chunk are needed, and its length costs
nothing. What is computed are the gradients and reads at the chunk's start, and the state after the chunk's last token
C, in the notation of `decay`:

    W_C = beta W_0 + f S_0 + sum_j G_Cj u_j          S_C = p S_0 + sum_j N_Cj u_j
    G_Cj = -theta_j g_j ,  g_j = m_j a_{j+1} .. a_C + eta_{j+1} g_{j+1} ,  g_C = m_C ,  f = eta_1 g_1
    N_Cj = -theta_j eta_{j+1} .. eta_C

by running products and one scan from the end. With channel-wise retention a and g are rows of channels, which become a
factor of u_j's input or of its cotangent; without momentum there may be one of each.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.chunk_algorithm import ChunkAlgorithm, ChunkResult, MemoryInputs, Tokens
from titans_jax.memory.forms.inner_gradient import ChunkEnd, close_chunk, inner_gradients, read, weights_at
from titans_jax.memory.forms.scan_chunks import BLOCKS_PER_GROUP
from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, Params, select_state
from titans_jax.ops.backend import BlockSize
from titans_jax.ops.matmul import outer_products


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LeftByChunk:
    """How much a chunk leaves of a fast matrix's start and of every token's gradient; leaves [blocks, tokens, ...].

    by_input, by_output: factors, in the weights, of every token's input [tokens, 1 or in] and cotangent [tokens, 1 or
    out], the step size included. kept_input, kept_output: factors of the start, [1, 1 or in] and [1, 1 or out].
    momentum: factors of the start's momentum in the weights, [1 or in, 1 or out], and in the momentum, [1, 1], and of
    every token's gradient in the momentum, [tokens, 1]; None without momentum.
    """

    by_input: jax.Array
    by_output: jax.Array
    kept_input: jax.Array
    kept_output: jax.Array
    momentum: tuple[jax.Array, jax.Array, jax.Array] | None

    def carry(self, start, momentum, inner, deltas, operand_dtype):
        """The matrix and its momentum after the last token, from the gradients inner_j^T deltas_j."""
        after = self.kept_input.T * start * self.kept_output
        after += outer_products(inner * self.by_input, deltas * self.by_output, operand_dtype)
        if self.momentum is None:
            return after, None
        in_weights, in_itself, of_tokens = self.momentum
        pushed = outer_products(inner * of_tokens, deltas, operand_dtype)
        return after + in_weights * momentum, in_itself * momentum + pushed


class PreparedChunk(NamedTuple):
    """matrices: one for every fast matrix. is_full, starts_document: as in `chunked.PreparedChunk`."""

    matrices: tuple[LeftByChunk, ...]
    is_full: jax.Array | None
    starts_document: jax.Array | None


class StaleReads(ChunkAlgorithm):
    """Any memory, bias and retention without a lag token, read at its chunk's start. A block is one chunk."""

    @classmethod
    def supports(cls, rule: MemoryRule, gates: Gates) -> bool:
        return rule.stale

    @property
    def block_size(self) -> BlockSize:
        return BlockSize(self.rule.chunk_size, BLOCKS_PER_GROUP)

    def prepare(self, inputs: MemoryInputs) -> PreparedChunk:
        gates, resets = inputs.gates, inputs.resets
        matrices = gates.step_size.shape[-1]
        return PreparedChunk(
            tuple(jax.vmap(lambda gates, i=i: left_by_chunk(gates, i, matrices))(gates) for i in range(matrices)),
            None if gates.mask is None else gates.mask[:, -1:, None],
            None if resets is None else resets[:, 0],
        )

    def step(
        self,
        params: Params,
        start: MemoryState,
        initial: MemoryState | None,
        tokens: Tokens,
        prepared: PreparedChunk,
    ) -> ChunkResult:
        rule, operand_dtype = self.rule, tokens.keys.dtype
        if prepared.starts_document is not None:
            start = select_state(prepared.starts_document, initial, start)
        anchor = weights_at(rule, params, start.anchor)
        found = inner_gradients(rule, params, anchor, tokens)
        reads = read(rule, params, anchor, tokens.queries)
        momenta = start.momentum or (None,) * len(start.weights)
        ends = zip(prepared.matrices, start.weights, momenta, found.inputs, found.deltas, strict=True)
        carried, momentum = zip(*(one.carry(*parts, operand_dtype) for one, *parts in ends), strict=True)
        end = ChunkEnd(carried, momentum, start.anchor, reads, prepared.is_full, None)
        weights, reads = close_chunk(rule, params, end, tokens.queries)
        end = MemoryState(weights, momentum if start.momentum else (), start.anchor, 0)
        return ChunkResult(end, reads, found.surprise)


def left_by_chunk(gates: Gates, i: int, matrices: int) -> LeftByChunk:
    """`LeftByChunk` for matrix i of `matrices`, from the chunk's gates, leaves [tokens, ...]."""

    def at_tokens(x: jax.Array) -> jax.Array:  # 0 at padding: the log of a gate that keeps everything
        return x if gates.mask is None else jnp.where(gates.mask[:, None], x, 0)

    retention = gates.log_retention[:, i, None]
    of_input, of_output = retention, jnp.zeros_like(retention)
    if i == 0 and gates.log_key_retention is not None:
        of_input = of_input + gates.log_key_retention
    if i == matrices - 1 and gates.log_value_retention is not None:
        of_output = gates.log_value_retention
    of_input, of_output = at_tokens(of_input), at_tokens(of_output)
    step = -at_tokens(gates.step_size[:, i, None])
    kept_input, kept_output = (jnp.exp(jnp.sum(x, axis=0, keepdims=True)) for x in (of_input, of_output))
    if gates.log_momentum is None:
        return LeftByChunk(step * after_each(of_input), after_each(of_output), kept_input, kept_output, None)

    momentum = at_tokens(gates.log_momentum[:, i, None])
    by_output = of_output.shape[1] > 1  # the side with channels, if there is one, has the scan
    pushed = after_each(of_input + of_output if by_output else of_input)
    reach = pushed_to_end(jnp.exp(momentum), at_tokens(pushed))
    first = jnp.exp(momentum[:1]) * reach[:1]
    in_itself, of_tokens = jnp.exp(jnp.sum(momentum, axis=0, keepdims=True)), step * after_each(momentum)
    if by_output:
        return LeftByChunk(step, reach, kept_input, kept_output, (first, in_itself, of_tokens))
    return LeftByChunk(step * reach, jnp.ones_like(step), kept_input, kept_output, (first.T, in_itself, of_tokens))


def after_each(log_gate: jax.Array) -> jax.Array:
    """For every token the product of the gates of all later ones, from log gates [tokens, n]."""
    later = jnp.concatenate([log_gate[1:], jnp.zeros_like(log_gate[:1])])
    return jnp.exp(jnp.cumsum(later[::-1], axis=0)[::-1])


def pushed_to_end(momentum: jax.Array, kept: jax.Array) -> jax.Array:
    """g_j = kept_j + momentum_{j+1} g_{j+1}, [tokens, n], from momentum [tokens, 1] and kept [tokens, n]."""

    def compose(later, earlier):
        return later[0] * earlier[0], earlier[0] * later[1] + earlier[1]

    factors = jnp.concatenate([momentum[1:], jnp.zeros_like(momentum[:1])])
    return jax.lax.associative_scan(compose, (factors, kept), reverse=True)[1]
