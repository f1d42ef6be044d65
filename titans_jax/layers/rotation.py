"""How Mamba-3 transforms a token's queries, keys and values (arXiv 2603.15569, SISO and MIMO).

    step_t = softplus(.) ,  a_t = exp(-step_t max(softplus(.), 1e-4)) ,  l_t = sigmoid(.)      a number of the head each
    q_t = R(phase_t) (norm(q) + bias_q) ,  k_t = R(phase_t) (norm(k) + bias_k)                 biases start at 1
    phase_t = phase_{t-1} + step_t pi tanh(.)                            of every pair of channels in a key's first half
    W_t = a_t W_{t-1} + (1 - l_t) step_t a_t k_{t-1}^T v_{t-1} + l_t step_t k_t^T v_t          the trapezoid rule
    y_t = q_t W_t + D v_t

R turns adjacent channels by their phase; D is one number per head. The two writes are two inner steps, the first with
the key and the value of the token before; these and the phases are state of the layer. The equations are from
secondary notes and public code.

MIMO of rank r: a token has r queries q_j and keys k_j, normed, biased and turned as above, and r values v_j:

    v_j,t = m_j * v_t                                                   m, g, o learned, of every head, rank and channel
    W_t = a_t W_{t-1} + sum_j (1 - l_t) step_t a_t k_j,t-1^T v_j,t-1 + l_t step_t k_j,t^T v_j,t
    y_j,t = q_j,t W_t + D v_j,t
    y_t = sum_j o_j * norm(y_j,t) * silu(g_j * z_t)                        m and o start at 1 / r, g at 1; z is the gate

The 2 r writes are inner steps, those of the token before first, and q_j reads after the j-th of the token's own writes.
What the later writes add to this read is added afterwards, which is exact, as no write depends on the memory. In the
public code the norm is optional, and all heads share keys and queries except for their biases.

Shapes: b batch, t time, h heads, d head_dim, a angles, r rank. With rank 1, queries and keys have no axis r.
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
from titans_jax.ops.matmul import matmul
from titans_jax.sharding import logical

LEAST_RATE = 1e-4
FIRST_RATE = 3.0
"""Initial logit of the rate of forgetting; 0 in the public code. From 0, the slowest head keeps what it sums for 1,400
tokens, which training rows of 512 never show, and then reads long texts worse than an emptied one; from 3, for 330."""


class RotationTail(NamedTuple):
    """What is carried from call to call: phases [b, h, a]; the last token's keys [b, h, (r,) d] and value [b, h, d]."""

    phases: jax.Array
    key: jax.Array
    value: jax.Array


class RotatedInputs(NamedTuple):
    """What the memory is given: queries [b, t, h, (2 r,) d], keys and values [b, t, h, 2 r, d], gates [b, t, h, ..]."""

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    gates: memory.Gates


class Rotation(nnx.Module):
    """The rotated queries and keys, the two writes of every token and key, and their weights."""

    def __init__(self, config: ModelConfig, rank: int, *, rngs: nnx.Rngs):
        heads, head_dim, dtype = config.num_heads, config.head_dim, param_dtype(config)
        self.angles, self.rank = angles(head_dim), rank
        self.kernel = nnx.Param(HEAD_KERNEL(rngs.params(), (config.dim, heads, 3), dtype))
        bias = jnp.broadcast_to(jnp.array([[0.0, FIRST_RATE, 0.0]], dtype), (heads, 3))
        self.bias = nnx.Param(logical(lambda: bias, "heads", None)())
        _, self.step_bias = rate_parameters(heads, dtype)
        turn = logical(initializers.truncated_normal(0.1), None, None)
        self.turn = nnx.Param(turn(rngs.params(), (config.dim, self.angles), dtype))
        each = (heads, *[rank] * (rank > 1), head_dim)
        axes = ("heads", *[None] * (len(each) - 1))
        self.query_norm = RMSNorm(config, *each, axes=axes, rngs=rngs)
        self.key_norm = RMSNorm(config, *each, axes=axes, rngs=rngs)
        ones = logical(initializers.ones, *axes)
        self.query_bias = nnx.Param(ones(rngs.params(), each, dtype))
        self.key_bias = nnx.Param(ones(rngs.params(), each, dtype))
        self.skip = nnx.Param(logical(initializers.ones, "heads")(rngs.params(), (heads,), dtype))
        if rank > 1:
            share, one = (logical(initializers.constant(x), *axes) for x in (1 / rank, 1.0))
            self.value_mix = nnx.Param(share(rngs.params(), each, dtype))
            self.gate_mix = nnx.Param(one(rngs.params(), each, dtype))
            self.read_mix = nnx.Param(share(rngs.params(), each, dtype))

    def __call__(
        self,
        x: jax.Array,
        inputs: RotatedInputs,
        tail: RotationTail,
        documents: Documents | None = None,
        initial: RotationTail | None = None,
    ) -> tuple[RotatedInputs, RotationTail]:
        """x [b, t, dim], inputs with queries and keys [b, t, h, (r,) d], values [b, t, h, d] and the gates of a layer
        without a rotation.

        Args:
          documents, initial: documents start with the tail `initial`, without its batch axis.
        """
        step, rate, share = jnp.split(head_logits(self.kernel[...], self.bias[...], x), 3, axis=-1)
        step, share = jax.nn.softplus(step + self.step_bias[...][None, None, :, None]), jax.nn.sigmoid(share)
        log_retention = -step * jnp.maximum(jax.nn.softplus(rate), LEAST_RATE)
        weights = jnp.concatenate([(1 - share) * step * jnp.exp(log_retention), share * step], axis=-1)
        weights = jnp.repeat(weights, self.rank, axis=-1)

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
            """For every token [that of the token before, its own], [b, t, h, 2, ...]."""
            return jnp.stack([of_token_before(now, before, documents, first)[0], now], axis=3)

        first = RotationTail(None, None, None) if initial is None else initial
        log_retention = inputs.gates.log_retention + log_retention
        gates = dataclasses.replace(
            inputs.gates, log_retention=log_retention, step_size=inputs.gates.step_size * weights
        )
        both_keys, both_values = with_last(keys, tail.key, first.key), with_last(values, tail.value, first.value)
        tail = RotationTail(phases[:, -1] % math.tau, keys[:, -1], values[:, -1])
        if self.rank > 1:
            steps = (*values.shape[:3], 2 * self.rank, values.shape[-1])
            queries = jnp.concatenate([jnp.zeros_like(queries), queries], axis=3)  # nothing is read of the token before
            both_keys, both_values = both_keys.reshape(steps), self.of_ranks(both_values).reshape(steps)
        return RotatedInputs(queries, both_keys, both_values, gates), tail

    def rotated(self, x: jax.Array, bias: nnx.Param, phases: jax.Array) -> jax.Array:
        """x [b, t, h, (r,) d] with its bias, its first 2 a channels turned by phases [b, t, h, a]."""
        wide = x.astype(phases.dtype) + bias[...][None, None]
        turned, rest = jnp.split(wide, [2 * self.angles], axis=-1)
        even, odd = turned[..., 0::2], turned[..., 1::2]
        phases = jnp.expand_dims(phases, range(3, x.ndim - 1))
        cos, sin = jnp.cos(phases), jnp.sin(phases)
        turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(turned.shape)
        return jnp.concatenate([turned, rest], axis=-1).astype(x.dtype)

    def of_ranks(self, values: jax.Array) -> jax.Array:
        """The values [b, t, h, ..., r, d] of all ranks, made of a token's value [b, t, h, ..., d]."""
        mix = jnp.expand_dims(self.value_mix[...], (0, 1, *range(3, values.ndim - 1)))
        return (values[..., None, :].astype(mix.dtype) * mix).astype(values.dtype)

    def whole_reads(self, inputs: RotatedInputs, reads: jax.Array) -> jax.Array:
        """Reads [b, t, h, (r,) d] after all writes of a token, made of reads [b, t, h, (2 r,) d] after each write."""
        if self.rank == 1:
            return reads
        queries, keys, values, steps = map(self.own, (*inputs[:3], inputs.gates.step_size))
        scores = matmul(queries, jnp.swapaxes(keys, -1, -2), keys.dtype)
        scores = jnp.triu(scores * steps[..., None, :], 1)  # of writes behind the read
        return self.own(reads) + matmul(scores, values, keys.dtype)

    def own(self, x: jax.Array) -> jax.Array:
        """What belongs to a token itself, [b, t, h, r, ...], not to the token before, of [b, t, h, 2 r, ...]; with rank
        1, which has a read for a token and not for a write, all that is given."""
        return x if self.rank == 1 else x[:, :, :, self.rank :]

    def with_skip(self, reads: jax.Array, values: jax.Array) -> jax.Array:
        """Reads [b, t, h, (r,) d] plus D times a token's value [b, t, h, d], or its ranks' values:
        [b, t, (r,) h, d]."""
        if self.rank > 1:
            reads, values = jnp.swapaxes(reads, 2, 3), jnp.swapaxes(self.of_ranks(values), 2, 3)
        skip = self.skip[...].astype(reads.dtype)[:, None]
        return reads + jnp.expand_dims(skip, range(reads.ndim - 2)) * values.astype(reads.dtype)

    def gated(self, normed: jax.Array, gate: jax.Array) -> jax.Array:
        """The sum over ranks of normed reads [b, t, r, h, d], each with its gate: [b, t, h d]; gate [b, t, h d]."""
        gate_mix, read_mix = (jnp.swapaxes(mix[...], 0, 1)[None, None] for mix in (self.gate_mix, self.read_mix))
        gates = gate.reshape(*gate.shape[:2], 1, *normed.shape[-2:]).astype(gate_mix.dtype)
        mixed = read_mix * normed.astype(read_mix.dtype) * jax.nn.silu(gate_mix * gates)
        return jnp.sum(mixed, axis=2).reshape(gate.shape).astype(normed.dtype)

    def start(self, dtype: jnp.dtype) -> RotationTail:
        """The tail before any token, without the batch axis; keys and values of `dtype`."""
        phases = jnp.zeros((self.skip.shape[0], self.angles), self.kernel.dtype)
        key = jnp.zeros(self.key_bias.shape, dtype)
        return RotationTail(phases, key, key if self.rank == 1 else key[:, 0])


def angles(head_dim: int) -> int:
    """Pairs of channels in the first half of a key."""
    return head_dim // 2 // 2
