"""What the gate of a memory's output sees of the memory's last predictions.

Where keys are tied (`tie_keys`), a token's key is the query of the token before. So the read of the token before,
r_{t-1}, is the memory's answer to this token's key: its prediction of this token's value v_t. How near the two are says
whether the memory knows the text that it is reading, and whether its next read can be trusted:

    hit_t = cos(r_{t-1}, v_t)                                     a number per head, from -1 to 1
    y_t = (rms_norm(r_t) * silu(x_t W_g + sum_lag hit_{t-lag} U_lag)) W_o        lag = 0 .. 3, U_lag of the head

(derived; the papers' gates see x alone. memory/what_was_tried.md has what it is worth.)

Shapes: b batch, t time, h heads, d head_dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from titans_jax.config import ModelConfig
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.head_channels import side_by_side, spread_over_heads, sums_over_heads
from titans_jax.layers.memory_input import of_token_before
from titans_jax.layers.projections import compute_dtype, param_dtype
from titans_jax.ops.matmul import wide_dtype
from titans_jax.sharding import logical

LAGS = 4
"""Latest predictions that the gate sees, as many as a short convolution has taps: with one, small LMMs read bytes at
1.815 bits in place of 1.801."""
EPSILON = 1e-6
"""Added to squared norms, so that a read or a value of zeros has the cosine 0 and a finite gradient."""


class PredictionTail(NamedTuple):
    """What is carried from call to call: the last token's read [b, h, d], and for each lag but the last the hit that
    this lag had at the last token, [b, h]."""

    read: jax.Array
    hits: tuple[jax.Array, ...]


class Reads(NamedTuple):
    """What the memories of all heads read, [b, t, (r,) h, d], with the skip of `value_skip`; and how well their last
    reads predicted, [b, t, lags, h] (`PredictionGate`), None without such a gate."""

    reads: jax.Array
    hits: jax.Array | None = None


class PredictionGate(nnx.Module):
    """The kernel U [lags, h, d]; it starts at zero, where the gate sees the token alone."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.dtype = compute_dtype(config)
        shape = (LAGS, config.num_heads, config.head_dim)
        self.kernel = nnx.Param(logical(lambda: jnp.zeros(shape, param_dtype(config)), None, "heads", None)())

    def hits(
        self,
        reads: jax.Array,
        values: jax.Array,
        tail: PredictionTail,
        documents: Documents | None = None,
        first: PredictionTail | None = None,
    ) -> tuple[jax.Array, PredictionTail]:
        """The hits of every token and of those before it, [b, t, lags, h], and the next tail.

        Args:
          reads: of the memory, without `value_skip`, [b, t, h, d].
          values: as projected or normalised; their size does not matter, [b, t, h, d].
          first: the tail of a document's start, without the batch axis; with documents.
        """
        dtype, heads = tail.read.dtype, reads.shape[-2]
        # Heads side by side: see `layers/head_channels.py`.
        reads, values = side_by_side(reads.astype(dtype)), side_by_side(values.astype(dtype))
        before = None if first is None else side_by_side(first.read)
        predictions, read = of_token_before(reads, side_by_side(tail.read), documents, before)
        lags, last = [cosines(predictions, values, heads)], []
        for lag in range(LAGS - 1):
            earlier, hit = of_token_before(lags[-1], tail.hits[lag], documents, first and first.hits[lag])
            lags.append(earlier)
            last.append(hit)
        return jnp.stack(lags, axis=-2), PredictionTail(read.reshape(tail.read.shape), tuple(last))

    def __call__(self, hits: jax.Array) -> jax.Array:
        """What is added to the gate's logits, [b, t, h d]."""
        return spread_over_heads(hits.astype(self.dtype), self.kernel[...].astype(self.dtype))

    def start(self) -> PredictionTail:
        """The tail before the first token, without the batch axis."""
        _, *shape = self.kernel.shape
        read = jnp.zeros(shape, wide_dtype(self.dtype))
        return PredictionTail(read, (read[:, 0],) * (LAGS - 1))


def cosines(x: jax.Array, y: jax.Array, heads: int) -> jax.Array:
    """The cosine between each head's channels of x and y [..., h d], 0 where one of them is 0: [..., h]."""
    squares = [sums_over_heads(jnp.square(rows), heads) + EPSILON for rows in (x, y)]
    return sums_over_heads(x * y, heads) * jax.lax.rsqrt(squares[0] * squares[1])
