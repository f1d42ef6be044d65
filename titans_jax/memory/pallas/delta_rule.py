"""`forms.delta_rule` in a kernel: linear memories, a block of many chunks by one triangular solve."""

from __future__ import annotations

import jax.numpy as jnp

from titans_jax.memory.forms.delta_rule import DeltaRule
from titans_jax.memory.forms.scan_chunks import BlockLayout
from titans_jax.memory.gates import Gates
from titans_jax.memory.pallas.gate_rows import RowLayout, pack_rows, unpack_rows
from titans_jax.memory.pallas.kernel_algorithm import (
    Asked,
    Chunks,
    KernelAlgorithm,
    UnpackedChunk,
    chunks_of,
    tokens_of,
)
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.ops import backend
from titans_jax.ops.platform import SUBLANES


class KernelDeltaRule(KernelAlgorithm):
    """Rules that `DeltaRule` supports, if a chunk is one token, or whole registers and either divides or is a block."""

    algorithm = DeltaRule

    @classmethod
    def supports(cls, rule: MemoryRule, gates: Gates) -> bool:
        size, tokens = rule.chunk_size, backend.PALLAS.delta_rule.tokens
        fits = size == 1 or (size % SUBLANES == 0 and (tokens % size == 0 or size > tokens))
        return fits and DeltaRule.supports(rule, gates)

    @property
    def block_tokens(self) -> int:
        return max(self.rule.chunk_size, backend.PALLAS.delta_rule.tokens)

    def pack(self, layout: BlockLayout, asked: Asked) -> Chunks:
        """Flags of tokens whose chunk starts a document and, if the anchor is asked for, of the token that opens the
        last chunk."""
        gates, resets, size = layout.inputs.gates, layout.inputs.resets, self.rule.chunk_size
        blocks, tokens = gates.step_size.shape[:2]
        flags = [] if resets is None else [jnp.repeat(resets[:, ::size], size, axis=1)]
        if asked.anchor:
            slots = jnp.arange(blocks * tokens, dtype=jnp.int32).reshape(blocks, tokens)
            flags.append(slots == layout.last // size * size)
        return chunks_of(layout, pack_rows(gates, flags, resets))

    def unpack(self, chunk: Chunks, asked: Asked, restarts: bool) -> UnpackedChunk:
        layout = RowLayout(1, self.rule.algorithm.has_momentum, restarts, flags=restarts + asked.anchor)
        (c,), _, flags, _ = unpack_rows(chunk.rows, layout, chunk.keys.dtype)
        columns = [row.T for row in flags]
        starts = columns[0] > 0 if restarts else None
        open_at = columns[-1] if asked.anchor else None
        prepared = self.chunkwise.prepare_block(chunk.queries, chunk.keys, c, starts, open_at)
        # Only one block has the token that opens the last chunk.
        is_open = jnp.max(open_at, axis=0, keepdims=True) if asked.anchor else None
        return UnpackedChunk(tokens_of(chunk), prepared, is_open)
