"""Losses: that of a model's head, and the summed cross entropy of classes or next tokens."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from flax import nnx

Batch = dict[str, jax.Array]
"""{"tokens", "targets", "segment_ids"}: what a row holds, what is to be said of it, and which of it is a document. Of a
language model int32 [rows, time], a target of -1 not predicted; of others as their head says, segment_ids None where
there is no padding."""


def loss_sum(graphdef: nnx.GraphDef, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The summed loss of a batch as the model's head has it, and what it is divided by: scalars."""
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
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return jnp.sum(nats, where=predicted), jnp.sum(predicted, dtype=nats.dtype)


def squared_log_partition_sum(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Summed square of log sum exp(logits) where targets are 0 or more: the z-loss of PaLM (arXiv 2204.02311, 5).

    logits: [..., classes], targets: int32 [...].
    """
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) ** 2, where=targets >= 0)
