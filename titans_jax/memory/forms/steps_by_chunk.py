"""Rules whose memory moves once a chunk (`Algorithm.steps_by_chunk`): inside it, tokens only forget, and gradients go
into the momentum S (memory/later_models.md, Steps of whole chunks).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.intra_chunk import scalar_coefficients, since_learned
from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.ops.backend import Backend
from titans_jax.ops.matmul import Transposed, matmul
from titans_jax.ops.whole_matrix import scale_matrix


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatheringChunk:
    """The counterpart of `IntraChunk` for these rules: beta [tokens, 1]; N [1, tokens], in which the columns of a
    window's tokens before the chunk come first (see `Coefficients`). ends: the last token's beta and p, [2, 1 or more
    equal numbers]."""

    beta: jax.Array
    N: jax.Array
    ends: jax.Array

    def read(self, x, start, momentum, inner, deltas, learned, operand_dtype):
        """x_t times the matrix after token t, [tokens, out]: what is left of the matrix at the chunk's start."""
        return since_learned(self.beta * matmul(x, start, operand_dtype), x, learned, operand_dtype)

    def carry(self, backend: Backend, start, momentum, inner, deltas, operand_dtype):
        """The matrix after the last token, before the chunk's step, and S."""
        transposed = isinstance(start, Transposed)
        (pushed,) = backend.weighted_outer_products([self.N], inner, deltas, operand_dtype, transposed)
        return scale_matrix(self.ends[:1], start), scale_matrix(self.ends[1:], momentum) + pushed


def gathering_chunks(rule: MemoryRule, gates: Gates, backend: Backend) -> tuple[GatheringChunk, ...]:
    """One per fast matrix, leaves [chunks, ...], from gates [chunks, tokens, ...] (see `intra_chunks`)."""
    gates = momentum_of_chunk(rule, gates, first_of_chunk(gates))
    c = scalar_coefficients(gates, backend.decay_tile)
    ends = jnp.concatenate([c.beta[:, :, -1:], c.p[:, :, -1:]], axis=2)
    return tuple(GatheringChunk(c.beta[:, i], c.N[:, i], ends[:, i]) for i in range(c.beta.shape[1]))


def first_of_chunk(gates: Gates) -> jax.Array:
    """Which slot of chunks [chunks, tokens, ...] is the first, bool [1, tokens, 1]."""
    return (jnp.arange(gates.log_retention.shape[1], dtype=jnp.int32) == 0)[None, :, None]


def momentum_of_chunk(rule: MemoryRule, gates: Gates, first: jax.Array) -> Gates:
    """Gates whose momentum acts once a chunk, at its first token, where the algorithm asks for that. first: which
    tokens are a chunk's first."""
    if not rule.algorithm.momentum_by_chunk:
        return gates
    return dataclasses.replace(gates, log_momentum=jnp.where(first, gates.log_momentum, 0))


def step_totals(rule: MemoryRule, gates: Gates) -> jax.Array | None:
    """Sums of the step sizes of each chunk's own tokens, [chunks, matrices], from gates [chunks, tokens, ...]; None for
    a rule that steps at every token."""
    if not rule.algorithm.steps_by_chunk:
        return None
    own = gates.step_size[:, gates.step_size.shape[1] - gates.log_retention.shape[1] :]  # behind those of a window
    return jnp.sum(own if gates.mask is None else jnp.where(gates.mask[..., None], own, 0), axis=1)
