"""Learned inputs of a layer that do not depend on its sequence: persistent tokens in front of it (Titans eq 19), and
queries of its memory."""

import jax
from flax import nnx
from jax.nn import initializers

from titans_jax.config import ModelConfig
from titans_jax.layers.norms import l2_normalize
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


class LongTermQueries(nnx.Module):
    """[mac_long_term, num_heads, head_dim] queries per layer, each of unit norm like a token's, at first random."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.dtype = compute_dtype(config)
        self.shape = (config.mac_long_term, config.num_heads, config.head_dim)
        init = logical(initializers.normal(1.0), None, "heads", None)
        self.queries = nnx.Param(init(rngs.params(), self.shape, param_dtype(config)))

    def __call__(self) -> jax.Array:
        """The queries."""
        return l2_normalize(self.queries[...]).astype(self.dtype)
