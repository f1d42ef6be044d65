"""How the start state and every token's rank-one gradient weigh in each token's fast matrix, without forming it.

Per block and fast matrix an `IntraChunk`, with scalar coefficients and possibly channel-wise decay; or, where
channel-wise retention meets momentum and nothing separates, `ChannelIntraChunk`, with coefficients of every channel.
See memory/README.md, Reads inside a chunk and Channel-wise retention.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.decay import Coefficients, block_coefficients, coefficients
from titans_jax.memory.forms.omega_window import window_coefficients
from titans_jax.memory.gates import Gates
from titans_jax.ops import channel_decay, channel_decay_pallas
from titans_jax.ops.backend import Backend
from titans_jax.ops.matmul import Transposed, concatenate_operands, inner_products, matmul, outer_products
from titans_jax.ops.whole_matrix import scale_matrix


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IntraChunk:
    """Scalar coefficients of a block (see `Coefficients`): beta, f [tokens, 1], G [tokens, tokens], N [1, tokens]; in G
    and N the columns of a window's tokens before the block come first. f, N: None without momentum. ends: the last
    token's beta, with momentum also f and p, [1 or 3, 1 or more equal numbers].

    by_input, by_output: decay of input and of output channels, or None.
    """

    beta: jax.Array
    f: jax.Array | None
    G: jax.Array
    N: jax.Array | None
    ends: jax.Array
    by_input: channel_decay.ChannelDecay | channel_decay_pallas.ChannelDecay | None = None
    by_output: channel_decay.ChannelDecay | channel_decay_pallas.ChannelDecay | None = None

    def read(self, x, start, momentum, inner, deltas, learned, operand_dtype):
        """x_t times the matrix after token t, [tokens, out], for the gradients inner_i^T deltas_i. learned: the learned
        start, where `start` is the change since it; None where `start` is the whole matrix."""
        if self.by_input is None:
            scores = inner_products(x, inner, operand_dtype)
            faded = x
        else:
            (scores,) = self.by_input.scores((x,), inner, operand_dtype)
            faded = x * self.by_input.since_start()
        past = scores * self.G
        if self.by_output is not None:
            out = self.beta * matmul(faded, start, operand_dtype) * self.by_output.since_start()
            return since_learned(out + self.by_output.mix(past, deltas, operand_dtype), x, learned, operand_dtype)
        parts = [(self.beta, faded, start)] + [(self.f, x, momentum)] * (momentum is not None)
        if x.shape[1] < deltas.shape[1]:  # the narrower side is scaled, and one product sums all terms
            rows = [scale * x for scale, x, _ in parts] + [past] + [x] * (learned is not None)
            matrices = [matrix for *_, matrix in parts] + [deltas] + [learned] * (learned is not None)
            joined = concatenate_operands(rows, operand_dtype, axis=1), concatenate_operands(matrices, operand_dtype)
            return matmul(*joined, operand_dtype)
        out = sum(scale * matmul(x, matrix, operand_dtype) for scale, x, matrix in parts)
        return since_learned(out + matmul(past, deltas, operand_dtype), x, learned, operand_dtype)

    def carry(self, backend: Backend, start, momentum, inner, deltas, operand_dtype):
        """The matrix and its momentum after the last token."""
        kept = scale_matrix(self.ends[:1], start)
        if self.by_input is not None:
            kept, inner = scale_channels(self.by_input, kept, 0), inner * self.by_input.to_end()
        if self.by_output is not None:
            kept, deltas = scale_channels(self.by_output, kept, 1), deltas * self.by_output.to_end()
        rows = [self.G[-1:]] if momentum is None else [self.G[-1:], self.N]
        transposed = isinstance(start, Transposed)
        moved, *pushed = backend.weighted_outer_products(rows, inner, deltas, operand_dtype, transposed)
        if momentum is None:
            return kept + moved, None
        kept = kept + scale_matrix(self.ends[1:2], momentum)
        return kept + moved, scale_matrix(self.ends[2:], momentum) + pushed[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChannelIntraChunk:
    """`IntraChunk` with coefficients c for every channel of the matrix's inputs or outputs, leaves [channels, ...]."""

    c: Coefficients
    of_inputs: bool = dataclasses.field(metadata={"static": True})

    def read(self, x, start, momentum, inner, deltas, learned, operand_dtype):
        """As `IntraChunk.read`."""
        c = self.c
        beta, f = c.beta[..., 0].T, c.f[..., 0].T
        if self.of_inputs:
            out = matmul(x * beta, start, operand_dtype) + matmul(x * f, momentum, operand_dtype)
            past = jnp.einsum("tc,ic,cti->ti", x, inner, c.G, precision="highest")
            return since_learned(out + matmul(past, deltas, operand_dtype), x, learned, operand_dtype)
        out = beta * matmul(x, start, operand_dtype) + f * matmul(x, momentum, operand_dtype)
        scores = inner_products(x, inner, operand_dtype)
        out += jnp.einsum("ti,io,oti->to", scores, deltas, c.G, precision="highest")
        return since_learned(out, x, learned, operand_dtype)

    def carry(self, backend: Backend, start, momentum, inner, deltas, operand_dtype):
        """As `IntraChunk.carry`."""

        def total(of_start, of_momentum, of_tokens):
            wide = (lambda x: x[:, None]) if self.of_inputs else (lambda x: x[None, :])
            kept = wide(of_momentum) * momentum
            if of_start is not None:
                kept += wide(of_start) * start
            if self.of_inputs:
                return kept + outer_products(inner * of_tokens.T, deltas, operand_dtype)
            return kept + outer_products(inner, deltas * of_tokens.T, operand_dtype)

        c = self.c
        return total(c.beta[:, -1, 0], c.f[:, -1, 0], c.G[:, -1]), total(None, c.p[:, -1, 0], c.N[:, 0])


def since_learned(out: jax.Array, x: jax.Array, learned, operand_dtype) -> jax.Array:
    """x times a learned matrix plus `out`, that of the change since; `out` alone where learned is None."""
    return out if learned is None else matmul(x, learned, operand_dtype) + out


def intra_chunks(gates: Gates, backend: Backend) -> tuple[IntraChunk | ChannelIntraChunk, ...]:
    """One per fast matrix, leaves [blocks, ...], from gates [blocks, tokens, ...].

    A reset replaces a chunk's start state as a whole, so the coefficients do not depend on it.
    """
    scalars = scalar_coefficients(gates, backend.decay_tile)
    matrices = gates.step_size.shape[-1]
    made = []
    for i in range(matrices):
        of_inputs = gates.log_key_retention if i == 0 else None
        of_outputs = gates.log_value_retention if i == matrices - 1 else None
        if gates.log_momentum is None or (of_inputs is None and of_outputs is None):
            sides = (
                None if x is None else backend.channel_decay(jax.vmap(channel_decay.clipped)(x, gates.mask))
                for x in (of_inputs, of_outputs)
            )
            made.append(intra_chunk(jax.tree.map(lambda leaf: leaf[:, i], scalars), *sides))  # noqa: B023
        elif of_inputs is not None:
            made.append(ChannelIntraChunk(channel_coefficients(gates, i, of_inputs, backend), True))
        else:
            made.append(ChannelIntraChunk(channel_coefficients(gates, i, of_outputs, backend), False))
    return tuple(made)


def scalar_coefficients(gates: Gates, tile: int | None) -> Coefficients:
    """Coefficients of all blocks and matrices, leaves [blocks, matrices, ...], also for tokens with windows."""
    if gates.window_weight is None:
        return block_coefficients(gates, None, tile)
    return window_coefficients(gates, tile)


def intra_chunk(c: Coefficients, by_input=None, by_output=None) -> IntraChunk:
    """From coefficients with leaves [blocks, ...]."""
    ends = jnp.concatenate([x[:, -1:] for x in (c.beta, c.f, c.p) if x is not None], axis=1)
    return IntraChunk(c.beta, c.f, c.G, c.N, ends, by_input, by_output)


def channel_coefficients(gates: Gates, i: int, log_retention: jax.Array, backend: Backend) -> Coefficients:
    """Coefficients of every channel of matrix i, leaves [blocks, channels, ...]."""
    log_retention = gates.log_retention[..., i, None] + log_retention
    one = jax.vmap(functools.partial(coefficients, tile=backend.decay_tile), in_axes=(0, None, None, None))
    scalars = jax.tree.map(lambda x: x[:, None], (gates.log_momentum[..., i], gates.step_size[..., i], gates.mask))
    return jax.vmap(one)(jnp.swapaxes(log_retention, 1, 2)[:, :, None], *scalars)


def scale_channels(decay, matrix, axis: int):
    """A matrix times what a whole block leaves of every input (axis 0) or output (1)."""
    if isinstance(matrix, Transposed):
        return Transposed(scale_channels(decay, matrix.array, 1 - axis))
    return matrix * (decay.whole() if axis == 0 else decay.since_start()[-1:])
