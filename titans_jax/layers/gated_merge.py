"""How MAC and MAG join attention and memory (Titans eq 25 and 28)."""

import jax
from flax import nnx
from jax.nn import initializers

from titans_jax.config import ModelConfig
from titans_jax.layers.norms import RMSNorm
from titans_jax.layers.projections import param_dtype, projection
from titans_jax.sharding import logical


class GatedMerge(nnx.Module):
    """gate + 2 a content * sigmoid(b gate), all [b, t, dim], a and b learned vectors from 1.

    The memory's output (gate) gates attention's (content), and is itself added, a residual connection: at first this is
    nearly the sum of the two. The papers say that all blocks have residual connections but draw none; they name neither
    the nonlinearity, nor the branch that it acts on, nor what "normalised with learnable vectors" means.

    `merge` "product" is (norm_a(content) * sigmoid(norm_b(gate))) W_o, the norms being RMSNorms with learned gains.
    Small models then predict text worse by a sixth of a bit per byte, because of the norms: they multiply the gradients
    of two branches that start small (memory/what_was_tried.md).
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
        """Merge two arrays [b, t, dim]."""
        if not self.residual:
            return self.output(self.content_norm(content) * jax.nn.sigmoid(self.gate_norm(gate)))
        a, b = (scale[...].astype(gate.dtype)[None, None] for scale in (self.content_scale, self.gate_scale))
        return gate + 2 * a * content * jax.nn.sigmoid(b * gate)
