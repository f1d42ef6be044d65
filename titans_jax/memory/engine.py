"""The pieces every form shares: matmuls in the right precision, taps, the token loss, gates in their full shape."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from titans_jax.memory.types import Gates, MemoryRule, MemoryState, Surprise


def matmul(x: jax.Array, y: jax.Array, operand_dtype) -> jax.Array:
    """x @ y with operands in operand_dtype, accumulated and returned in float32 (float64 for float64)."""
    precision = jax.lax.Precision.DEFAULT if operand_dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    x, y = x.astype(operand_dtype), y.astype(operand_dtype)
    return jnp.matmul(x, y, precision=precision, preferred_element_type=state_dtype(operand_dtype))


def state_dtype(dtype) -> jnp.dtype:
    """The dtype of memory states: float64 for float64 inputs, float32 for everything else."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def read(rule: MemoryRule, params, weights, queries: jax.Array) -> jax.Array:
    """M(queries) at the given weights, in the state's dtype; queries [..., head_dim] also give the operand dtype."""
    return rule.architecture.read(lambda i, x: matmul(x, weights[i], queries.dtype), params, widen(queries))


def widen(x: jax.Array) -> jax.Array:
    return x.astype(state_dtype(x.dtype))


def taps(rule: MemoryRule, params, anchor, keys, values):
    """Every token's rank-one gradient at the anchor, x_i^T delta_i per fast matrix, and its surprise (design 3.1).

    Zero taps are added to the output of each fast matrix; the gradient of the summed bias with respect to them is every
    token's output cotangent delta_i [tokens, out_i] at once, and the inputs x_i [tokens, in_i] are recorded on the way.
    """
    values = widen(values)
    head_dim = values.shape[-1]
    tokens = keys.shape[:-1]
    zeros = tuple(jnp.zeros((*tokens, w.shape[-1]), values.dtype) for w in anchor)

    def loss(tap, read_tap):
        inputs = [None] * len(anchor)

        def linear(i, x):
            inputs[i] = x
            return matmul(x, anchor[i], keys.dtype) + tap[i]

        output = rule.architecture.read(linear, params, widen(keys)) + read_tap
        losses = rule.bias(output, values)
        return jnp.sum(losses), (tuple(inputs), losses)

    grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
    (deltas, cotangent), (inputs, losses) = grad(zeros, jnp.zeros((*tokens, head_dim), values.dtype))
    # A measurement, not a path for gradients: the norm has none at 0, which is where a learned token stands.
    losses, cotangent = jax.lax.stop_gradient((losses, cotangent))
    return inputs, deltas, Surprise(losses, jnp.linalg.norm(cotangent, axis=-1))


def per_matrix(rule: MemoryRule, gates: Gates, matrices: int, dtype) -> Gates:
    """Gates with every leaf [time, matrices] in the state's dtype; momentum only where the algorithm has it."""

    def full(x):
        return (
            None
            if x is None
            else jnp.broadcast_to(x.astype(dtype)[:, None] if x.ndim == 1 else x.astype(dtype), (x.shape[0], matrices))
        )

    momentum = gates.log_momentum if rule.algorithm.has_momentum else None
    return Gates(full(gates.log_retention), full(momentum), full(gates.step_size), gates.mask)


def select_state(condition, when_true: MemoryState, when_false: MemoryState) -> MemoryState:
    """Elementwise choice between two states."""
    choose = functools.partial(jnp.where, condition)
    return jax.tree.map(lambda a, b: choose(jnp.asarray(a), jnp.asarray(b)), when_true, when_false)


def cast_state(state: MemoryState, dtype) -> MemoryState:
    """The state with its matrices in `dtype`; its position as it is."""
    cast = lambda matrices: tuple(m.astype(dtype) for m in matrices)  # noqa: E731
    return MemoryState(cast(state.weights), cast(state.momentum), cast(state.anchor), state.position)
