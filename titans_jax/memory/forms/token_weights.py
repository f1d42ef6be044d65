"""Every token's own weights inside a chunk, for retention gates that are not linear (memory/README.md): the chunk's
gradients at once, as in the chunked form, then its tokens one after another, elementwise.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from titans_jax.memory.forms.chunk_algorithm import ChunkAlgorithm, ChunkResult, MemoryInputs, Tokens
from titans_jax.memory.forms.inner_gradient import (
    ChunkEnd,
    close_chunk,
    inner_gradients,
    read,
    readable_weights,
    token_retention,
    token_steps,
    weights_at,
)
from titans_jax.memory.forms.scan_chunks import BLOCKS_PER_GROUP
from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, Params, select_state
from titans_jax.ops.backend import BlockSize


class PreparedTokens(NamedTuple):
    """Only the gates of the chunk's tokens, and whether the chunk starts a document."""

    gates: Gates
    starts_document: jax.Array | None


class TokenWeights(ChunkAlgorithm):
    """Retention gates without one slope: every token reads the weights of its own carried matrices, which a scan over
    tokens forms. The backward pass keeps the carried matrices of one chunk's tokens and recomputes the weights. A
    block is one chunk."""

    @classmethod
    def supports(cls, rule: MemoryRule, gates: Gates) -> bool:
        return not (rule.retention.one_slope or rule.retention.lags)

    @property
    def block_size(self) -> BlockSize:
        return BlockSize(self.rule.chunk_size, BLOCKS_PER_GROUP)

    def prepare(self, inputs: MemoryInputs) -> PreparedTokens:
        return PreparedTokens(inputs.gates, None if inputs.resets is None else inputs.resets[:, 0])

    def step(
        self,
        params: Params,
        start: MemoryState,
        initial: MemoryState | None,
        tokens: Tokens,
        prepared: PreparedTokens,
    ) -> ChunkResult:
        rule, gates = self.rule, prepared.gates
        if prepared.starts_document is not None:
            start = select_state(prepared.starts_document, initial, start)
        found = inner_gradients(rule, params, weights_at(rule, params, start.anchor), tokens)

        def token(state, one):
            query, gradient, gate = one
            rows = jax.tree.map(lambda x: x[None], gradient)
            steps = token_steps(rule, state.momentum, *rows, gate, gate.step_size[None], query.dtype)
            moved = enumerate(zip(state.weights, steps, strict=True))
            weights = tuple(token_retention(gate, i, len(steps)) * w + step for i, (w, step) in moved)
            momentum = steps if rule.algorithm.has_momentum else ()
            moved = dataclasses.replace(state, weights=weights, momentum=momentum)
            if gate.mask is not None:
                moved = select_state(gate.mask, moved, state)
            return moved, read(rule, params, readable_weights(rule, params, moved), query)

        each = (tokens.queries, (found.inputs, found.deltas), gates)
        end, reads = jax.lax.scan(jax.checkpoint(token, prevent_cse=False), start, each)
        is_full = None if gates.mask is None else gates.mask[-1:, None]
        chunk = ChunkEnd(end.weights, end.momentum, start.anchor, reads, is_full, None)
        weights, reads = close_chunk(rule, params, chunk, tokens.queries)
        return ChunkResult(MemoryState(weights, end.momentum, start.anchor, 0), reads, found.surprise)
