"""SwiGLU feed-forward layer."""

import jax
from flax import nnx

from titans_jax.config import ModelConfig
from titans_jax.layers.projections import projection

HIDDEN_MULTIPLE = 64
"""The default hidden width is a multiple of this, which matrix units and shards divide."""


def hidden_width(config: ModelConfig) -> int:
    """`config.hidden_dim`, or 8/3 dim rounded up to a multiple of 64 (SwiGLU with the parameters of a 4 dim MLP)."""
    return config.hidden_dim or -(-8 * config.dim // (3 * HIDDEN_MULTIPLE)) * HIDDEN_MULTIPLE


class FeedForward(nnx.Module):
    """(silu(x W_gate) * (x W_up)) W_down, [..., dim] -> [..., dim] (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        hidden = hidden_width(config)
        self.gate = projection(config, config.dim, hidden, ("embed", "mlp"), rngs=rngs)
        self.up = projection(config, config.dim, hidden, ("embed", "mlp"), rngs=rngs)
        self.down = projection(config, hidden, config.dim, ("mlp", "embed"), writes_residual=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., dim] -> [..., dim]."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
