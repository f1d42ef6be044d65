"""RMSNorm with a learned gain of any trailing shape, and the L2 norm of queries and keys."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from titans_jax.config import ModelConfig
from titans_jax.layers.linear import param_dtype, wide_dtype
from titans_jax.sharding import logical

L2_EPSILON = 1e-6


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, computed in float32, returned in x's dtype.

    Args:
      shape: shape of the gain; its last entry is the normalised width. (heads, head_dim) gives each head its own.
      axes: logical sharding axes of the gain, default replicated.
    """

    def __init__(self, config: ModelConfig, *shape: int, axes: tuple[str | None, ...] | None = None, rngs: nnx.Rngs):
        init = logical(initializers.ones, *(axes or (None,) * len(shape)))
        self.scale = nnx.Param(init(rngs.params(), shape, param_dtype(config)))
        self.epsilon = config.norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...]
        wide = x.astype(scale.dtype)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        scale = jnp.expand_dims(scale, tuple(range(x.ndim - scale.ndim)))
        return (wide * inverse * scale).astype(x.dtype)


def l2_normalize(x: jax.Array) -> jax.Array:
    """x / ||x|| over the last axis, in float32 or wider; a zero vector stays zero, with a finite gradient."""
    wide = x.astype(wide_dtype(x.dtype))
    return (wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + L2_EPSILON)).astype(x.dtype)
