"""The loss of a language model: summed cross entropy of its next tokens."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from flax import nnx

Batch = dict[str, jax.Array]
"""{"tokens", "targets", "segment_ids"}, int32 [rows, time]; a target of -1 is not predicted."""


def loss_sum(graphdef: nnx.GraphDef, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Summed cross entropy in nats of a batch's predicted targets, and how many there are.

    Both are scalars of the logits' dtype.
    """
    logits = nnx.merge(graphdef, params)(batch["tokens"], batch["segment_ids"])
    return cross_entropy_sum(logits, batch["targets"])


def cross_entropy_sum(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `loss_sum`, from logits [rows, time, vocab] and targets int32 [rows, time].

    Raises AssertionError for targets of another shape, which would be broadcast to a wrong loss, or that are no
    integers.
    """
    chex.assert_shape(targets, logits.shape[:-1])
    chex.assert_type(targets, int)
    predicted = targets >= 0
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return jnp.sum(nats, where=predicted), jnp.sum(predicted, dtype=nats.dtype)
