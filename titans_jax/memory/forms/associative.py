"""The associative form: every token's weights, by vmapped gradients and two associative scans (papers 1.6.5).

Costs a weight-sized tensor per token of a chunk; runs any rule, and is the textbook form the fast ones are tested by.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from titans_jax.memory.forms import lag_token
from titans_jax.memory.forms.inner_gradient import (
    close_chunk,
    inner_gradients,
    inner_loss,
    read,
    readable_weights,
    token_retention,
    weights_for_gradient,
)
from titans_jax.memory.forms.scan_chunks import memorize_blocks
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, select_state
from titans_jax.ops.matmul import matmul, to_state_dtype


def memorize(rule: MemoryRule, params, state: MemoryState, queries, keys, values, gates, resets, initial):
    """Sequential over chunks; inside, a scan for momentum, a scan for retention, and one read per token."""
    block = lag_token.first_token(memorize_chunk) if rule.retention.lags else memorize_chunk
    return memorize_blocks(block, rule.chunk_size, rule, params, state, queries, keys, values, gates, resets, initial)


def memorize_chunk(rule: MemoryRule, params, start: MemoryState, initial: MemoryState, inputs):
    """One chunk: ((weights, momentum, anchor), reads, surprise) from its start state."""
    queries, keys, values, gates, resets, _ = inputs
    if resets is not None:
        start = select_state(resets[0], initial, start)

    opened = rule.retention.weights(start.anchor, params)

    def loss(weights, key, value, bias_gate):
        def linear(i, x):
            return matmul(x, weights[i], key.dtype)

        value = to_state_dtype(value)
        return inner_loss(rule, linear, params, key, value, bias_gate, jnp.zeros_like(value))

    def gradient(key, value, gate):
        return jax.grad(loss)(weights_for_gradient(rule, opened, gate), key, value, gate.bias_gate)

    gradients = jax.vmap(gradient)(keys, values, gates)
    anchor = weights_for_gradient(
        rule, opened, jax.tree.map(lambda x: x[0], gates)
    )  # differs from `opened` in chunks of one
    _, _, surprise = inner_gradients(rule, params, anchor, keys, values, gates)
    weights, momenta = [], []
    for i, step in enumerate(gradients):
        retention = jax.vmap(lambda gate: token_retention(gate, i, len(gradients)))(gates)  # noqa: B023
        step = -gates.step_size[:, i, None, None] * step
        if i == 0 and gates.key_step_size is not None:
            step *= gates.key_step_size[:, :, None]
        if i == len(gradients) - 1 and gates.value_step_size is not None:
            step *= gates.value_step_size[:, None, :]
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
        weights.append(linear_scan(retention, step, start.weights[i]))
    return read_and_close(rule, params, start, tuple(weights), tuple(momenta), queries, gates.mask, surprise)


def read_and_close(rule, params, start: MemoryState, weights, momenta, queries, mask, surprise):
    """The chunk's result, of every token's carried matrices."""
    last = tuple(w[-1] for w in weights)

    def read_one(carried, query):
        at = MemoryState(carried, (), start.anchor, 0)
        return read(rule, params, readable_weights(rule, params, at), query)

    reads = jax.vmap(read_one)(weights, queries)
    if not rule.retention.linear:
        last, reads = close_chunk(rule, params, start, last, reads, queries, mask)
    return (last, momenta, start.anchor), reads, surprise


def linear_scan(gates: jax.Array, steps: jax.Array, start: jax.Array) -> jax.Array:
    """Y_t = g_t Y_{t-1} + X_t for all t from Y_0, by an associative scan; gates [time, 1 or in, 1 or out], steps [time,
    in, out]."""

    def compose(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    products, sums = jax.lax.associative_scan(compose, (gates, steps))
    return products * start[None] + sums
