"""The gate that joins attention and memory in MAC and MAG (Titans eq 25 and 28)."""

import jax
from flax import nnx

from titans_jax.config import ModelConfig
from titans_jax.layers.norms import RMSNorm
from titans_jax.layers.projections import projection


class GatedMerge(nnx.Module):
    """(norm_a(content) * sigmoid(norm_b(gate))) W_o, all [..., dim]; the norms are RMSNorms with learned gains.

    The papers name neither the nonlinearity nor which branch it is for (memory/README.md, Readings).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.content_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.gate_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.output = projection(config, config.dim, config.dim, ("embed", None), writes_residual=True, rngs=rngs)

    def __call__(self, content: jax.Array, gate: jax.Array) -> jax.Array:
        """Merge two arrays [..., dim]."""
        return self.output(self.content_norm(content) * jax.nn.sigmoid(self.gate_norm(gate)))
