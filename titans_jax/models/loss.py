"""Losses: that of a model's head, and the summed cross entropy of classes or next tokens."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from titans_jax import sharding
from titans_jax.ops.matmul import wide_dtype

MOST_LOGITS = 1 << 24
"""The most logits of a row that `next_token_losses` holds at once: 64 MiB of float32."""

Batch = dict[str, jax.Array]
"""{"tokens", "targets", "segment_ids"}: the inputs, what is to be predicted, and the document of each token. For a
language model all are int32 [rows, time], and a target of -1 is not predicted; for others they are as their head
documents, with segment_ids None where there is no padding."""


def loss_sum(graphdef: nnx.GraphDef, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The summed loss of a batch as the model's head defines it, and the number to divide it by: scalars."""
    return nnx.merge(graphdef, params).loss_sum(batch)


def cross_entropy_sum(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Summed cross entropy in nats of the targets that are 0 or more, and how many there are, in the logits' dtype.

    logits: [..., classes], targets: int32 [...].

    Raises AssertionError for targets of another shape, which would be broadcast to a wrong loss, or that are no
    integers.
    """
    chex.assert_shape(targets, logits.shape[:-1])
    chex.assert_type(targets, int)
    predicted = targets >= 0
    # Not by looking the targets up, which XLA's partitioner (jax 0.10.2) cannot do in `sharding.add_over_copies`.
    of_targets = jnp.sum(logits, axis=-1, where=jax.nn.one_hot(targets, logits.shape[-1], dtype=bool))
    nats = jax.nn.logsumexp(logits, axis=-1) - of_targets
    return jnp.sum(nats, where=predicted), jnp.sum(predicted, dtype=nats.dtype)


def next_token_logits(x: jax.Array, head: jax.Array) -> jax.Array:
    """x [batch, .., time, dim], head [dim, vocabulary], of one dtype -> float32 (float64 of float64)."""
    logits = jnp.matmul(x, head, preferred_element_type=wide_dtype(x.dtype))
    return sharding.constrain(logits, sharding.BATCH, *[None] * (x.ndim - 2), "tensor")


class TokenLosses(NamedTuple):
    """Sums over predicted targets, scalars: cross entropy in nats; how many there are; the z-loss of PaLM (arXiv
    2204.02311, section 5), weight log(sum exp(logits))^2, beside it."""

    nats: jax.Array
    count: jax.Array
    z_loss: jax.Array


def next_token_losses(
    x: jax.Array, head: jax.Array, targets: jax.Array, z_loss: float = 0.0
) -> tuple[jax.Array, TokenLosses]:
    """The loss of next tokens, cross entropy and z-loss, summed, and its parts, through which no gradient goes.

    Logits are x head. All of them at once would be the largest array of a training step: a row's tokens are taken in
    blocks of at most MOST_LOGITS logits, and with several blocks each block's gradients are computed together with its
    loss, so that a first-order derivative neither keeps logits nor computes them twice.

    Args:
      x: [batch, time, dim], the head's input.
      head: [dim, vocabulary], of x's dtype; logits are float32 (float64 of float64).
      targets: int32 [batch, time], -1 where nothing is predicted.
      z_loss: its weight.
    """
    time, vocabulary = x.shape[1], head.shape[1]
    count = -(-time * vocabulary // MOST_LOGITS)
    if count <= 1:
        return _losses(next_token_logits(x, head), targets, z_loss)
    size = -(-time // count)
    padding = (0, count * size - time)
    blocks = jnp.pad(x, ((0, 0), padding, (0, 0))).reshape(x.shape[0], count, size, -1)
    targets = jnp.pad(targets, ((0, 0), padding), constant_values=-1).reshape(x.shape[0], count, size)
    # Gathered once, and not for every block.
    head = sharding.constrain(head, None, "tensor")
    return _blockwise(z_loss, jnp.swapaxes(blocks, 0, 1), head, jnp.swapaxes(targets, 0, 1))


def _losses(logits: jax.Array, targets: jax.Array, z_loss: float) -> tuple[jax.Array, TokenLosses]:
    nats, count = cross_entropy_sum(logits, targets)
    beside = jnp.zeros((), nats.dtype)
    if z_loss:
        beside = z_loss * jnp.sum(jax.nn.logsumexp(logits, axis=-1) ** 2, where=targets >= 0)
    return nats + beside, TokenLosses(*jax.lax.stop_gradient((nats, count, beside)))


def _gradient(logits: jax.Array, targets: jax.Array, z_loss: float) -> jax.Array:
    """The gradient of `_losses` by the logits, written out: a TPU fuses this single exp into the matrix products, while
    the steps of jax.grad are arrays in memory (tpu/schedule.md)."""
    spread = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    likely = jnp.exp(logits - spread)
    right = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
    if z_loss:
        likely *= 1 + 2 * z_loss * spread
    return jnp.where((targets >= 0)[..., None], likely - right, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(z_loss: float, x: jax.Array, head: jax.Array, targets: jax.Array) -> tuple[jax.Array, TokenLosses]:
    """The losses, summed over blocks x [blocks, batch, time, dim], targets [blocks, batch, time]."""

    def one(sums, block):
        x, targets = block
        return jax.tree.map(jnp.add, sums, _losses(next_token_logits(x, head), targets, z_loss)), None

    return jax.lax.scan(one, _no_losses(x), (x, targets))[0]


def _blockwise_forward(z_loss, x, head, targets):
    """The loss is one number, so its gradients are known up to a factor before the backward pass."""
    # A part of the head's gradient for each device's rows, so that what crosses the network is their sum, once.
    parts = sharding.batch_shards(x.shape[1])
    wide = wide_dtype(x.dtype)

    def partial_sums(gradient):
        return sharding.constrain(gradient, sharding.BATCH if parts > 1 else None, None, "tensor")

    def one(carry, block):
        sums, d_head = carry
        x, targets = (leaf.reshape(parts, -1, *leaf.shape[1:]) for leaf in block)
        logits = next_token_logits(x, head)
        values, d_logits = _losses(logits, targets, z_loss), _gradient(logits, targets, z_loss).astype(x.dtype)
        d_x = jnp.einsum("prtv,dv->prtd", d_logits, head, preferred_element_type=wide)
        d_head += partial_sums(jnp.einsum("prtd,prtv->pdv", x, d_logits, preferred_element_type=wide))
        return (jax.tree.map(jnp.add, sums, values), d_head), d_x.reshape(block[0].shape).astype(x.dtype)

    start = _no_losses(x), partial_sums(jnp.zeros((parts, *head.shape), wide))
    (sums, d_head), d_x = jax.lax.scan(one, start, (x, targets))
    return sums, (d_x, jnp.sum(d_head, axis=0).astype(head.dtype))


def _blockwise_backward(z_loss, gradients, cotangents):
    factor = cotangents[0]
    d_x, d_head = (gradient * factor.astype(gradient.dtype) for gradient in gradients)
    return d_x, d_head, None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def _no_losses(x: jax.Array) -> tuple[jax.Array, TokenLosses]:
    zero = jnp.zeros((), wide_dtype(x.dtype))
    return zero, TokenLosses(zero, zero, zero)
