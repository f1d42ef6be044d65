"""What goes in and out of a memory: the rule, the state it carries, the gates of every token, the surprise it felt."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from titans_jax.memory.algorithms import Algorithm, LeastSquares
from titans_jax.memory.architectures import Architecture, Linear
from titans_jax.memory.biases import AttentionalBias, DotProduct
from titans_jax.memory.retentions import Retention

# Gates are clamped here before the logarithm, so that 1 - alpha = 0 and eta = 0 have a finite value and gradient. It is
# far below what a cumulative product resolves, and far above float32's subnormals, which are flushed to 0.
SMALLEST_RETENTION = 1e-30


@dataclasses.dataclass(frozen=True)
class MemoryRule:
    """The four choices of Miras plus the chunk: what is remembered, how error is measured, kept and descended.

    chunk_size is part of the model (papers 1.6.1): inner gradients are taken at the memory of the chunk's start.
    learned_start: the memory starts from learned weights (Titans, TTT, Miras) or from zero (linear recurrent models).
    Raises ValueError for choices that exclude each other.
    """

    architecture: Architecture
    bias: AttentionalBias
    retention: Retention
    algorithm: Algorithm
    chunk_size: int
    learned_start: bool = True

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
        if self.retention.positive and not self.architecture.normalized:
            raise ValueError(
                f"retention is {self.retention}: its weights are positive, and {self.architecture} needs negative "
                "ones; use residual_mlp, whose norm takes the mean out, or decay()."
            )
        plain = isinstance(self.architecture, Linear) and self.bias.affine and self.retention.linear
        if self.algorithm.linear_only and not plain:
            raise ValueError(
                f"algorithm is {self.algorithm}: it is defined for a linear memory with an L2 bias and decay; use "
                "gradient_descent() or momentum() for any other."
            )

    @property
    def exact(self) -> bool:
        """Whether the parallel forms give the token-by-token rule: its gradients do not depend on where they are taken,
        or every token is a chunk of its own."""
        hebbian = isinstance(self.bias, DotProduct) and isinstance(self.architecture, Linear)
        return self.chunk_size == 1 or isinstance(self.algorithm, LeastSquares) or hebbian

    def shapes(self, head_dim: int) -> tuple[tuple[int, int], ...]:
        """[in, out] of every fast matrix."""
        return self.algorithm.shapes(self.architecture, head_dim)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MemoryState:
    """Everything one memory carries from token to token; its size does not depend on how much it has read.

    weights, momentum, anchor: one [in, out] matrix per fast weight, float32 (float64 when the inputs are); momentum is
    empty for an algorithm without it. weights are what the rule's retention carries: the fast weights themselves for
    `decay`, else an accumulator or logits, of which `readable` makes the fast weights. anchor: the same at the open
    chunk's start, where gradients are taken. position: inner steps of the open chunk already taken, 0 .. chunk_size -
    1; a Python int is static, the fast path.
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
    bias_gate: [time] or [time, head_dim], what the attentional bias calls its own (the delta of Huber).

    Channel-wise factors, each [time, head_dim] or None: log_key_retention acts on the inputs of the first fast matrix,
    log_value_retention on the outputs of the last one (for a linear memory, rows and columns of the same matrix), and
    key_step_size, value_step_size multiply the step there.

    With n inner steps per token, step_size is [time, n] or [time, n, matrices], the channel-wise step sizes [time, n,
    head_dim], bias_gate [time, n] or [time, n, head_dim]; retention acts once, with the first step.
    """

    log_retention: jax.Array
    log_momentum: jax.Array | None
    step_size: jax.Array
    mask: jax.Array | None = None
    bias_gate: jax.Array | None = None
    log_key_retention: jax.Array | None = None
    log_value_retention: jax.Array | None = None
    key_step_size: jax.Array | None = None
    value_step_size: jax.Array | None = None

    @classmethod
    def from_values(cls, forget: jax.Array, momentum: jax.Array | None, step_size: jax.Array, mask=None) -> Gates:
        """Gates from the papers' alpha, eta, theta (Titans eq 8-14), each in [0, 1] but theta, which is >= 0.

        Raises ValueError for values outside these ranges, where they are known (not under `jax.jit`).
        """
        for name, x, most in (("forget", forget, 1), ("momentum", momentum, 1), ("step_size", step_size, jnp.inf)):
            check_range(name, x, most)

        def log(x):
            return jnp.log(jnp.maximum(x, SMALLEST_RETENTION))

        return cls(log(1 - forget), None if momentum is None else log(momentum), step_size, mask)

    def scalars(self) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """(log_retention, log_momentum, step_size), the leaves that weigh tokens."""
        return self.log_retention, self.log_momentum, self.step_size

    @property
    def channel_wise(self) -> bool:
        """Whether any retention or step size differs between channels."""
        sides = (self.log_key_retention, self.log_value_retention, self.key_step_size, self.value_step_size)
        return any(x is not None for x in sides)

    @classmethod
    def per_chunk(cls, forget, momentum, step_size, chunk_size: int) -> Gates:
        """Gates constant inside a chunk (papers 1.6.8), from [chunks] or [chunks, matrices] alpha, eta, theta."""
        repeat = lambda x: None if x is None else jnp.repeat(x, chunk_size, axis=0)  # noqa: E731
        return cls.from_values(repeat(forget), repeat(momentum), repeat(step_size))


def check_range(name: str, x: jax.Array | None, most: float) -> None:
    """Refuse a gate with values below 0, above `most` or NaN, if they are known."""
    if x is None or isinstance(x, jax.core.Tracer):
        return
    wrong = ~((x >= 0) & (x <= most))
    if jnp.any(wrong):
        value = float(jnp.ravel(x)[jnp.argmax(jnp.ravel(wrong))])
        raise ValueError(f"{name} has the value {value:g}: it must be " + ("0 or more." if most > 1 else "in [0, 1]."))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Surprise:
    """What each token cost the memory at the anchor: its inner loss, and the norm of the loss's cotangent at the read.

    loss, cotangent_norm: [time] float32, 0 at padding (Titans 3.1: the gradient is the momentary surprise).
    """

    loss: jax.Array
    cotangent_norm: jax.Array


Params = dict[str, Any]
