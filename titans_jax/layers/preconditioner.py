"""A diagonal preconditioner of what a memory writes, from the keys it has met (arXiv 2604.21100).

    A_t = exp(g_t) A_{t-1} + b_t k_t^2            a decayed sum of squares, of every key channel; A_0 = 0
    r_t = log(A_t + 1e-6) - c ,   s_t = r_t / (1 + |r_t|)
    written key: k_t * 1.5^(-s_t)                 less where keys were often large; the factor is in (2/3, 3/2)

g is Mamba2's gate of the head, b a sigmoid, c a learned number of the head; the equations are from secondary notes and
public code. The error is taken with the key itself, so that the factor acts as a step size per channel,
`Gates.key_step_size`; A is one more part of the layer's state.

Shapes: b batch, t time, h heads, d head_dim.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from titans_jax.config import ModelConfig
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.memory_gates import HEAD_KERNEL, head_logits, rate_parameters
from titans_jax.layers.projections import param_dtype
from titans_jax.memory.forms.associative import linear_scan
from titans_jax.sharding import logical

LARGEST = 1.5
"""The largest factor of a written key's channel, and 1 over the smallest."""
EPSILON = 1e-6
FIRST_CENTER = -0.2
"""What c starts at."""


class Preconditioner(nnx.Module):
    """Factors of the written keys' channels, and the sums of squares that they are made of."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        heads, dtype = config.num_heads, param_dtype(config)
        self.kernel = nnx.Param(HEAD_KERNEL(rngs.params(), (config.dim, heads, 2), dtype))
        self.bias = nnx.Param(logical(initializers.zeros, "heads", None)(rngs.params(), (heads, 2), dtype))
        self.log_rate, self.step_bias = rate_parameters(heads, dtype)
        center = logical(initializers.constant(FIRST_CENTER), "heads")
        self.center = nnx.Param(center(rngs.params(), (heads,), dtype))

    def __call__(
        self,
        x: jax.Array,
        keys: jax.Array,
        squares: jax.Array,
        mask: jax.Array | None = None,
        documents: Documents | None = None,
        initial: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """x [b, t, dim], keys [b, t, h, d] -> factors [b, t, h, d] and the sums after the last token.

        Args:
          squares: the sums before x, [b, h, d].
          mask: bool [b, t], False at padding, which changes nothing.
          documents, initial: documents start with the sums `initial` [h, d].
        """
        rate, weight = jnp.split(head_logits(self.kernel[...], self.bias[...], x), 2, axis=-1)
        steps = jax.nn.softplus(rate + self.step_bias[...][None, None, :, None])
        kept = jnp.exp(-jnp.exp(self.log_rate[...])[None, None, :, None] * steps)
        added = jax.nn.sigmoid(weight) * jnp.square(keys.astype(kept.dtype))
        if mask is not None:
            is_token = mask[..., None, None]
            kept, added = jnp.where(is_token, kept, 1), jnp.where(is_token, added, 0)
        if documents is not None:
            starts = documents.starts[..., None, None]
            added = jnp.where(starts, kept * initial[None, None] + added, added)
            kept = jnp.where(starts, 0, kept)
        sums = linear_scan(*(jnp.moveaxis(leaf, 1, 0) for leaf in (kept, added)), squares)
        return self.factors(jnp.moveaxis(sums, 0, 1)), sums[-1]

    def factors(self, sums: jax.Array) -> jax.Array:
        """1.5^(-s) of sums [b, t, h, d]."""
        ratio = jnp.log(sums + EPSILON) - self.center[...][None, None, :, None]
        return jnp.exp(-math.log(LARGEST) * ratio / (1 + jnp.abs(ratio)))
