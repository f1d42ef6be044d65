"""Loss by position in long texts: with the state carried from window to window, and emptied before each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from titans_jax.studies.models import one_graph


def positions_loss(
    graphdef: nnx.GraphDef, params: Any, tokens: np.ndarray, targets: np.ndarray, window: int, carry: bool
) -> np.ndarray:
    """Cross entropy of every target, nats, float32 [rows, time]; NaN where the target is -1.

    The only place where studies read beyond the length they train on.

    Args:
      tokens, targets: int32 [rows, time].
      window: tokens read at a time; it divides time.
      carry: go on from the state that the window before left; otherwise every window is read as a text of its own.

    Raises:
      ValueError: window does not divide time.
    """
    rows, time = tokens.shape
    if time % window:
        raise ValueError(f"time is {time}: it must be a multiple of window {window}.")

    start, read = _programs(graphdef)
    state, losses = start(params, rows, time), []
    for first in range(0, time, window):
        piece = slice(first, first + window)
        nats, after = read(params, state, tokens[:, piece], targets[:, piece])
        losses.append(np.asarray(nats))
        state = after if carry else state
    return np.concatenate(losses, axis=1)


@one_graph
def _programs(graphdef: nnx.GraphDef) -> tuple[Callable, Callable]:
    """Compiled: the state before the first token; a window's losses [rows, window] with the state after it."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def start(params, rows, time):
        return nnx.merge(graphdef, params).init_state(rows, time)

    @jax.jit
    def read(params, state, tokens, targets):
        logits, state = nnx.merge(graphdef, params).extend(tokens, state)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
        return jnp.where(targets >= 0, nats, jnp.nan), state

    return start, read


def bucket_ends(window: int, time: int) -> list[int]:
    """Where the buckets of positions end: the first window, and twice as far each time, up to `time`."""
    ends = [window]
    while ends[-1] < time:
        ends.append(min(2 * ends[-1], time))
    return ends


def bucket_means(losses: np.ndarray, ends: list[int]) -> list[float]:
    """Mean loss of each bucket over rows and positions, of losses [rows, time]; NaN where one has no target."""
    means = []
    for first, end in zip([0, *ends], ends, strict=False):
        part = losses[:, first:end].astype(np.float64)
        known = ~np.isnan(part)
        means.append(float(part[known].mean()) if known.any() else float("nan"))
    return means
