"""Causal depthwise convolution with an explicit history, and what a memory's inputs have behind it."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from titans_jax.config import ModelConfig
from titans_jax.layers import convolution_pallas
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.norms import l2_normalize
from titans_jax.layers.projections import compute_dtype, param_dtype
from titans_jax.sharding import logical


class CausalConvolution(nnx.Module):
    """y_t = sum_lag kernel[lag] * x_{t - lag}, one kernel of `config.conv_size` taps per channel (papers.md 1.5).

    The rows before the first one come in as `tail`, [batch, conv_size - 1, channels], oldest first, and the last rows
    go out as the next tail, so any split of a sequence gives the same numbers.
    """

    def __init__(self, config: ModelConfig, channels: int, *, rngs: nnx.Rngs):
        self.size, self.dtype = config.conv_size, compute_dtype(config)
        init = logical(initializers.normal(self.size**-0.5), None, "heads")
        self.kernel = nnx.Param(init(rngs.params(), (self.size, channels), param_dtype(config)))

    def __call__(
        self, x: jax.Array, tail: jax.Array, documents: Documents | None = None, initial_tail: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Convolve [batch, time, channels]; also returns the next tail.

        Documents, when given, begin with `initial_tail` [conv_size - 1, channels] as their history.
        """
        time = x.shape[1]
        kernel = self.kernel[...].astype(self.dtype)[:, None, None]
        rows = jnp.concatenate([tail, x], axis=1)
        y = jnp.zeros_like(x)
        for lag in range(self.size):
            begin = self.size - 1 - lag
            past = rows[:, begin : begin + time]
            if documents is not None:
                past = jnp.where((documents.positions >= lag)[..., None], past, 0)
            y = y + kernel[lag] * past
        if documents is not None:
            at_first = jax.nn.one_hot(documents.positions, self.size - 1, dtype=self.dtype)
            y = y + at_first @ self._history(initial_tail)
        return y, rows[:, time:]

    def features(
        self,
        x: jax.Array,
        tail: jax.Array,
        documents: Documents | None = None,
        initial_tail: jax.Array | None = None,
        *,
        activation: bool,
        unit_norm: int | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Convolve x, apply SiLU if `activation`, and bring parts of `unit_norm` channels to unit norm; else as a call.

        On TPUs this is one kernel where the shapes allow (`convolution_pallas`), which computes in float32.
        """
        batch, time, channels = x.shape
        if convolution_pallas.runs(time, channels, self.size, unit_norm):
            if documents is None:
                positions = jnp.full((batch, time), self.size, jnp.int32)  # all history is in the tail
                history = jnp.zeros_like(tail[0])
            else:
                positions, history = documents.positions, self._history(initial_tail)
            options = convolution_pallas.Features(activation, unit_norm)
            y = convolution_pallas.features(options, x, tail, positions, self.kernel[...], history)
            return y, x[:, time - tail.shape[1] :]
        y, tail = self(x, tail, documents, initial_tail)
        y = jax.nn.silu(y) if activation else y
        if unit_norm is not None:
            y = l2_normalize(y.reshape(batch, time, -1, unit_norm)).reshape(y.shape)
        return y, tail

    def _history(self, initial_tail: jax.Array) -> jax.Array:
        """What the initial tail adds to a document's first conv_size - 1 tokens, [conv_size - 1, channels]."""
        kernel, history = self.kernel[...].astype(self.dtype), self.size - 1
        padded = jnp.pad(initial_tail, ((0, history), (0, 0)))
        table = jnp.zeros_like(initial_tail)
        for lag in range(1, self.size):
            table = table + kernel[lag : lag + 1] * padded[history - lag : 2 * history - lag]
        return table
