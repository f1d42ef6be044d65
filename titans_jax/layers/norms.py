"""RMSNorm with a learned gain of any trailing shape, and the L2 norm of queries and keys."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jax.typing import DTypeLike

from titans_jax.config import ModelConfig
from titans_jax.layers.head_channels import channels_of_heads, fill_no_register, side_by_side, sums_by_product
from titans_jax.layers.implementations import Implementation, dispatch
from titans_jax.layers.projections import param_dtype
from titans_jax.ops.matmul import wide_dtype
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
        """Normalise x [..., *shape]."""
        scale = self.scale[...]
        return normalize(x, scale.dtype, x.shape[-1], self.epsilon, scale)


def l2_normalize(x: jax.Array) -> jax.Array:
    """x / ||x|| over the last axis, in float32 or wider; a zero vector stays zero, with a finite gradient."""
    return normalize(x, wide_dtype(x.dtype), 1, L2_EPSILON)


def normalize(x: jax.Array, dtype: DTypeLike, count: int, epsilon: float, scale: jax.Array | None = None) -> jax.Array:
    """scale * x / sqrt(sum of x^2 over the last axis / count + epsilon), computed in dtype, returned in x's.

    Args:
      x: [..., width].
      scale: [..., width], axes in front of it broadcast; None is 1.
    """
    return dispatch(NORMALIZE, x, dtype, count, epsilon, scale)


def normalize_rows(
    x: jax.Array, dtype: DTypeLike, count: int, epsilon: float, scale: jax.Array | None = None
) -> jax.Array:
    """`normalize` by sums over the last axis."""
    squares = jnp.square(x.astype(dtype))
    return _scaled(x, scale, jax.lax.rsqrt(jnp.sum(squares, axis=-1, keepdims=True) / count + epsilon))


def normalize_side_by_side(
    x: jax.Array, dtype: DTypeLike, count: int, epsilon: float, scale: jax.Array | None = None
) -> jax.Array:
    """`normalize` of x [..., heads, width] with the heads side by side (see `layers/head_channels.py`)."""
    heads, width = x.shape[-2:]
    flat = side_by_side(x)
    sums = sums_by_product(jnp.square(flat.astype(dtype)), heads)
    spread = channels_of_heads(heads, width, dtype).T
    inverse_norm = jnp.matmul(jax.lax.rsqrt(sums / count + epsilon), spread, precision="high")
    return _scaled(flat, None if scale is None else side_by_side(scale), inverse_norm).reshape(x.shape)


def _scaled(x: jax.Array, scale: jax.Array | None, inverse_norm: jax.Array) -> jax.Array:
    wide = x.astype(inverse_norm.dtype) * inverse_norm
    if scale is not None:
        wide = wide * jnp.expand_dims(scale, tuple(range(wide.ndim - scale.ndim)))
    return wide.astype(x.dtype)


def _heads_fill_no_register(
    x: jax.Array, dtype: DTypeLike, count: int, epsilon: float, scale: jax.Array | None = None
) -> bool:
    return x.ndim > 2 and fill_no_register(x.shape[-1]) and (scale is None or scale.ndim == 2)


NORMALIZE = (
    Implementation("side_by_side", normalize_side_by_side, _heads_fill_no_register),
    Implementation("rows", normalize_rows),
)
