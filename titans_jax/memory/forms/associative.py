"""The associative form: every token's weights, by vmapped gradients and two associative scans.

Costs a weight-sized tensor per token of a chunk; runs any rule, and is the textbook form to test the fast ones against.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.chunk_algorithm import (
    ChunkAlgorithm,
    ChunkResult,
    FormOptions,
    MemoryInputs,
    MemoryOutputs,
    Tokens,
)
from titans_jax.memory.forms.inner_gradient import (
    ChunkEnd,
    close_chunk,
    gradient_weights,
    inner_gradients,
    inner_loss,
    read,
    readable_weights,
    slope_share,
    token_retention,
    weights_at,
)
from titans_jax.memory.forms.lag_token import LagToken
from titans_jax.memory.forms.omega_window import window_matrix
from titans_jax.memory.forms.scan_chunks import BLOCKS_PER_GROUP, scan_blocks
from titans_jax.memory.forms.steps_by_chunk import first_of_chunk, momentum_of_chunk, step_totals
from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import Matrices, MemoryState, Params, select_state
from titans_jax.ops.backend import BlockSize, current_backend
from titans_jax.ops.matmul import matmul, to_state_dtype


def memorize(
    rule: MemoryRule,
    params: Params,
    state: MemoryState,
    initial: MemoryState | None,
    inputs: MemoryInputs,
    options: FormOptions,
) -> MemoryOutputs:
    """Sequential over chunks; inside, a scan for momentum, a scan for retention, and one read per token."""
    algorithm = AssociativeScan(rule, current_backend())
    algorithm = LagToken(rule, algorithm.backend, algorithm) if rule.retention.lags else algorithm
    return scan_blocks(algorithm, params, state, initial, inputs)


class PreparedScan(NamedTuple):
    """The gates of the chunk's tokens; whether the chunk starts a document; the sum of its step sizes, for an algorithm
    that steps by chunks."""

    gates: Gates
    starts_document: jax.Array | None
    step_total: jax.Array | None


class AssociativeScan(ChunkAlgorithm):
    """Any rule, with every token's weights in memory. A block is one chunk."""

    @classmethod
    def supports(cls, rule: MemoryRule, gates: Gates) -> bool:
        return not rule.retention.lags

    @property
    def block_size(self) -> BlockSize:
        return BlockSize(self.rule.chunk_size, BLOCKS_PER_GROUP)

    def prepare(self, inputs: MemoryInputs) -> PreparedScan:
        gates = momentum_of_chunk(self.rule, inputs.gates, first_of_chunk(inputs.gates))
        starts = None if inputs.resets is None else inputs.resets[:, 0]
        return PreparedScan(gates, starts, step_totals(self.rule, gates))

    def step(
        self,
        params: Params,
        start: MemoryState,
        initial: MemoryState | None,
        tokens: Tokens,
        prepared: PreparedScan,
    ) -> ChunkResult:
        rule, gates = self.rule, prepared.gates
        if prepared.starts_document is not None:
            start = select_state(prepared.starts_document, initial, start)
        opened = weights_at(rule, params, start.anchor)

        def loss(weights, token):
            outputs = [None] * len(weights)

            def linear(i, x):
                outputs[i] = matmul(x, weights[i], token.keys.dtype)
                return outputs[i]

            token = token._replace(values=to_state_dtype(token.values))
            return inner_loss(rule, linear, params, token, jnp.zeros_like(token.values)), outputs[-1]

        def gradient(token, gate):
            if token.erase is not None:  # not the gradient of a loss: the error is of another key
                alone = jax.tree.map(lambda x: x[None], token._replace(key_step_size=None, value_step_size=None))
                (key,), (delta,), _ = inner_gradients(rule, params, gradient_weights(rule, params, opened, gate), alone)
                return (key.T * delta,)
            gradients, output = jax.grad(loss, has_aux=True)(gradient_weights(rule, params, opened, gate), token)
            if rule.bound_slope:
                (share,) = slope_share(rule, output)
                gradients = tuple(share * gradient for gradient in gradients)
            return gradients

        first = jax.tree.map(lambda x: x[0], gates)  # gradient weights differ from `opened` in one-token chunks only
        surprise = inner_gradients(rule, params, gradient_weights(rule, params, opened, first), tokens).surprise
        if rule.algorithm.window > 1:  # with the window's tokens before the chunk, which have no reads
            written = tokens._replace(queries=tokens.keys)
            gradients = jax.vmap(gradient, in_axes=(0, None))(written, first)
            own = len(tokens.keys) - len(tokens.queries)
            surprise = jax.tree.map(lambda x: x[own:], surprise)
        else:
            gradients = jax.vmap(gradient)(tokens, gates)
        carried, momenta = self.scan_tokens(start, gradients, gates)

        def read_one(carried, query):
            at = MemoryState(carried, (), start.anchor, 0)
            return read(rule, params, readable_weights(rule, params, at), query)

        reads = jax.vmap(read_one)(carried, tokens.queries)
        is_full = None if gates.mask is None else gates.mask[-1:, None]
        total = None if prepared.step_total is None else start.step_total + prepared.step_total
        end = ChunkEnd(tuple(w[-1] for w in carried), momenta, start.anchor, reads, is_full, total)
        weights, reads = close_chunk(rule, params, end, tokens.queries)
        return ChunkResult(MemoryState(weights, momenta, start.anchor, 0, step_total=total), reads, surprise)

    def scan_tokens(self, start: MemoryState, gradients: Matrices, gates: Gates) -> tuple[Matrices, Matrices]:
        """Every token's carried matrices [tokens, in, out], and the last token's momentum, from every token's gradients
        [tokens, in, out], in front of which stand those of a window's tokens."""
        weights, momenta = [], []
        kept = dataclasses.replace(gates, step_size=None)  # which has rows for a window's tokens too
        for i, step in enumerate(gradients):
            retention = jax.vmap(lambda gate: token_retention(gate, i, len(gradients)))(kept)  # noqa: B023
            step = -gates.step_size[:, i, None, None] * step
            if i == 0 and gates.key_step_size is not None:
                step *= gates.key_step_size[:, :, None]
            if i == len(gradients) - 1 and gates.value_step_size is not None:
                step *= gates.value_step_size[:, None, :]
            if gates.window_weight is not None:
                step = jnp.einsum("ti,iab->tab", window_matrix(gates.window_weight), step, precision="highest")
            if gates.mask is not None:
                mask = gates.mask[:, None, None]
                retention, step = jnp.where(mask, retention, 1), jnp.where(mask, step, 0)
            if gates.log_momentum is not None:
                momentum = jnp.exp(gates.log_momentum[:, i, None, None])
                momentum = momentum if gates.mask is None else jnp.where(mask, momentum, 1)
                step = linear_scan(momentum, step, start.momentum[i])
                momenta.append(step[-1])
                if gates.mask is not None:  # at padding the momentum is carried, and not added to the weights
                    step = jnp.where(mask, step, 0)
            if self.rule.algorithm.steps_by_chunk:
                step = jnp.zeros_like(step)
            weights.append(linear_scan(retention, step, start.weights[i]))
        return tuple(weights), tuple(momenta)


def linear_scan(gates: jax.Array, steps: jax.Array, start: jax.Array) -> jax.Array:
    """Y_t = g_t Y_{t-1} + X_t for all t from Y_0, by an associative scan; gates [time, 1 or in, 1 or out], steps [time,
    in, out]."""

    def compose(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    products, sums = jax.lax.associative_scan(compose, (gates, steps))
    return products * start[None] + sums
