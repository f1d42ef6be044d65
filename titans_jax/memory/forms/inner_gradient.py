"""Shared by all forms: a read, the inner loss, and every token's rank-one gradient (memory/README.md, The rule)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.chunk_algorithm import Tokens
from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.algorithms import Written
from titans_jax.memory.rule.architectures import centred
from titans_jax.memory.rule.retentions import Slopes
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import Matrices, MemoryState, Params, Surprise
from titans_jax.ops.matmul import matmul, outer_products, to_state_dtype
from titans_jax.ops.whole_matrix import scale_matrix

if TYPE_CHECKING:
    from jaxtyping import Array, Float


class InnerGradients(NamedTuple):
    """Every token's gradient of its inner loss, x_i^T delta_i for fast matrix i, never formed.

    inputs: x_i [tokens, in_i]. deltas: the loss's cotangents at the outputs, [tokens, out_i]. Channel-wise step sizes
    are factors of the first inputs and of the last deltas, `slope_share` is a factor of all deltas.
    """

    inputs: tuple[Float[Array, "tokens _"], ...]
    deltas: tuple[Float[Array, "tokens _"], ...]
    surprise: Surprise


def inner_gradients(rule: MemoryRule, params: Params, anchor: Matrices, tokens: Tokens) -> InnerGradients:
    """The gradients of all tokens at the anchor, in one backward pass.

    A zero is added to the output of each fast matrix; the gradient of the summed inner loss with respect to these zeros
    is every token's cotangent delta_i at once, and the inputs x_i are recorded on the way.
    """
    keys, values = tokens.keys, to_state_dtype(tokens.values)
    zeros = tuple(jnp.zeros((*keys.shape[:-1], w.shape[-1]), values.dtype) for w in anchor)

    def loss(at_outputs, at_read):
        inputs, outputs = [None] * len(anchor), [None] * len(anchor)

        def linear(i, x):
            inputs[i], outputs[i] = x, matmul(x, anchor[i], keys.dtype) + at_outputs[i]
            return outputs[i]

        losses = inner_loss(rule, linear, params, tokens._replace(values=values), at_read)
        return jnp.sum(losses), (tuple(inputs), outputs[-1], losses)

    grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
    (deltas, cotangent), (inputs, output, losses) = grad(zeros, jnp.zeros(values.shape, values.dtype))
    # A measurement, not a path for gradients: the norm has none at 0, the cotangent of a token that is known exactly.
    losses, cotangent = jax.lax.stop_gradient((losses, cotangent))
    if rule.bound_slope:
        share = slope_share(rule, output)
        deltas = tuple(share * delta for delta in deltas)
    if tokens.erase is not None:  # the written key is not the one that the error was taken with
        inputs = (to_state_dtype(keys),)
    if tokens.key_step_size is not None:
        inputs = (inputs[0] * tokens.key_step_size, *inputs[1:])
    if tokens.value_step_size is not None:
        deltas = (*deltas[:-1], deltas[-1] * tokens.value_step_size)
    return InnerGradients(inputs, deltas, Surprise(losses, jnp.linalg.norm(cotangent, axis=-1)))


def slope_share(rule: MemoryRule, output: Float[Array, "*tokens head_dim"]) -> Float[Array, "*tokens 1"]:
    """The factor in [0, 1] by which `bound_slope` shortens a token's step, for the last matrix's output for its key:
    behind a norm, gradients grow as 1 / deviation and their own slopes as 1 / variance, without bound."""
    return jnp.minimum(centred(output)[1] / rule.start_variance(output.shape[-1]), 1.0)


def inner_loss(rule: MemoryRule, linear, params: Params, tokens: Tokens, at_read: jax.Array) -> jax.Array:
    """The losses [...] whose gradients are written, with the zeros `at_read` added to the memory's reads."""
    written = Written(tokens.error_keys(), tokens.values, tokens.bias_gate, at_read)
    return rule.algorithm.inner_loss(rule.architecture, rule.bias, linear, params, written)


def gradient_weights(rule: MemoryRule, params: Params, anchor: Matrices, gate: Gates) -> Matrices:
    """The matrices at which a token's gradient is taken: the anchor or, for an algorithm that decays first, the anchor
    (or its change since the learned start) after the token's own retention. gate: leaves of one token."""
    if not rule.algorithm.decay_first:
        return anchor
    kept = [token_retention(gate, i, len(anchor)) for i in range(len(anchor))]
    if not rule.forget_to_start:
        return tuple(a * w for a, w in zip(kept, anchor, strict=True))
    starts = [start.astype(w.dtype) for start, w in zip(params["weights"], anchor, strict=True)]
    return tuple(start + a * (w - start) for start, a, w in zip(starts, kept, anchor, strict=True))


def token_retention(gate: Gates, i: int, matrices: int) -> jax.Array:
    """One token's retention of matrix i, [1 or in, 1 or out]; gate: leaves of one token."""
    kept = jnp.exp(gate.log_retention[i])[None, None]
    if i == 0 and gate.log_key_retention is not None:
        kept = kept * jnp.exp(gate.log_key_retention)[:, None]
    if i == matrices - 1 and gate.log_value_retention is not None:
        kept = kept * jnp.exp(gate.log_value_retention)[None, :]
    return kept


def token_steps(
    rule: MemoryRule,
    momentum: Matrices,
    inputs: Matrices,
    deltas: Matrices,
    gate: Gates,
    step_size: jax.Array,
    operand_dtype,
) -> Matrices:
    """One token's step S_t of every matrix: the sum of the gradients x_i^T delta_i, its own and those of its window,
    times minus step_size [summed, matrices], plus the momentum; with momentum S_t is the next token's `momentum`.

    inputs, deltas: [summed, in or out]. gate: leaves of one token.
    """
    steps = []
    for i, (x, delta) in enumerate(zip(inputs, deltas, strict=True)):
        step = outer_products(-step_size[:, i : i + 1] * x, delta, operand_dtype)
        if rule.algorithm.has_momentum:
            step = jnp.exp(gate.log_momentum[i]) * momentum[i] + step
        steps.append(step)
    return tuple(steps)


def read(
    rule: MemoryRule, params: Params, weights: Matrices, queries: Float[Array, "*tokens head_dim"]
) -> Float[Array, "*tokens head_dim"]:
    """M(queries) at the given weights, in the state's dtype; operands have the dtype of queries [..., head_dim]."""

    def linears(parts):
        return [lambda i, x, cut=cut: matmul(x, cut[i], queries.dtype) for cut in split_columns(weights, parts)]

    return rule.algorithm.read(rule.architecture, linears, params, to_state_dtype(queries))


def split_columns(matrices: Matrices, parts: int):
    """`parts` tuples of matrices [..., in, out], each with its share of the columns of every one."""
    return [matrices] if parts == 1 else zip(*(jnp.split(matrix, parts, axis=-1) for matrix in matrices), strict=True)


def since_zero(rule: MemoryRule, params: Params, carried: Matrices) -> Matrices:
    """The argument of the retention gate: the carried matrices, plus the learned start where the rule forgets to it, as
    what is carried is then the change since."""
    if not rule.forget_to_start:
        return carried
    return tuple(w.astype(c.dtype) + c for w, c in zip(params["weights"], carried, strict=True))


def readable_weights(rule: MemoryRule, params: Params, state: MemoryState) -> Matrices:
    """The fast weights that a read at this state sees: the state's own, or those of the chunk's start moved by the
    slope (see `retentions`), or, for a stale rule, those of the chunk's start."""
    if rule.stale:
        return weights_at(rule, params, state.anchor)
    if rule.retention.linear:
        return since_zero(rule, params, state.weights)
    if not rule.retention.one_slope:
        return weights_at(rule, params, close(rule, params, state.weights, state.anchor))
    opened, slopes = weights_at(rule, params, state.anchor), slopes_at(rule, params, state.anchor)
    parts = zip(opened, slopes, state.weights, state.anchor, strict=True)
    return tuple(w + slope * (carried - anchor) for w, slope, carried, anchor in parts)


def weights_at(rule: MemoryRule, params: Params, carried: Matrices) -> Matrices:
    """The fast weights for the carried matrices at a chunk's start. From positive weights without one_slope the mean
    over the outputs of the last matrix is subtracted: the norm takes it out anyway, and in bfloat16 it costs digits."""
    weights = rule.retention.weights(since_zero(rule, params, carried), params)
    if not rule.retention.positive or rule.retention.one_slope:
        return weights
    *others, last = weights
    return (*others, last - jnp.mean(last, axis=1, keepdims=True))


def slopes_at(rule: MemoryRule, params: Params, carried: Matrices) -> Slopes:
    """How far the fast weights move with the carried matrices inside the chunk."""
    return rule.retention.slope(since_zero(rule, params, carried), params)


def close_chunk(
    rule: MemoryRule, params: Params, end: ChunkEnd, queries: jax.Array, unrolled: bool = False
) -> tuple[Matrices, jax.Array]:
    """The carried matrices that a chunk passes on, and its reads. If its last slot holds a token, the chunk is over:
    the algorithm's step and `Retention.close` act on the carried matrices, and the last token reads the result. A
    stale rule's reads, and those without one_slope, which have been closed already, stay as they are. unrolled: see
    `Algorithm.direction`."""
    if not changes_at_end(rule):
        return end.carried, end.reads
    over = True if end.is_full is None else end.is_full
    stepped = chunk_step(rule, end.carried, end.momentum, end.step_total, queries.dtype, unrolled)
    closed = close(rule, params, stepped, end.anchor)
    carried = jax.tree.map(functools.partial(jnp.where, over), closed, end.carried)
    if rule.stale or not rule.retention.one_slope:
        return carried, end.reads
    last = read(rule, params, weights_at(rule, params, closed), queries[-1:])
    return carried, jnp.concatenate([end.reads[:-1], jnp.where(over, last, end.reads[-1:])])


def close(rule: MemoryRule, params: Params, carried: Matrices, anchor: Matrices) -> Matrices:
    """The matrices carried on after a chunk, by `Retention.close`, which a linear retention does not need."""
    if rule.retention.linear:
        return carried
    closed = rule.retention.close(since_zero(rule, params, carried), since_zero(rule, params, anchor), params)
    if not rule.forget_to_start:
        return closed
    return tuple(c - w.astype(c.dtype) for w, c in zip(params["weights"], closed, strict=True))


def changes_at_end(rule: MemoryRule) -> bool:
    """Whether something happens to the carried matrices after a chunk's last token."""
    return rule.algorithm.steps_by_chunk or not rule.retention.linear


def chunk_step(
    rule: MemoryRule,
    carried: Matrices,
    momentum: Matrices,
    step_total: jax.Array | None,
    operand_dtype: jnp.dtype,
    unrolled: bool = False,
) -> Matrices:
    """The carried matrices after the step that a whole chunk takes at its end, if the algorithm has one: in the
    direction of S, with the mean step size of its tokens. step_total: [matrices], in a kernel a row for each."""
    if not rule.algorithm.steps_by_chunk:
        return carried
    sizes = step_total / rule.chunk_size
    # Of the arrays of matrices that a kernel keeps transposed, too.
    directions = jax.tree.map(lambda step: rule.algorithm.direction(step, operand_dtype, unrolled), momentum)
    moved = zip(carried, directions, strict=True)
    return tuple(c + scale_matrix(jnp.atleast_2d(sizes[i]), d) for i, (c, d) in enumerate(moved))


class ChunkEnd(NamedTuple):
    """A chunk's end before it is closed: the carried matrices, their momentum, its anchor, its reads [tokens,
    head_dim], whether its last slot holds a token, bool [1, 1] (None: it does), and `MemoryState.step_total` (see
    `chunk_step`)."""

    carried: Matrices
    momentum: Matrices
    anchor: Matrices
    reads: jax.Array
    is_full: jax.Array | None
    step_total: jax.Array | None
