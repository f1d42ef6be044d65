"""What goes in and out of a memory: the rule, the state it carries, the gates of every token, the surprise it felt."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from titans_jax.memory.algorithms import Algorithm
from titans_jax.memory.architectures import Architecture
from titans_jax.memory.biases import AttentionalBias
from titans_jax.memory.retentions import Retention

# Gates are clamped here before the logarithm, so that 1 - alpha = 0 and eta = 0 have a finite value and gradient. It is
# far below what a cumulative product resolves, and far above float32's subnormals, which are flushed to 0.
SMALLEST_RETENTION = 1e-30


@dataclasses.dataclass(frozen=True)
class MemoryRule:
    """The four choices of Miras plus the chunk: what is remembered, how error is measured, kept and descended.

    `chunk_size` is part of the model (papers 1.6.1): inner gradients are taken at the memory of the chunk's start.
    """

    architecture: Architecture
    bias: AttentionalBias
    retention: Retention
    algorithm: Algorithm
    chunk_size: int

    def __post_init__(self):
        if not isinstance(self.chunk_size, int) or self.chunk_size < 1:
            raise ValueError(f"chunk_size is {self.chunk_size!r}: it must be an integer of 1 or more, for example 16.")
        kinds = {
            "architecture": Architecture,
            "bias": AttentionalBias,
            "retention": Retention,
            "algorithm": Algorithm,
        }
        for field, kind in kinds.items():
            if not isinstance(getattr(self, field), kind):
                raise ValueError(
                    f"{field} is {getattr(self, field)!r}: it must be a value that {kind.__module__} makes."
                )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MemoryState:
    """Everything one memory carries from token to token; its size does not depend on how much it has read.

    weights, momentum, anchor: one [in, out] matrix per fast weight, float32 (float64 when the inputs are); momentum is
    empty for an algorithm without it. anchor: the weights at the open chunk's start, where gradients are taken.
    position: tokens of the open chunk already read, 0 .. chunk_size - 1; a Python int is static, the fast path.
    """

    weights: tuple[jax.Array, ...]
    momentum: tuple[jax.Array, ...]
    anchor: tuple[jax.Array, ...]
    position: int | jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gates:
    """What every token tells the memory: how much to keep, how much past surprise to keep, how far to step.

    log_retention = log(1 - alpha) <= 0 (-inf allowed), log_momentum = log(eta) <= 0, step_size = theta >= 0, each
    [time] or [time, matrices] (one set per fast matrix, papers 1.11-e). log_momentum is None for gradient descent.
    mask: [time] bool, False marks padding, which changes nothing; padding may only follow a document's last token.
    """

    log_retention: jax.Array
    log_momentum: jax.Array | None
    step_size: jax.Array
    mask: jax.Array | None = None

    @classmethod
    def from_values(cls, forget: jax.Array, momentum: jax.Array | None, step_size: jax.Array, mask=None) -> Gates:
        """Gates from the papers' alpha, eta, theta (Titans eq 8-14), each in [0, 1] but theta, which is >= 0."""

        def log(x):
            return jnp.log(jnp.maximum(x, SMALLEST_RETENTION))

        return cls(log(1 - forget), None if momentum is None else log(momentum), step_size, mask)

    def scalars(self) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """(log_retention, log_momentum, step_size), the leaves that weigh tokens."""
        return self.log_retention, self.log_momentum, self.step_size

    @classmethod
    def per_chunk(cls, forget, momentum, step_size, chunk_size: int) -> Gates:
        """Gates constant inside a chunk (papers 1.6.8), from [chunks] or [chunks, matrices] alpha, eta, theta."""
        repeat = lambda x: None if x is None else jnp.repeat(x, chunk_size, axis=0)  # noqa: E731
        return cls.from_values(repeat(forget), repeat(momentum), repeat(step_size))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Surprise:
    """What each token cost the memory at the anchor: its inner loss, and the norm of the loss's cotangent at the read.

    loss, cotangent_norm: [time] float32, 0 at padding (Titans 3.1: the gradient is the momentary surprise).
    """

    loss: jax.Array
    cotangent_norm: jax.Array


Params = dict[str, Any]
