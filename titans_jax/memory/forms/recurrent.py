"""The recurrent form: one token at a time. The definition every other form must equal, and what decoding runs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.chunk_algorithm import FormOptions, MemoryInputs, MemoryOutputs, Tokens
from titans_jax.memory.forms.inner_gradient import (
    close,
    gradient_weights,
    inner_gradients,
    read,
    readable_weights,
    since_zero,
    token_retention,
)
from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, Params, Surprise, select_state
from titans_jax.ops.matmul import outer_products


def memorize(
    rule: MemoryRule,
    params: Params,
    state: MemoryState,
    initial: MemoryState | None,
    inputs: MemoryInputs,
    options: FormOptions,
) -> MemoryOutputs:
    """Scan over tokens (Titans eq 8-14); a reset may fall anywhere and restarts the chunks."""
    state = dataclasses.replace(state, position=jnp.asarray(state.position, jnp.int32))

    def token(state, one: MemoryInputs):
        if one.resets is not None:
            state = select_state(one.resets, initial, state)
        written, surprise = write(rule, params, state, one.keys[None], one.values[None], one.gates)
        if one.gates.mask is not None:
            written = select_state(one.gates.mask, written, state)
            surprise = jax.tree.map(lambda x: jnp.where(one.gates.mask, x, 0), surprise)
        return written, (read(rule, params, readable_weights(rule, params, written), one.queries), surprise)

    state, (reads, surprise) = jax.lax.scan(token, state, inputs)
    return MemoryOutputs(reads, state, jax.tree.map(lambda x: x[:, 0], surprise))


def write(
    rule: MemoryRule, params: Params, state: MemoryState, key: jax.Array, value: jax.Array, gate: Gates
) -> tuple[MemoryState, Surprise]:
    """The state after one token (key, value [1, head_dim], gate leaves of one token) and its surprise [1]."""
    matrices = len(state.weights)
    anchor = rule.retention.weights(since_zero(rule, params, state.anchor), params)
    anchor = gradient_weights(rule, anchor, gate)
    own = (None if x is None else x[None] for x in (gate.bias_gate, gate.key_step_size, gate.value_step_size))
    inputs, deltas, surprise = inner_gradients(rule, params, anchor, Tokens(key, key, value, *own))
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
        after = close(rule, params, tuple(weights), state.anchor)
        weights = [jnp.where(closed, new, w) for new, w in zip(after, weights, strict=True)]
    anchor = tuple(jnp.where(closed | lagging, w, a) for w, a in zip(weights, state.anchor, strict=True))
    return MemoryState(tuple(weights), tuple(momentum), anchor, jnp.where(closed, 0, position)), surprise
