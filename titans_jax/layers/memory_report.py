"""Measurements of a memory layer: its gates, how much its writes explain, and how far its weights have moved.

    explained share = 1 - (inner loss before writing) / (inner loss of the best constant read)

Both losses are the memory's own attentional bias. A memory that answers every key with the mean of all values has the
share 0, one that knows every value before it is written 1; below 0 it is worse than having read nothing.

No gradient goes through a report, and the compiler removes one that is not used.

Shapes: b batch, t time, h heads, d head_dim, n inner steps per token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from titans_jax import memory
from titans_jax.memory.forms.inner_gradient import readable_weights
from titans_jax.memory.state import Matrices
from titans_jax.ops.matmul import to_state_dtype


def memory_report(
    rule: memory.MemoryRule,
    params: memory.Params,
    gates: memory.Gates,
    values: jax.Array,
    surprise: memory.Surprise,
    weights: Matrices,
) -> dict[str, jax.Array]:
    """The report of a call, of its gates and surprise [b, t, h, ...], values [b, t, h, (n,) d] and what the memories
    carry after it [b, h, ...]; params with a leading heads axis. Leaves [b, t] but for the last, [b]:

    retention, momentum (where there is one), step_size: means over heads and matrices.
    inner_loss: of every token before it is written, at its chunk's start; mean over heads.
    constant_loss: that of the mean value of the call's tokens (in MAC those of a segment) in place of the read; not of
      a rule whose inner loss has no least value (see `has_least_loss`). With it, a model reports explained_share.
    update_norm: how far the carried matrices are from the learned start after the call (Frobenius norm over a head's
      matrices, mean over heads), the same number for all its tokens: in MAC, means over segments.
    weight_norm: the norm of the weights that are read after the call.
    """
    params, gates, values, surprise, weights = jax.lax.stop_gradient((params, gates, values, surprise, weights))
    report = {"retention": jnp.exp(gates.log_retention), "step_size": gates.step_size}
    if gates.log_momentum is not None:
        report["momentum"] = jnp.exp(gates.log_momentum)
    report = {name: jnp.mean(value, axis=(2, 3)) for name, value in report.items()}
    for log_retention in (gates.log_key_retention, gates.log_value_retention):
        if log_retention is not None:
            report["retention"] *= jnp.mean(jnp.exp(log_retention), axis=(2, 3))
    report["inner_loss"] = jnp.mean(surprise.loss, axis=2)
    if has_least_loss(rule):
        report["constant_loss"] = constant_loss(rule, gates, values)

    start = jax.vmap(lambda params: memory.init_state(rule, params).weights)(params)
    moved = tuple(now - before[None] for now, before in zip(weights, start, strict=True))
    report["update_norm"] = jnp.broadcast_to(frobenius(moved)[:, None], report["inner_loss"].shape)
    return report | {"weight_norm": frobenius(weights_read(rule, params, weights))}


def has_least_loss(rule: memory.MemoryRule) -> bool:
    """Whether the inner loss is the bias itself, and 0 where the read is the value.

    The dot product rewards reads without bound and has no best constant; RWKV-7's bias is the dot product for its
    writes; and Mesa's inner loss, which only makes its sums, is not the bias.
    """
    return rule.algorithm.descends and (not rule.bias.affine or rule.bias.constant_slope == 1)


def constant_loss(rule: memory.MemoryRule, gates: memory.Gates, values: jax.Array) -> jax.Array:
    """[b, t]: the bias of every token if its read were the mean value over the tokens [b, t, h, (n,) d] of its row.

    Each inner step has a mean of its own, and losses of the steps are summed; mean over heads.
    """
    values, own = to_state_dtype(values), gates.bias_gate
    if own is not None and own.ndim < values.ndim:
        own = own[..., None]
    counts = jnp.ones(values.shape[:2], values.dtype) if gates.mask is None else gates.mask.astype(values.dtype)
    counts = counts.reshape(*counts.shape, *[1] * (values.ndim - 2))
    total = jnp.maximum(jnp.sum(counts, axis=1, keepdims=True), 1)
    mean = jnp.sum(values * counts, axis=1, keepdims=True) / total
    losses = rule.bias(jnp.broadcast_to(mean, values.shape), values, own)
    return jnp.mean(losses.reshape(*values.shape[:3], -1).sum(axis=-1), axis=2)


def weights_read(rule: memory.MemoryRule, params: memory.Params, carried: Matrices) -> Matrices:
    """The fast weights [b, h, ...] that a chunk starting with the carried matrices reads."""

    def one(params: memory.Params, carried: Matrices) -> Matrices:
        return readable_weights(rule, params, memory.MemoryState(carried, (), anchor=carried, position=0))

    return jax.vmap(jax.vmap(one), in_axes=(None, 0))(params, carried)


def frobenius(matrices: Matrices) -> jax.Array:
    """[b]: the norm over all matrices [b, h, ...] of a head, mean over heads."""
    squares = sum(jnp.sum(jnp.square(matrix), axis=(2, 3)) for matrix in matrices)
    return jnp.mean(jnp.sqrt(squares), axis=1)


def explained_share(inner_loss: jax.Array, constant_loss: jax.Array) -> jax.Array:
    """1 - inner_loss / constant_loss of means over tokens and heads, so that sums are compared, not ratios averaged."""
    return 1 - inner_loss / jnp.maximum(constant_loss, jnp.finfo(constant_loss.dtype).tiny)
