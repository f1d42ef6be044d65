"""What Mamba-3 makes of a token's queries, keys and values (arXiv 2603.15569, SISO).

    step_t = softplus(.) ,  a_t = exp(-step_t max(softplus(.), 1e-4)) ,  l_t = sigmoid(.)      a number of the head each
    q_t = R(phase_t) (norm(q) + bias_q) ,  k_t = R(phase_t) (norm(k) + bias_k)                 biases start at 1
    phase_t = phase_{t-1} + step_t pi tanh(.)                            of every pair of channels in a key's first half
    W_t = a_t W_{t-1} + (1 - l_t) step_t a_t k_{t-1}^T v_{t-1} + l_t step_t k_t^T v_t          the trapezoid rule
    y_t = q_t W_t + D v_t

R turns adjacent channels by their phase; D is a number of the head. The two writes are two inner steps, the first with
the key and the value of the token before: with the phases, a state of the layer. The equations are from secondary notes
and public code.

Shapes: b batch, t time, h heads, d head_dim, a angles.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from titans_jax import memory
from titans_jax.config import ModelConfig
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.memory_gates import HEAD_KERNEL, head_logits, rate_parameters
from titans_jax.layers.memory_input import of_token_before
from titans_jax.layers.norms import RMSNorm
from titans_jax.layers.projections import param_dtype
from titans_jax.memory.forms.associative import linear_scan
from titans_jax.sharding import logical

LEAST_RATE = 1e-4


class RotationTail(NamedTuple):
    """What is carried from call to call: phases [b, h, a]; the last token's key and value [b, h, d]."""

    phases: jax.Array
    key: jax.Array
    value: jax.Array


class RotatedInputs(NamedTuple):
    """What the memory is given: queries [b, t, h, d], keys and values [b, t, h, 2, d], gates [b, t, h, ...]."""

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    gates: memory.Gates


class Rotation(nnx.Module):
    """The rotated queries and keys, the two writes of every token, and their weights."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        heads, head_dim, dtype = config.num_heads, config.head_dim, param_dtype(config)
        self.angles = angles(head_dim)
        self.kernel = nnx.Param(HEAD_KERNEL(rngs.params(), (config.dim, heads, 3), dtype))
        self.bias = nnx.Param(logical(initializers.zeros, "heads", None)(rngs.params(), (heads, 3), dtype))
        _, self.step_bias = rate_parameters(heads, dtype)
        turn = logical(initializers.truncated_normal(0.1), None, None)
        self.turn = nnx.Param(turn(rngs.params(), (config.dim, self.angles), dtype))
        self.query_norm = RMSNorm(config, heads, head_dim, axes=("heads", None), rngs=rngs)
        self.key_norm = RMSNorm(config, heads, head_dim, axes=("heads", None), rngs=rngs)
        ones = logical(initializers.ones, "heads", None)
        self.query_bias = nnx.Param(ones(rngs.params(), (heads, head_dim), dtype))
        self.key_bias = nnx.Param(ones(rngs.params(), (heads, head_dim), dtype))
        self.skip = nnx.Param(logical(initializers.ones, "heads")(rngs.params(), (heads,), dtype))

    def __call__(
        self,
        x: jax.Array,
        inputs: RotatedInputs,
        tail: RotationTail,
        documents: Documents | None = None,
        initial: RotationTail | None = None,
    ) -> tuple[RotatedInputs, RotationTail]:
        """x [b, t, dim], inputs with keys and values [b, t, h, d] and the gates of a layer without a rotation.

        Args:
          documents, initial: documents start with the tail `initial`, without its batch axis.
        """
        step, rate, share = jnp.split(head_logits(self.kernel[...], self.bias[...], x), 3, axis=-1)
        step, share = jax.nn.softplus(step + self.step_bias[...][None, None, :, None]), jax.nn.sigmoid(share)
        log_retention = -step * jnp.maximum(jax.nn.softplus(rate), LEAST_RATE)
        weights = jnp.concatenate([(1 - share) * step * jnp.exp(log_retention), share * step], axis=-1)

        turns = jnp.einsum("btd,da->bta", x.astype(step.dtype) * x.shape[-1] ** -0.5, self.turn[...])
        added = step * (math.pi * jnp.tanh(turns))[:, :, None]
        starts = None if documents is None else documents.starts[..., None, None]
        kept = jnp.ones_like(step)
        if starts is not None:
            added = jnp.where(starts, added + initial.phases[None, None], added)
            kept = jnp.where(starts, 0, kept)
        phases = linear_scan(*(jnp.moveaxis(leaf, 1, 0) for leaf in (kept, added)), tail.phases)
        phases = jnp.moveaxis(phases, 0, 1)

        queries = self.rotated(self.query_norm(inputs.queries), self.query_bias, phases)
        keys, values = self.rotated(self.key_norm(inputs.keys), self.key_bias, phases), inputs.values

        def with_last(now: jax.Array, before: jax.Array, first: jax.Array | None) -> jax.Array:
            """Every token's own behind that of the token before, [b, t, h, 2, d]."""
            return jnp.stack([of_token_before(now, before, documents, first)[0], now], axis=3)

        first = RotationTail(None, None, None) if initial is None else initial
        log_retention = inputs.gates.log_retention + log_retention
        gates = dataclasses.replace(
            inputs.gates, log_retention=log_retention, step_size=inputs.gates.step_size * weights
        )
        both = with_last(keys, tail.key, first.key), with_last(values, tail.value, first.value)
        return RotatedInputs(queries, *both, gates), RotationTail(phases[:, -1] % math.tau, keys[:, -1], values[:, -1])

    def rotated(self, x: jax.Array, bias: nnx.Param, phases: jax.Array) -> jax.Array:
        """x [b, t, h, d] with its bias, its first 2 a channels turned by phases [b, t, h, a]."""
        wide = x.astype(phases.dtype) + bias[...][None, None]
        turned, rest = jnp.split(wide, [2 * self.angles], axis=-1)
        even, odd = turned[..., 0::2], turned[..., 1::2]
        cos, sin = jnp.cos(phases), jnp.sin(phases)
        turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(turned.shape)
        return jnp.concatenate([turned, rest], axis=-1).astype(x.dtype)

    def start(self, dtype: jnp.dtype) -> RotationTail:
        """The tail before any token, without the batch axis; keys and values of `dtype`."""
        heads, head_dim = self.key_bias.shape
        row = jnp.zeros((heads, head_dim), dtype)
        return RotationTail(jnp.zeros((heads, self.angles), self.kernel.dtype), row, row)


def angles(head_dim: int) -> int:
    """Pairs of channels in the first half of a key."""
    return head_dim // 2 // 2
