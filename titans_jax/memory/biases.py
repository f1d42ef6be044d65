"""Attentional biases: the inner loss of one token (papers 3.3). Each is one function; the engine differentiates it."""

from __future__ import annotations

import abc
import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class AttentionalBias(abc.ABC):
    """The inner loss of one token.

    `cotangent_slope` is s where the loss's cotangent is s * read - value, the case in which a linear memory's gradient
    has a closed form over a whole block of tokens (design 3.2); None for every other bias.
    """

    cotangent_slope = None

    @abc.abstractmethod
    def __call__(self, read: jax.Array, value: jax.Array) -> jax.Array:
        """read, value [..., head_dim] -> losses [...]."""


@dataclasses.dataclass(frozen=True)
class L2(AttentionalBias):
    """1/2 ||read - value||^2 (Titans eq 12 with the factor of its appendix C); cotangent read - value."""

    cotangent_slope = 1.0

    def __call__(self, read, value):
        return 0.5 * jnp.sum(jnp.square(read - value), axis=-1)


@dataclasses.dataclass(frozen=True)
class DotProduct(AttentionalBias):
    """-<read, value>, the Hebbian bias of linear attention (papers 3.3); cotangent -value."""

    cotangent_slope = 0.0

    def __call__(self, read, value):
        return -jnp.sum(read * value, axis=-1)


l2, dot_product = L2, DotProduct
