"""`chunked.ChunkwiseGradient` in a kernel: any memory, chunk by chunk."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.chunked import ChunkwiseGradient, PreparedChunk
from titans_jax.memory.forms.decay import Coefficients
from titans_jax.memory.forms.intra_chunk import IntraChunk
from titans_jax.memory.forms.omega_window import unit_steps
from titans_jax.memory.forms.scan_chunks import BlockLayout
from titans_jax.memory.forms.steps_by_chunk import GatheringChunk, first_of_chunk, momentum_of_chunk
from titans_jax.memory.gates import Gates
from titans_jax.memory.pallas.gate_rows import RowLayout, pack_rows, pack_window, unpack_rows, unpack_window
from titans_jax.memory.pallas.kernel_algorithm import (
    Asked,
    Chunks,
    KernelAlgorithm,
    UnpackedChunk,
    chunks_of,
    tokens_of,
)
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.ops.backend import PALLAS
from titans_jax.ops.channel_decay import clipped
from titans_jax.ops.platform import LANES, SUBLANES


class KernelChunkwiseGradient(KernelAlgorithm):
    """Rules with an architecture, a retention and an algorithm for which a kernel has the operations, and with one
    slope for all reads of a chunk. Channel-wise retention only without momentum; no decay before the gradient; chunks
    of one token, or of at least a register's rows."""

    algorithm = ChunkwiseGradient

    @classmethod
    def supports(cls, rule: MemoryRule, gates: Gates) -> bool:
        by_channel = gates.log_key_retention is not None or gates.log_value_retention is not None
        separates = not (by_channel and rule.algorithm.has_momentum)
        parts = (rule.architecture, rule.retention, rule.algorithm)
        has = all(PALLAS.missing.isdisjoint(part.operations) for part in parts)
        fills = rule.chunk_size == 1 or rule.chunk_size >= SUBLANES
        return fills and separates and has and rule.retention.one_slope and not rule.algorithm.decay_first

    @property
    def block_tokens(self) -> int:
        return self.rule.chunk_size

    def pack(self, layout: BlockLayout, asked: Asked) -> Chunks:
        """Flags of the chunks that start a document and, if the anchor is asked for, of the one that stays open."""
        rule, gates, resets = self.rule, layout.inputs.gates, layout.inputs.resets
        flags = [] if resets is None else [resets[:, 0]]
        if asked.anchor:
            flags.append(jnp.arange(len(gates.step_size), dtype=jnp.int32) == layout.last // rule.chunk_size)
        gates = momentum_of_chunk(rule, gates, first_of_chunk(gates))
        windows = rule.algorithm.window > 1
        rows = pack_rows(unit_steps(gates) if windows else gates, flags, step_totals=layout.step_totals)
        chunks = self.with_windows(layout, rows) if windows else chunks_of(layout, rows)
        by_channel = {name: getattr(gates, name) for name in ("log_key_retention", "log_value_retention")}
        return chunks._replace(
            **{name: jax.vmap(clipped)(x, gates.mask) for name, x in by_channel.items() if x is not None}
        )

    def with_windows(self, layout: BlockLayout, rows: jax.Array) -> Chunks:
        """Chunks that begin with a window, and before it with places without a token, for whole registers. rows: those
        of a chunk's own tokens."""
        inputs = layout.inputs
        written = -(-inputs.keys.shape[1] // SUBLANES) * SUBLANES
        before = ((0, 0), (written - inputs.keys.shape[1], 0), (0, 0))
        keys, values = (jnp.pad(x, before) for x in (inputs.keys, inputs.values))
        return chunks_of(layout, pack_window(rows, inputs.gates, written))._replace(keys=keys, values=values)

    def unpack(self, chunk: Chunks, asked: Asked, restarts: bool) -> UnpackedChunk:
        rule, operand_dtype = self.rule, chunk.keys.dtype
        matrices = len(rule.shapes(chunk.queries.shape[1]))
        by_chunk = rule.algorithm.steps_by_chunk
        layout = RowLayout(matrices, rule.algorithm.has_momentum, False, asked.anchor + restarts, by_chunk)
        if rule.algorithm.window == 1:
            found, mask, flags, totals = unpack_rows(chunk.rows, layout, operand_dtype)
        else:
            found, mask, flags, totals = unpack_window(chunk.rows, layout, len(chunk.queries), operand_dtype)
        flags = [flag[:, :1] for flag in flags]
        made = [gathering(c) if by_chunk else in_kernel(c) for c in found]
        if chunk.log_key_retention is not None:
            made[0] = dataclasses.replace(made[0], by_input=PALLAS.channel_decay(chunk.log_key_retention))
        if chunk.log_value_retention is not None:
            made[-1] = dataclasses.replace(made[-1], by_output=PALLAS.channel_decay(chunk.log_value_retention))
        prepared = PreparedChunk(
            matrices=tuple(made),
            is_full=None if mask is None else mask[:, -1:],
            starts_document=flags[0] > 0 if restarts else None,
            step_total=jnp.stack([row_of(x) for x in totals]) if by_chunk else None,
        )
        return UnpackedChunk(tokens_of(chunk), prepared, flags[-1] if asked.anchor else None)


def in_kernel(c: Coefficients) -> IntraChunk:
    """`IntraChunk` in a kernel: numbers that scale matrices fill a row of lanes."""
    ends = [row_of(x) for x in (c.beta, c.f, c.p) if x is not None]
    return IntraChunk(c.beta, c.f, c.G, c.N, jnp.concatenate(ends))


def gathering(c: Coefficients) -> GatheringChunk:
    """`GatheringChunk` in a kernel."""
    return GatheringChunk(c.beta, c.N, jnp.concatenate([row_of(c.beta), row_of(c.p)]))


def row_of(column: jax.Array) -> jax.Array:
    """The last number of a column [tokens, 1] in a row of lanes, by way of whole registers, as a kernel's gradient of a
    scalar does not compile."""
    return jnp.broadcast_to(column[-SUBLANES:], (SUBLANES, LANES))[-1:]
