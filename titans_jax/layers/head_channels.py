"""Heads whose channels lie side by side, [..., heads * width], and sums over each head's channels.

A TPU's registers are 128 lanes wide. Arrays [..., heads, width] of narrower heads it would move into another layout and
back, so there the sums are products with matrices that are zero outside of a head's own channels.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from titans_jax.layers.implementations import Implementation, dispatch
from titans_jax.ops.backend import current_backend
from titans_jax.ops.platform import LANES
from titans_jax.sharding import head_shards


def side_by_side(x: jax.Array) -> jax.Array:
    """[..., heads, width] -> [..., heads * width]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def sums_over_heads(x: jax.Array, heads: int) -> jax.Array:
    """The sum over each head's channels of x [..., heads * width]: [..., heads]."""
    return dispatch(SUMS, x, heads)


def spread_over_heads(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """sum_n x[..., n, h] kernel[n, h, :], numbers of heads to their channels: [..., heads * width]."""
    return dispatch(SPREADS, x, kernel)


def channels_of_heads(heads: int, width: int, dtype: DTypeLike) -> jax.Array:
    """[heads * width, heads], 1 where the channel is the head's."""
    return jnp.repeat(jnp.eye(heads, dtype=dtype), width, axis=0)


def fill_no_register(width: int) -> bool:
    """Whether heads of this width are narrower than a register of the TPU that a program is traced for."""
    # Heads on several devices would be added up across them.
    return width % LANES > 0 and head_shards() == 1 and current_backend().pallas


def sums_by_product(x: jax.Array, heads: int) -> jax.Array:
    """`sums_over_heads` as a TPU computes those of narrow heads."""
    return jnp.matmul(x, channels_of_heads(heads, x.shape[-1] // heads, x.dtype), precision="high")


def _sums_of_rows(x: jax.Array, heads: int) -> jax.Array:
    return jnp.sum(x.reshape(*x.shape[:-1], heads, -1), axis=-1)


def _spread_by_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    heads = kernel.shape[1]
    own = jnp.eye(heads, dtype=kernel.dtype)[None, :, :, None] * kernel[:, None]  # 0 in the channels of other heads
    return jnp.matmul(side_by_side(x), own.reshape(-1, heads * kernel.shape[-1]))


def _spread_head_by_head(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return side_by_side(jnp.einsum("...nh,nhd->...hd", x, kernel))


SUMS = (
    Implementation("by_product", sums_by_product, lambda x, heads: fill_no_register(x.shape[-1] // heads)),
    Implementation("of_rows", _sums_of_rows),
)
SPREADS = (
    Implementation("by_product", _spread_by_product, lambda x, kernel: fill_no_register(kernel.shape[-1])),
    Implementation("head_by_head", _spread_head_by_head),
)
