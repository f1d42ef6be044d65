"""How MAC and MAG join attention and memory (Titans eq 25 and 28)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from titans_jax.config import ModelConfig
from titans_jax.layers.norms import RMSNorm
from titans_jax.layers.projections import param_dtype, projection
from titans_jax.sharding import logical


class GatedMerge(nnx.Module):
    """gate + 2 content * sigmoid(gate), all [..., dim], each side of the product times a learned vector.

    What attention says (content) is gated by what the memory says, and the memory keeps a residual connection of its
    own: at first the sum of the two, nearly. The papers say that all blocks have residual connections and draw none;
    they name neither the nonlinearity, nor which branch it is for, nor what "normalised with learnable vectors" is.

    With `merge` "product" (norm_a(content) * sigmoid(norm_b(gate))) W_o, the norms being RMSNorms with learned gains.
    The memory then only damps attention, the norms multiply the gradients of two branches that start small, and models
    make less of their memory (memory/what_was_tried.md).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.residual = config.merge == "residual"
        if self.residual:
            ones = logical(initializers.ones, None)
            self.content_scale, self.gate_scale = (
                nnx.Param(ones(rngs.params(), (config.dim,), param_dtype(config))) for _ in range(2)
            )
            return
        self.content_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.gate_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.output = projection(config, config.dim, config.dim, ("embed", None), writes_residual=True, rngs=rngs)

    def __call__(self, content: jax.Array, gate: jax.Array) -> jax.Array:
        """Merge two arrays [..., dim]."""
        if not self.residual:
            return self.output(self.content_norm(content) * jax.nn.sigmoid(self.gate_norm(gate)))
        return gate + 2 * _scaled(content, self.content_scale) * jax.nn.sigmoid(_scaled(gate, self.gate_scale))


def _scaled(x: jax.Array, scale: nnx.Param) -> jax.Array:
    """x [..., dim] times a vector [dim], in x's dtype."""
    return x * jnp.expand_dims(scale[...].astype(x.dtype), range(x.ndim - 1))
