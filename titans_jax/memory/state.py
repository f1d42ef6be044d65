"""The state that a memory carries from token to token, and the surprise of each token."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

Params = dict[str, Any]
"""Slow parameters of one head: {"weights": the learned start of each carried matrix, ...}."""

Matrices = tuple[jax.Array, ...]
"""One matrix [in, out] per fast weight."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowTokens:
    """Tokens in their order, as the Omega rule writes them: keys, values [tokens, head_dim], step_size [tokens,
    matrices], 0 for a place without a token (the start of a document, padding)."""

    keys: Float[Array, "*blocks tokens head_dim"]
    values: Float[Array, "*blocks tokens head_dim"]
    step_size: Float[Array, "*blocks tokens matrices"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MemoryState:
    """Everything one memory carries from token to token; its size does not depend on how much it has read.

    weights, momentum, anchor: one [in, out] matrix per fast weight, float32 (float64 when the inputs are); momentum is
    empty for an algorithm without it. weights are what the rule's retention carries: the fast weights themselves for
    `decay`, else an accumulator or logits, of which `readable_weights` makes the fast weights. anchor: the same at the
    open chunk's start, where gradients are taken; None where it was not asked for: from such a state a sequence can
    only be continued in a new chunk (`start_chunk`). position: inner steps of the open chunk already taken, from 0 to
    chunk_size - 1; a Python int is static, the fast path. window: for an algorithm whose steps sum several tokens'
    gradients, its last window - 1 tokens, in the dtype of the matrices; else None. step_total: for an algorithm that
    steps by chunks, the sum of the step sizes of the open chunk's tokens, [matrices]; else None.
    """

    weights: tuple[Float[Array, "_ _"], ...]
    momentum: tuple[Float[Array, "_ _"], ...]
    anchor: tuple[Float[Array, "_ _"], ...] | None
    position: int | Int[Array, ""]
    window: WindowTokens | None = None
    step_total: Float[Array, " matrices"] | None = None


class Carried(NamedTuple):
    """What a memory carries from one chunk to the next: the fields of a `MemoryState` at a chunk's start that are not
    known there."""

    weights: Matrices
    momentum: Matrices
    window: WindowTokens | None
    step_total: jax.Array | None

    @classmethod
    def of(cls, state: MemoryState) -> Carried:
        """What a state at a chunk's start carries."""
        return cls(state.weights, state.momentum, state.window, state.step_total)

    def state(self) -> MemoryState:
        """The state at a chunk's start that carries this."""
        return MemoryState(self.weights, self.momentum, self.weights, 0, self.window, self.step_total)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Surprise:
    """How wrong the memory at the anchor was for each token: the inner loss, and the norm of its cotangent at the read.

    loss, cotangent_norm: [time], in the dtype of the matrices, 0 at padding (Titans 3.1: the gradient is the momentary
    surprise).
    """

    loss: Float[Array, " time"]
    cotangent_norm: Float[Array, " time"]


def select_state(condition, when_true: MemoryState, when_false: MemoryState) -> MemoryState:
    """Elementwise choice between two states."""
    return jax.tree.map(functools.partial(jnp.where, condition), when_true, when_false)


def cast_state(state: MemoryState, dtype) -> MemoryState:
    """The state with all its numbers in `dtype`; its position as it is."""
    cast = jax.tree.map(lambda x: x.astype(dtype), dataclasses.replace(state, position=None))
    return dataclasses.replace(cast, position=state.position)
