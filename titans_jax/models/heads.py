"""Heads for other tasks than next tokens: classes of sequences, tokens from one vector, values of time series."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.nn import initializers

from titans_jax.config import ConfigError, ModelConfig
from titans_jax.layers.norms import RMSNorm
from titans_jax.layers.projections import param_dtype, projection
from titans_jax.models.loss import cross_entropy_sum
from titans_jax.models.stack import BlockStack, TokenStack, register_head

INSTANCE_EPSILON = 1e-5
"""Added to a window's variance, as in iTransformer."""


@register_head()
class Classifier(TokenStack):
    """Tokens in, logits of a row's class out: the mean over positions of what the blocks return, and a projection.

    The mean leaves padding out, unlike HyenaDNA's, which is over all positions; for rows of one length, as in the data
    sets of GUE, both are the same. classes: their number.
    """

    def __init__(self, config: ModelConfig, classes: int = 2, *, rngs: nnx.Rngs):
        at_least_one("classes", classes)
        super().__init__(config, rngs=rngs)
        self.head = projection(config, config.dim, classes, ("embed", None), rngs=rngs)

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """Logits [batch, classes], float32.

        Args:
          tokens: int32 [batch, time]; padding is read as a token like any other, before the others so that these come
            last (HyenaDNA).
          segment_ids: int32 [batch, time], 0 at padding, which the mean leaves out; None is no padding.
        """
        x = self._read(self._embed(tokens)).astype(param_dtype(self.config))
        mean = jnp.mean(x, axis=1) if segment_ids is None else jnp.mean(x, axis=1, where=(segment_ids > 0)[..., None])
        return self.head(mean).astype(x.dtype)

    def loss_sum(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Summed cross entropy in nats, and rows. targets: int32 [rows], -1 at a row that is padding."""
        return cross_entropy_sum(self(batch["tokens"], batch["segment_ids"]), batch["targets"])


@register_head()
class Autoencoder(TokenStack):
    """Tokens in, the same tokens out, from the last position alone: the blocks' output there plus each position's
    sinusoids goes through two hidden layers (MAD's compression, arXiv 2403.17844).

        x = gelu(rms_norm(x) W_1),  x = gelu(rms_norm(x) W_2),  logits = rms_norm(x) W_3

    There are no biases here, and the norm behind the blocks comes before the sinusoids.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        dim, axes = config.dim, (("embed", "mlp"), ("mlp", "embed"))
        self.hidden = nnx.List([projection(config, dim, dim, each, rngs=rngs) for each in axes])
        self.norms = nnx.List([RMSNorm(config, dim, rngs=rngs) for _ in range(3)])
        self.head = projection(config, dim, config.vocab_size, ("embed", "vocab"), rngs=rngs)

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """Logits of every token, float32 [batch, time, vocab_size]; tokens int32 [batch, time]."""
        code = self._read(self._embed(tokens))[:, -1:]
        x = code + jnp.asarray(sinusoids(tokens.shape[1], self.config.dim), code.dtype)[None]
        *norms, last = self.norms
        for norm, layer in zip(norms, self.hidden, strict=True):
            x = jax.nn.gelu(layer(norm(x)))
        return self.head(last(x)).astype(param_dtype(self.config))

    def loss_sum(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Summed cross entropy in nats, and targets that are 0 or more."""
        return cross_entropy_sum(self(batch["tokens"], batch["segment_ids"]), batch["targets"])


@register_head()
class Forecaster(BlockStack):
    """Windows of several series in, their next values out, each channel a sequence of its own (PatchTST's form).

    A channel's window is normalised to mean 0 and variance 1, cut into overlapping patches that are the blocks' tokens,
    and the blocks' outputs for all patches together are projected to the horizon; the normalisation is undone on the
    output.

    look_back, horizon: time steps in and out. patch, stride: time steps of a patch, and between two of them; the last
    value is repeated for another stride behind the end. normalize: the instance norm.
    """

    def __init__(
        self,
        config: ModelConfig,
        look_back: int = 96,
        horizon: int = 96,
        patch: int = 16,
        stride: int = 8,
        normalize: bool = True,
        *,
        rngs: nnx.Rngs,
    ):
        for name, value in (("look_back", look_back), ("horizon", horizon), ("patch", patch), ("stride", stride)):
            at_least_one(name, value)
        if patch > look_back + stride:
            raise ConfigError(f"model.head has patch {patch}; use at most {look_back + stride}, look_back and a stride")
        self.look_back, self.normalize, self.patch, self.stride = look_back, normalize, patch, stride
        patches = num_patches(look_back, patch, stride)
        self.embedding = projection(config, patch, config.dim, (None, "embed"), rngs=rngs)
        super().__init__(config, rngs=rngs)
        self.head = projection(config, patches * config.dim, horizon, ("embed", None), rngs=rngs)

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """Values float [batch, look_back, channels] -> [batch, horizon, channels], in param_dtype."""
        values = jnp.swapaxes(tokens, 1, 2)
        batch, channels, _ = values.shape
        mean, scale = jnp.zeros((batch, channels, 1), values.dtype), jnp.ones((batch, channels, 1), values.dtype)
        if self.normalize:
            mean = jnp.mean(values, axis=-1, keepdims=True)
            scale = jnp.sqrt(jnp.var(values, axis=-1, keepdims=True) + INSTANCE_EPSILON)
        values = ((values - mean) / scale).reshape(batch * channels, -1)
        values = jnp.pad(values, ((0, 0), (0, self.stride)), mode="edge")
        starts = self.stride * np.arange(num_patches(self.look_back, self.patch, self.stride))
        patches = values[:, starts[:, None] + np.arange(self.patch)]
        x = self._read(self.embedding(patches))
        ahead = self.head(x.reshape(batch, channels, -1)).astype(mean.dtype) * scale + mean
        return jnp.swapaxes(ahead, 1, 2)

    def loss_sum(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Summed squared error, and values. targets: float [rows, horizon, channels]."""
        return squared_error_sum(self(batch["tokens"]), batch["targets"])


@register_head("dlinear")
class DLinear(nnx.Module):
    """The linear forecast of arXiv 2205.13504, a baseline without blocks: a window's moving average over 25 steps and
    what is left of it, each through one matrix that all channels share.

    look_back, horizon: time steps in and out.
    """

    kernel = 25

    def __init__(self, config: ModelConfig, look_back: int = 96, horizon: int = 96, *, rngs: nnx.Rngs):
        at_least_one("look_back", look_back)
        at_least_one("horizon", horizon)
        shape = {"param_dtype": param_dtype(config), "kernel_init": initializers.constant(1 / look_back), "rngs": rngs}
        self.trend, self.rest = (nnx.Linear(look_back, horizon, **shape) for _ in range(2))

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """Values float [batch, look_back, channels] -> [batch, horizon, channels]."""
        values, half = jnp.swapaxes(tokens, 1, 2), self.kernel // 2
        sums = jnp.cumsum(jnp.pad(values, ((0, 0), (0, 0), (half, half)), mode="edge"), axis=-1)
        sums = jnp.pad(sums, ((0, 0), (0, 0), (1, 0)))
        trend = (sums[..., self.kernel :] - sums[..., : -self.kernel]) / self.kernel
        return jnp.swapaxes(self.trend(trend) + self.rest(values - trend), 1, 2)

    def init_state(self, batch_size: int, max_length: int | None = None) -> tuple:
        """Nothing is carried."""
        return ()

    def loss_sum(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """See `Forecaster`."""
        return squared_error_sum(self(batch["tokens"]), batch["targets"])


def squared_error_sum(ahead: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Summed squared error, and how many values there are."""
    return jnp.sum(optax.squared_error(ahead, targets)), jnp.asarray(ahead.size, ahead.dtype)


def num_patches(look_back: int, patch: int, stride: int) -> int:
    """Patches of a window, the last one reaching over its end."""
    return (look_back + stride - patch) // stride + 1


def sinusoids(time: int, dim: int) -> np.ndarray:
    """Sines, then cosines, of wave lengths 2 pi to 20,000 pi: float64 [time, dim] (arXiv 1706.03762, 3.5)."""
    angles = np.arange(time)[:, None] / 10000 ** (2 * np.arange(-(-dim // 2)) / dim)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[:, :dim]


def at_least_one(name: str, value: object) -> None:
    """Refuse an argument of a head that is not a whole number of at least 1.

    Raises:
      ConfigError: names it.
    """
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"model.head has {name} {value!r}; use a whole number of at least 1")
