"""Memora's lag token: the first token of a chunk takes the non-linear step, the rest are linear around it (Miras eq
30-32).

With `retentions.lagged_kullback_leibler` the carried matrices are the weights; both parallel forms take the first token
by itself, as the recurrent form does, and run the rest of the chunk as any other, from the anchor after that token.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from titans_jax.memory.forms import recurrent
from titans_jax.memory.forms.chunk_algorithm import ChunkAlgorithm, ChunkResult, MemoryInputs, Tokens
from titans_jax.memory.forms.inner_gradient import read, readable_weights
from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, Params, select_state
from titans_jax.ops.backend import BlockSize


class PreparedLagToken(NamedTuple):
    """first: the gates of the chunk's first token. starts_document: whether a document starts there, None without
    resets. rest: what the algorithm of the other tokens prepares, None where there are no others."""

    first: Gates
    starts_document: jax.Array | None
    rest: Any


@dataclasses.dataclass(frozen=True)
class LagToken(ChunkAlgorithm):
    """The first token of a chunk by itself, the others by the algorithm `rest`, whose blocks are single chunks."""

    rest: ChunkAlgorithm

    @classmethod
    def supports(cls, rule: MemoryRule, gates: Gates) -> bool:
        return rule.retention.lags

    @property
    def block_size(self) -> BlockSize:
        return self.rest.block_size

    def prepare(self, inputs: MemoryInputs) -> PreparedLagToken:
        first = jax.tree.map(lambda x: x[:, 0], inputs.gates)
        others = jax.tree.map(lambda x: x[:, 1:], dataclasses.replace(inputs, resets=None))
        starts = None if inputs.resets is None else inputs.resets[:, 0]
        return PreparedLagToken(first, starts, self.rest.prepare(others) if self.rule.chunk_size > 1 else None)

    def step(
        self,
        params: Params,
        start: MemoryState,
        initial: MemoryState | None,
        tokens: Tokens,
        prepared: PreparedLagToken,
    ) -> ChunkResult:
        rule, gate = self.rule, prepared.first
        if prepared.starts_document is not None:
            start = select_state(prepared.starts_document, initial, start)
        start = dataclasses.replace(start, position=jnp.zeros((), jnp.int32))
        after, surprise = recurrent.write(rule, params, start, tokens.keys[:1], tokens.values[:1], gate)
        if gate.mask is not None:
            after = select_state(gate.mask, after, start)
        reads = read(rule, params, readable_weights(rule, params, after), tokens.queries[:1])
        if prepared.rest is None:
            return ChunkResult(after, reads, surprise)
        others = jax.tree.map(lambda x: x[1:], tokens)
        end, *following = self.rest.step(params, after, None, others, prepared.rest)
        return ChunkResult(end, *jax.tree.map(lambda *x: jnp.concatenate(x), (reads, surprise), tuple(following)))
