"""The associative form: every token's weights, by vmapped gradients and two associative scans (papers 1.6.5).

Costs a weight-sized tensor per token of a chunk; runs any rule, and is the textbook form the fast ones are tested by.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from titans_jax.memory import engine
from titans_jax.memory.grid import memorize_blocks
from titans_jax.memory.types import MemoryRule, MemoryState


def memorize(rule: MemoryRule, params, state: MemoryState, queries, keys, values, gates, resets, initial):
    """Sequential over chunks; inside, a scan for momentum, a scan for retention, and one read per token."""
    return memorize_blocks(
        memorize_chunk, rule.chunk_size, rule, params, state, queries, keys, values, gates, resets, initial
    )


def memorize_chunk(rule: MemoryRule, params, start: MemoryState, initial: MemoryState, inputs):
    """One chunk: ((weights, momentum, anchor), reads, surprise) from its start state."""
    queries, keys, values, gates, resets, _ = inputs
    if resets is not None:
        start = engine.select_state(resets[0], initial, start)

    def inner_loss(weights, key, value):
        return rule.bias(engine.read(rule, params, weights, key), engine.widen(value))

    gradients = jax.vmap(jax.grad(inner_loss), in_axes=(None, 0, 0))(start.anchor, keys, values)
    _, _, surprise = engine.taps(rule, params, start.anchor, keys, values)
    weights, momenta = [], []
    for i, gradient in enumerate(gradients):
        log_retention, log_momentum, step_size = (None if x is None else x[:, i] for x in gates.scalars())
        if gates.mask is not None:
            log_retention = jnp.where(gates.mask, log_retention, 0)
            step_size = jnp.where(gates.mask, step_size, 0)
        steps = -step_size[:, None, None] * gradient
        if log_momentum is not None:
            if gates.mask is not None:
                log_momentum = jnp.where(gates.mask, log_momentum, 0)
            steps = linear_scan(log_momentum, steps, start.momentum[i])
            momenta.append(steps[-1])
        if gates.mask is not None:  # at padding the momentum is carried, and not added to the weights
            steps = jnp.where(gates.mask[:, None, None], steps, 0)
        weights.append(linear_scan(log_retention, steps, start.weights[i]))
    reads = jax.vmap(lambda w, q: engine.read(rule, params, w, q))(tuple(weights), queries)
    return (tuple(w[-1] for w in weights), tuple(momenta), start.anchor), reads, surprise


def linear_scan(log_gate: jax.Array, steps: jax.Array, start: jax.Array) -> jax.Array:
    """Y_t = g_t Y_{t-1} + X_t for all t from Y_0, by an associative scan; gates [time], steps [time, in, out]."""

    def compose(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    products, sums = jax.lax.associative_scan(compose, (jnp.exp(log_gate)[:, None, None], steps))
    return products * start[None] + sums
