"""Persistent tokens: learned, input-independent vectors in front of a layer's sequence (Titans eq 19)."""

import jax
from flax import nnx
from jax.nn import initializers

from titans_jax.config import ModelConfig
from titans_jax.layers.projections import compute_dtype, param_dtype
from titans_jax.sharding import logical


class PersistentTokens(nnx.Module):
    """[num_persistent, dim] per layer, at first of unit variance like the normalised tokens they precede."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.dtype = compute_dtype(config)
        shape = (config.num_persistent, config.dim)
        init = logical(initializers.normal(1.0), None, "embed")
        self.tokens = nnx.Param(init(rngs.params(), shape, param_dtype(config))) if config.num_persistent else None

    def __call__(self) -> jax.Array | None:
        """The tokens, or None where there are none."""
        return None if self.tokens is None else self.tokens[...].astype(self.dtype)
