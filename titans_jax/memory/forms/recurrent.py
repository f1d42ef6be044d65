"""The recurrent form: one token at a time. The definition every other form must equal, and what decoding runs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.inner_gradient import (
    inner_gradients,
    one_token,
    read,
    readable_weights,
    token_retention,
    weights_for_gradient,
)
from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, select_state
from titans_jax.ops.matmul import outer_products


def memorize(rule: MemoryRule, params, state: MemoryState, queries, keys, values, gates, resets, initial):
    """Scan over tokens; a reset may fall anywhere and restarts the chunk grid (Titans eq 8-14, papers 1.6.1)."""
    state = dataclasses.replace(state, position=jnp.asarray(state.position, jnp.int32))

    def token(state, inputs):
        query, key, value, gate, reset = inputs
        if reset is not None:
            state = select_state(reset, initial, state)
        written, surprise = write(rule, params, state, key[None], value[None], gate)
        if gate.mask is not None:
            written = select_state(gate.mask, written, state)
            surprise = jax.tree.map(lambda x: jnp.where(gate.mask, x, 0), surprise)
        return written, (read(rule, params, readable_weights(rule, params, written), query), surprise)

    state, (reads, surprise) = jax.lax.scan(token, state, (queries, keys, values, gates, resets))
    return reads, state, jax.tree.map(lambda x: x[:, 0], surprise)


def write(rule: MemoryRule, params, state: MemoryState, key, value, gate: Gates):
    """The state after one token (key, value [1, head_dim], gate leaves of one token) and its surprise."""
    matrices = len(state.weights)
    anchor = weights_for_gradient(rule, rule.retention.weights(state.anchor, params), gate)
    row = one_token(gate)
    inputs, deltas, surprise = inner_gradients(rule, params, anchor, key, value, row)
    lagging = rule.retention.lags & (state.position == 0)
    weights, momentum = [], []
    for i, (x, delta) in enumerate(zip(inputs, deltas, strict=True)):
        step = -gate.step_size[i] * outer_products(x, delta, key.dtype)
        if rule.algorithm.has_momentum:
            step = jnp.exp(gate.log_momentum[i]) * state.momentum[i] + step
            momentum.append(step)
        retention = token_retention(gate, i, matrices)
        weight = retention * state.weights[i] + step
        if rule.retention.lags:
            weight = jnp.where(lagging, rule.retention.first(state.weights[i], retention, step, i, params), weight)
        weights.append(weight)
    position = state.position + 1
    closed = position == rule.chunk_size
    if not rule.retention.linear:
        after = rule.retention.close(tuple(weights), state.anchor, params)
        weights = [jnp.where(closed, new, w) for new, w in zip(after, weights, strict=True)]
    anchor = tuple(jnp.where(closed | lagging, w, a) for w, a in zip(weights, state.anchor, strict=True))
    return MemoryState(tuple(weights), tuple(momentum), anchor, jnp.where(closed, 0, position)), surprise
