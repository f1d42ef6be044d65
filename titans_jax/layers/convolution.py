"""Causal depthwise convolution with an explicit history, and the features of a memory's inputs that come after it."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jax.typing import DTypeLike

from titans_jax.config import ModelConfig
from titans_jax.layers import convolution_pallas
from titans_jax.layers.convolution_pallas import FeatureOptions
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.implementations import Implementation, dispatch
from titans_jax.layers.norms import l2_normalize
from titans_jax.layers.projections import compute_dtype, param_dtype
from titans_jax.sharding import logical


class CausalConvolution(nnx.Module):
    """y_t = sum_lag kernel[lag] * x_{t - lag}, one kernel of `config.conv_size` taps per channel (Titans section 4.4).

    The rows before the first one come in as `tail`, [batch, conv_size - 1, channels], oldest first, and the last rows
    go out as the next tail, so any split of a sequence gives the same numbers. With a bias, a learned number of every
    channel is added. With identity, y starts as x.
    """

    def __init__(
        self, config: ModelConfig, channels: int, *, bias: bool = False, identity: bool = False, rngs: nnx.Rngs
    ):
        self.size, self.dtype = config.conv_size, compute_dtype(config)
        init = logical(newest_tap if identity else initializers.normal(self.size**-0.5), None, "heads")
        self.kernel = nnx.Param(init(rngs.params(), (self.size, channels), param_dtype(config)))
        zeros = logical(lambda: jnp.zeros(channels, param_dtype(config)), "heads")
        self.bias = nnx.Param(zeros()) if bias else None

    def __call__(
        self, x: jax.Array, tail: jax.Array, documents: Documents | None = None, initial_tail: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Convolve [batch, time, channels]; also returns the next tail.

        Documents, when given, start with `initial_tail` [conv_size - 1, channels] as their history.
        """
        options = FeatureOptions(activation=False, unit_norm=None, dtype=self.dtype)
        return features_xla(options, x, tail, self.kernel[...], documents, initial_tail, self._bias())

    def features(
        self,
        x: jax.Array,
        tail: jax.Array,
        documents: Documents | None = None,
        initial_tail: jax.Array | None = None,
        *,
        activation: bool,
        unit_norm: int | None,
        length: float = 1.0,
    ) -> tuple[jax.Array, jax.Array]:
        """Convolve x, add the bias, apply SiLU if `activation`, and bring parts of `unit_norm` channels to the norm
        `length`.

        Arguments and results are otherwise those of a call.
        """
        options = FeatureOptions(activation, unit_norm, self.dtype, length)
        return dispatch(FEATURES, options, x, tail, self.kernel[...], documents, initial_tail, self._bias())

    def _bias(self) -> jax.Array | None:
        return None if self.bias is None else self.bias[...]


def newest_tap(key: jax.Array, shape: tuple[int, int], dtype: DTypeLike) -> jax.Array:
    """A kernel [conv_size, channels] with which y is x; an initializer of jax.nn, whose key it does not need."""
    return jnp.zeros(shape, dtype).at[0].set(1)


def convolve(
    x: jax.Array, tail: jax.Array, kernel: jax.Array, documents: Documents | None, initial_tail: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The sum of `CausalConvolution`, x [batch, time, channels] with the kernel [conv_size, channels], newest tap
    first."""
    time, size = x.shape[1], len(kernel)
    rows = jnp.concatenate([tail, x], axis=1)
    y = jnp.zeros_like(x)
    for lag in range(size):
        past = rows[:, size - 1 - lag : size - 1 - lag + time]
        if documents is not None:
            past = jnp.where((documents.positions >= lag)[..., None], past, 0)
        y = y + kernel[lag][None, None] * past
    if documents is not None:
        is_position = jax.nn.one_hot(documents.positions, size - 1, dtype=kernel.dtype)
        y = y + is_position @ history_of_documents(kernel, initial_tail)
    return y, rows[:, time:]


def history_of_documents(kernel: jax.Array, initial_tail: jax.Array) -> jax.Array:
    """What the initial tail adds to a document's first conv_size - 1 tokens, [conv_size - 1, channels]."""
    history = len(kernel) - 1
    padded = jnp.pad(initial_tail, ((0, history), (0, 0)))
    table = jnp.zeros_like(initial_tail)
    for lag in range(1, len(kernel)):
        table = table + kernel[lag : lag + 1] * padded[history - lag : 2 * history - lag]
    return table


def features_xla(
    options: FeatureOptions,
    x: jax.Array,
    tail: jax.Array,
    kernel: jax.Array,
    documents: Documents | None = None,
    initial_tail: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The features [batch, time, channels] of x and the next tail in plain JAX, in `options.dtype`."""
    y, tail = convolve(x, tail, kernel.astype(options.dtype), documents, initial_tail)
    y = y if bias is None else y + bias.astype(options.dtype)[None, None]
    y = jax.nn.silu(y) if options.activation else y
    if options.unit_norm is not None:
        y = options.length * l2_normalize(y.reshape(*y.shape[:2], -1, options.unit_norm)).reshape(y.shape)
    return y, tail


def features_pallas(
    options: FeatureOptions,
    x: jax.Array,
    tail: jax.Array,
    kernel: jax.Array,
    documents: Documents | None = None,
    initial_tail: jax.Array | None = None,
    bias: None = None,
) -> tuple[jax.Array, jax.Array]:
    """`features_xla` as one TPU kernel, computed in float32; it adds no bias."""
    if documents is None:
        positions = jnp.full(x.shape[:2], len(kernel), jnp.int32)  # all history is in the tail
        history = jnp.zeros_like(tail[0])
    else:
        positions = documents.positions
        history = history_of_documents(kernel.astype(options.dtype), initial_tail)
    y = convolution_pallas.features(options, x, tail, positions, convolution_pallas.Taps(kernel, history))
    return y, x[:, x.shape[1] - tail.shape[1] :]


def _kernel_supports(
    options: FeatureOptions,
    x: jax.Array,
    tail: jax.Array,
    kernel: jax.Array,
    documents: Documents | None = None,
    initial_tail: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> bool:
    return bias is None and convolution_pallas.supports(options, *x.shape[1:], conv_size=len(kernel))


FEATURES = (Implementation("pallas", features_pallas, _kernel_supports), Implementation("xla", features_xla))
