"""What every form shares: a read, the inner loss, and every token's rank-one gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, Surprise
from titans_jax.ops.matmul import matmul, to_state_dtype


def inner_gradients(rule: MemoryRule, params, anchor, keys, values, gates: Gates):
    """Every token's rank-one gradient at the anchor, x_i^T delta_i per fast matrix, and its surprise (design 3.1).

    Zero taps are added to the output of each fast matrix; the gradient of the summed bias with respect to them is every
    token's output cotangent delta_i [tokens, out_i] at once, and the inputs x_i [tokens, in_i] are recorded on the way.
    Channel-wise step sizes of `gates` are in x_0 and in the last delta.
    """
    values = to_state_dtype(values)
    tokens = keys.shape[:-1]
    zeros = tuple(jnp.zeros((*tokens, w.shape[-1]), values.dtype) for w in anchor)

    def loss(tap, read_tap):
        inputs = [None] * len(anchor)

        def linear(i, x):
            inputs[i] = x
            return matmul(x, anchor[i], keys.dtype) + tap[i]

        losses = inner_loss(rule, linear, params, keys, values, gates.bias_gate, read_tap)
        return jnp.sum(losses), (tuple(inputs), losses)

    grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
    (deltas, cotangent), (inputs, losses) = grad(zeros, jnp.zeros(values.shape, values.dtype))
    # A measurement, not a path for gradients: the norm has none at 0, which is where a learned token stands.
    losses, cotangent = jax.lax.stop_gradient((losses, cotangent))
    if gates.key_step_size is not None:
        inputs = (inputs[0] * gates.key_step_size, *inputs[1:])
    if gates.value_step_size is not None:
        deltas = (*deltas[:-1], deltas[-1] * gates.value_step_size)
    return inputs, deltas, Surprise(losses, jnp.linalg.norm(cotangent, axis=-1))


def inner_loss(rule: MemoryRule, linear, params, keys, values, bias_gate, tap):
    """The losses [...] whose gradients are written, with `tap` added to the read that is judged."""
    return rule.algorithm.inner_loss(
        rule.architecture, rule.bias, linear, params, to_state_dtype(keys), values, bias_gate, tap
    )


def weights_for_gradient(rule: MemoryRule, anchor, gate: Gates):
    """The matrices at which a token's gradient is taken: the anchor, or what its own retention leaves of it."""
    if not rule.algorithm.decay_first:
        return anchor
    return tuple(token_retention(gate, i, len(anchor)) * w for i, w in enumerate(anchor))


def read(rule: MemoryRule, params, weights, queries: jax.Array) -> jax.Array:
    """M(queries) at the given weights, in the state's dtype; queries [..., head_dim] also give the operand dtype."""

    def linears(parts):
        return [lambda i, x, cut=cut: matmul(x, cut[i], queries.dtype) for cut in split_columns(weights, parts)]

    return rule.algorithm.read(rule.architecture, linears, params, to_state_dtype(queries))


def split_columns(matrices, parts: int):
    """`parts` tuples of matrices, each with its share of the columns of every one."""
    return [matrices] if parts == 1 else zip(*(jnp.split(matrix, parts, axis=1) for matrix in matrices), strict=True)


def readable_weights(rule: MemoryRule, params, state: MemoryState) -> tuple[jax.Array, ...]:
    """The fast weights that a read at this state sees: those of the chunk's start, moved along (see `retentions`)."""
    if rule.retention.linear:
        return state.weights
    opened = rule.retention.weights(state.anchor, params)
    slopes = rule.retention.slope(state.anchor, params)
    parts = zip(opened, slopes, state.weights, state.anchor, strict=True)
    return tuple(w + slope * (carried - anchor) for w, slope, carried, anchor in parts)


def close_chunk(rule: MemoryRule, params, start: MemoryState, carried, reads, queries, mask):
    """What a chunk passes on and its reads, of the linear end state: if its last slot holds a token, the chunk is over,
    and that token reads what `Retention.close` makes of it."""
    over = True if mask is None else mask[-1:]
    closed = rule.retention.close(carried, start.anchor, params)
    last = read(rule, params, rule.retention.weights(closed, params), queries[-1:])
    carried = tuple(jnp.where(over, new, old) for new, old in zip(closed, carried, strict=True))
    return carried, jnp.concatenate([reads[:-1], jnp.where(over, last, reads[-1:])])


def token_retention(gate: Gates, i: int, matrices: int) -> jax.Array:
    """One token's retention of matrix i, [1 or in, 1 or out]; gate leaves are of one token."""
    kept = jnp.exp(gate.log_retention[i])[None, None]
    if i == 0 and gate.log_key_retention is not None:
        kept = kept * jnp.exp(gate.log_key_retention)[:, None]
    if i == matrices - 1 and gate.log_value_retention is not None:
        kept = kept * jnp.exp(gate.log_value_retention)[None, :]
    return kept


def one_token(gate: Gates) -> Gates:
    """A token's own gates with the time axis that `taps` expects."""
    return jax.tree.map(lambda x: x[None], gate)
