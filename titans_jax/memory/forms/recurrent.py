"""The recurrent form: one token at a time. The definition every other form must equal, and what decoding runs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.chunk_algorithm import FormOptions, MemoryInputs, MemoryOutputs, Tokens
from titans_jax.memory.forms.inner_gradient import (
    changes_at_end,
    chunk_step,
    close,
    gradient_weights,
    inner_gradients,
    read,
    readable_weights,
    token_retention,
    token_steps,
    weights_at,
)
from titans_jax.memory.forms.omega_window import after, lag_weights, latest
from titans_jax.memory.forms.steps_by_chunk import momentum_of_chunk
from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, Params, Surprise, WindowTokens, select_state


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
        seen = readable_weights(rule, params, state if rule.stale else written)
        return written, (read(rule, params, seen, one.queries), surprise)

    state, (reads, surprise) = jax.lax.scan(token, state, inputs)
    return MemoryOutputs(reads, state, jax.tree.map(lambda x: x[:, 0], surprise))


def write(
    rule: MemoryRule, params: Params, state: MemoryState, key: jax.Array, value: jax.Array, gate: Gates
) -> tuple[MemoryState, Surprise]:
    """The state after one token (key, value [1, head_dim], gate leaves of one token) and its surprise [1]."""
    anchor = gradient_weights(rule, params, weights_at(rule, params, state.anchor), gate)
    own = (gate.bias_gate, gate.key_step_size, gate.value_step_size, gate.erase)
    own = (None if x is None else x[None] for x in own)
    tokens, window = WindowTokens(key, value, gate.step_size[None]), None
    if rule.algorithm.window > 1:
        tokens = after(state.window, tokens)
        window = latest(tokens, rule.algorithm.window - 1)
        tokens = dataclasses.replace(tokens, step_size=lag_weights(gate.window_weight)[:, None] * tokens.step_size)
    inputs, deltas, surprise = inner_gradients(rule, params, anchor, Tokens(key, tokens.keys, tokens.values, *own))
    gate = momentum_of_chunk(rule, gate, state.position == 0)
    steps = token_steps(rule, state.momentum, inputs, deltas, gate, tokens.step_size, key.dtype)
    lagging = rule.retention.lags & (state.position == 0)
    weights = []
    for i, (before, step) in enumerate(zip(state.weights, steps, strict=True)):
        retention = token_retention(gate, i, len(steps))
        weight = retention * before if rule.algorithm.steps_by_chunk else retention * before + step
        if rule.retention.lags:
            weight = jnp.where(lagging, rule.retention.first(before, retention, step, i, params), weight)
        weights.append(weight)
    position = state.position + 1
    closed = position == rule.chunk_size
    total = state.step_total
    if rule.algorithm.steps_by_chunk:
        total = total + gate.step_size
    if changes_at_end(rule):

        def shut(weights):
            return close(rule, params, chunk_step(rule, weights, steps, total, key.dtype), state.anchor)

        weights = jax.lax.cond(closed, shut, lambda weights: weights, tuple(weights))
    anchor = tuple(jnp.where(closed | lagging, w, a) for w, a in zip(weights, state.anchor, strict=True))
    momentum = steps if rule.algorithm.has_momentum else ()
    total = None if total is None else jnp.where(closed, 0, total)
    state = MemoryState(tuple(weights), momentum, anchor, jnp.where(closed, 0, position), window, total)
    return state, jax.tree.map(lambda x: x[-1:], surprise)
