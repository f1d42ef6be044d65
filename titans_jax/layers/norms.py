"""RMSNorm with a learned gain of any trailing shape, and the L2 norm of queries and keys."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from titans_jax.config import ModelConfig
from titans_jax.layers.projections import param_dtype, wide_dtype
from titans_jax.ops.backend import LANES, target_platform
from titans_jax.sharding import head_shards, logical

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
        return normalize(x, scale.dtype, x.shape[-1], self.epsilon, scale)


def l2_normalize(x: jax.Array) -> jax.Array:
    """x / ||x|| over the last axis, in float32 or wider; a zero vector stays zero, with a finite gradient."""
    return normalize(x, wide_dtype(x.dtype), 1, L2_EPSILON)


def normalize(x: jax.Array, dtype, count: int, epsilon: float, scale: jax.Array | None = None) -> jax.Array:
    """scale * x / sqrt(sum of squares over the last axis / count + epsilon), computed in dtype; scale [.., width]."""
    heads_divided = head_shards() > 1
    narrow = x.ndim > 2 and x.shape[-1] % LANES > 0 and (scale is None or scale.ndim == 2)
    inverse_root = by_sums
    shape = x.shape
    if narrow and not heads_divided and target_platform() == "tpu":
        inverse_root = functools.partial(by_products, shape[-2])
        x, scale = side_by_side(x), None if scale is None else side_by_side(scale)
    wide = x.astype(dtype)
    wide = wide * inverse_root(jnp.square(wide), count, epsilon)
    if scale is not None:
        wide = wide * jnp.expand_dims(scale, tuple(range(wide.ndim - scale.ndim)))
    return wide.astype(x.dtype).reshape(shape)


def side_by_side(x: jax.Array) -> jax.Array:
    """[..., heads, width] -> [..., heads * width]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def by_sums(squares: jax.Array, count: int, epsilon: float) -> jax.Array:
    """1 / sqrt(sum over the last axis / count + epsilon), [..., 1]."""
    return jax.lax.rsqrt(jnp.sum(squares, axis=-1, keepdims=True) / count + epsilon)


def by_products(heads: int, squares: jax.Array, count: int, epsilon: float) -> jax.Array:
    """`by_sums` of heads side by side, [..., heads * width], as products with 0/1 matrices: a TPU would move heads that
    fill no register into another layout and back. Heads on several devices it would add up across them."""
    of_head = jnp.repeat(jnp.eye(heads, dtype=squares.dtype), squares.shape[-1] // heads, axis=0)
    total = jnp.matmul(squares, of_head, precision="high")
    return jnp.matmul(jax.lax.rsqrt(total / count + epsilon), of_head.T, precision="high")
