"""`forms.gated_delta_rule` in a kernel: linear memories with gates of every channel.

Step sizes, slopes and document numbers come as rows over a block's tokens; the log gates of channels are summed in the
kernel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.gated_delta_rule import GatedDeltaRule, WriteGates, count_documents, write_gates
from titans_jax.memory.forms.scan_chunks import BlockLayout
from titans_jax.memory.gates import Gates
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


class KernelGatedDeltaRule(KernelAlgorithm):
    """Rules that `GatedDeltaRule` supports. No chunk stays open, as every token is a chunk."""

    algorithm = GatedDeltaRule

    @classmethod
    def supports(cls, rule: MemoryRule, gates: Gates) -> bool:
        return GatedDeltaRule.supports(rule, gates)

    @property
    def block_tokens(self) -> int:
        return backend.PALLAS.gated_delta_rule.tokens

    def pack(self, layout: BlockLayout, asked: Asked) -> Chunks:
        """Rows [blocks, 1 .. 3, tokens]: step sizes; the bias's slopes, if gated; `count_documents`, with resets."""
        inputs, gates = layout.inputs, jax.vmap(write_gates)(layout.inputs.gates)
        slopes = inputs.gates.bias_gate
        rows = [x[..., 0] for x in (gates.step_size, slopes) if x is not None]
        rows += [] if inputs.resets is None else [count_documents(inputs.resets).astype(gates.step_size.dtype)]
        return chunks_of(layout, jnp.stack(rows, axis=1))._replace(
            bias_gate=None,
            log_key_retention=jnp.broadcast_to(gates.log_key_retention, inputs.queries.shape),
            log_value_retention=gates.log_value_retention,
        )

    def unpack(self, chunk: Chunks, asked: Asked, restarts: bool) -> UnpackedChunk:
        rows, document = chunk.rows, None
        if restarts:
            rows, document = rows[:-1], jax.lax.stop_gradient(rows[-1:])
        columns = rows.T
        tokens = tokens_of(chunk)._replace(bias_gate=columns[:, 1:] if len(rows) > 1 else None)
        gates = WriteGates(columns[:, :1], chunk.log_key_retention, chunk.log_value_retention, document)
        return UnpackedChunk(tokens, self.chunkwise.prepare_block(tokens, gates, asked.surprise), None)
