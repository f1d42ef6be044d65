"""Mamba: a selective state space model as a layer (arXiv 2312.00752, section 3.4 and its public code).

    u = silu(conv(x W_u) + bias) ,  z = x W_z                                  both 2 dim wide
    [d | b | c] = u W                                                          what the scan does, made of the token
    h_t = exp(D_t A) h_{t-1} + D_t b_t u_t ,  D = softplus(d W_D + bias) ,  A = -exp(log_rate)
    y_t = c_t h_t + skip u_t ,  out = (y * silu(z)) W_o

Shapes: b batch, t time, c channels (2 dim), n entries of a channel's state.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from titans_jax.config import ModelConfig
from titans_jax.layers.convolution import CausalConvolution
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.projections import compute_dtype, param_dtype, projection
from titans_jax.ops.backend import current_backend
from titans_jax.ops.selective_scan import selective_scan
from titans_jax.sharding import BATCH, HEADS, constrain, logical

STATE = 16
"""Entries of a channel's state."""
EXPANSION = 2
"""Channels for each of the residual stream's."""
STEPS = 1e-3, 1e-1, 1e-4
"""Steps start at numbers between the first two, evenly by their logarithm, and at no less than the third."""


class MambaState(NamedTuple):
    """What the layer carries: the state of every channel [b, n, c], and the convolution's last inputs."""

    hidden: jax.Array
    tail: jax.Array


def inner_width(config: ModelConfig) -> int:
    """Channels of the layer."""
    return EXPANSION * config.dim


def step_rank(config: ModelConfig) -> int:
    """Numbers that the steps of all channels are made of: a 16th of the width, rounded up."""
    return -(-config.dim // 16)


class Mamba(nnx.Module):
    """A sequence layer whose state forgets and writes as the token says, [b, t, dim] -> [b, t, dim].

    Rates, steps, skip and the map of steps start as in the public code, the convolution's bias at 0. Other projections
    start as all do here; with that code's uniform starts, small models read bytes at 2.76 bits in place of 2.69 (four
    blocks of width 64, 180 steps, two seeds).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        channels, rank = inner_width(config), step_rank(config)
        self.channels, self.rank, self.dtype, wide = channels, rank, compute_dtype(config), param_dtype(config)
        self.input = projection(config, config.dim, channels, ("embed", "heads"), rngs=rngs)
        self.output_gate = projection(config, config.dim, channels, ("embed", "heads"), rngs=rngs)
        self.convolution = CausalConvolution(config, channels, bias=True, rngs=rngs)
        self.selection = projection(config, channels, rank + 2 * STATE, ("heads", None), rngs=rngs)
        self.step = nnx.Linear(
            rank,
            channels,
            use_bias=False,
            dtype=self.dtype,
            param_dtype=wide,
            kernel_init=logical(start_of_step_map, None, "heads"),
            rngs=rngs,
        )
        # Not the bias of the map: added in float32, since steps near 0.001 are softplus of numbers near -7.
        self.step_bias = nnx.Param(logical(start_of_steps, "heads")(rngs.params(), (channels,), wide))
        rates = jnp.log(jnp.arange(1, STATE + 1, dtype=wide))[:, None]
        self.log_rate = nnx.Param(logical(lambda: jnp.broadcast_to(rates, (STATE, channels)), None, "heads")())
        self.skip = nnx.Param(logical(lambda: jnp.ones(channels, wide), "heads")())
        self.output = projection(config, channels, config.dim, ("heads", "embed"), writes_residual=True, rngs=rngs)

    def __call__(
        self, x: jax.Array, state: MambaState | None = None, documents: Documents | None = None
    ) -> tuple[jax.Array, MambaState]:
        """Read x [b, t, dim].

        Args:
          state: of the tokens before; None is the start of a sequence.
          documents: packed documents, each of which starts with an empty state.

        Returns:
          y [b, t, dim], and the state after x. After documents it is of no use: reading cannot go on from it.
        """
        hidden, tail = self.init_state(x.shape[0]) if state is None else state
        first = None if documents is None else jnp.zeros_like(tail[0])
        u = constrain(self.input(x), BATCH, None, HEADS)
        u, tail = self.convolution.features(u, tail, documents, first, activation=True, unit_norm=None)
        u = checkpoint_name(u, "features")
        low, write, read = jnp.split(self.selection(u), [self.rank, self.rank + STATE], axis=-1)
        step = self.step(low).astype(self.step_bias.dtype) + self.step_bias[...][None, None]
        step = constrain(jax.nn.softplus(step), BATCH, None, HEADS)
        if documents is not None:
            step = jnp.where(documents.mask[..., None], step, 0)
        y, hidden = selective_scan(
            u,
            step,
            -jnp.exp(self.log_rate[...]),
            write,
            read,
            constrain(hidden, BATCH, None, HEADS),
            None if documents is None else documents.starts,
            parallel=current_backend().parallel_scan,
        )
        y = y + self.skip[...].astype(self.dtype)[None, None] * u
        return self.output(y * jax.nn.silu(self.output_gate(x))), MambaState(hidden, tail)

    def init_state(self, batch: int) -> MambaState:
        """The state before the first token, of constant size."""
        hidden = jnp.zeros((batch, STATE, self.channels), self.log_rate.dtype)
        return MambaState(hidden, jnp.zeros((batch, self.convolution.size - 1, self.channels), self.dtype))


def start_of_step_map(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Uniform numbers up to 1 / sqrt(rank) on both sides of 0, [rank, c]."""
    most = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -most, most)


def start_of_steps(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """What softplus turns into random steps (`STEPS`)."""
    low, high, floor = STEPS
    steps = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(low), math.log(high)))
    return jnp.log(jnp.expm1(jnp.maximum(steps, floor)))
