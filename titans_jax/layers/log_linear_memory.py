"""Log-linear attention (arXiv 2506.04761) as a layer: a neural memory in parts, by how long ago they were written.

    scale_t,l = softplus(x_t W + b)                                  of every head and level, 1 at first
    r = sum over l of scale_t,l q_t W_t,l                            titans_jax.memory.log_linear

All else is as in `NeuralMemory`. Readings: memory/later_models.md, Log-linear attention.

Shapes: b batch, t time, h heads, d head_dim, k levels but level 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from titans_jax import memory
from titans_jax.config import ModelConfig
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.memory_gates import HEAD_KERNEL
from titans_jax.layers.memory_report import memory_report
from titans_jax.layers.neural_memory import (
    HeadInputs,
    MemoryLayerState,
    NeuralMemory,
    broadcast,
    head_axes,
    per_device,
)
from titans_jax.layers.projections import param_dtype, wide_dtype
from titans_jax.memory.log_linear import Levels, memorize_levels
from titans_jax.memory.rule.gate_choices import SOFTPLUS_ONE
from titans_jax.sharding import logical


class LogLinearMemory(NeuralMemory):
    """A `NeuralMemory` whose reads are sums over levels, [b, t, dim] -> the same; its state holds `Levels`."""

    levelled = True

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.levels = config.memory.log_linear_levels
        shape, dtype = (config.num_heads, self.levels + 1), param_dtype(config)
        self.scale = nnx.Param(HEAD_KERNEL(rngs.params(), (config.dim, *shape), dtype))
        self.scale_bias = nnx.Param(logical(lambda: jnp.full(shape, SOFTPLUS_ONE, dtype), "heads", None)())

    def memorize(
        self,
        x: jax.Array,
        state: MemoryLayerState,
        documents: Documents | None = None,
        start: MemoryLayerState | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[jax.Array, MemoryLayerState, dict[str, jax.Array]]:
        """As of `NeuralMemory`; what the report says of errors is of the memory without levels."""
        features, state = self.features(x, state, documents, start)
        if not self.writes:
            reads = self.retrieve(self._whole(state.memory).weights, features["query"])
            return self.with_skip(reads, features["skip"]), state, {}
        inputs, state = self.head_inputs(x, features, state, documents, start, mask)
        logits = jnp.einsum("btd,dhl->bthl", x.astype(self.scale.dtype), self.scale[...])
        scales = jax.nn.softplus(logits + self.scale_bias[...][None, None]).astype(wide_dtype(self.dtype))
        positions = None if documents is None else start.memory.position + documents.positions
        reads, after = self._memorize_levels(state.memory, inputs, scales, positions, start)
        whole = jax.lax.stop_gradient((self._whole(state.memory), inputs))
        first = None if start is None else self._whole(start.memory)
        _, summed, surprise = self._memorize(*whole, first)
        report = memory_report(self.rule, self.params(), inputs.gates, inputs.values, surprise, summed.weights)
        return self.with_skip(reads, features["skip"]), MemoryLayerState(after, state.tails), report

    def start(self, persistent: jax.Array | None = None) -> MemoryLayerState:
        """As of `NeuralMemory`; persistent tokens count as the first of a document."""
        empty = jnp.zeros((self.num_heads, self.levels, self.head_dim, self.head_dim), wide_dtype(self.dtype))
        state = MemoryLayerState(Levels(empty, 0), super().start().tails)
        if persistent is None:
            return state
        _, after, _ = self.memorize(persistent[None], broadcast(state, 1))
        parts, tails = jax.tree.map(lambda leaf: leaf[0], (after.memory.parts, after.tails))
        return MemoryLayerState(Levels(parts, len(persistent)), tails)

    def init_state(
        self, batch: int, persistent: jax.Array | None = None, max_length: int | None = None
    ) -> MemoryLayerState:
        """As of `NeuralMemory`."""
        state = broadcast(self.start(persistent), batch)
        return state._replace(memory=state.memory._replace(position=jnp.asarray(state.memory.position, jnp.int32)))

    def _whole(self, levels: Levels) -> memory.MemoryState:
        """The memory that the parts are of."""
        weights = (jnp.sum(levels.parts, axis=-3),)
        return memory.MemoryState(weights, (), weights, 0)

    def _memorize_levels(
        self,
        state: Levels,
        inputs: HeadInputs,
        scales: jax.Array,
        positions: jax.Array | None,
        start: MemoryLayerState | None,
    ) -> tuple[jax.Array, Levels]:
        """`memorize_levels` for a batch of heads."""
        batch, time = inputs.queries.shape[:2]
        form = "recurrent" if time == 1 else memory.choose_form(self.form, self.rule, inputs.gates)
        # Without persistent tokens a document starts with nothing.
        first = None if start is None or start.memory.position == 0 else start.memory

        def one(position, params, parts, inputs: HeadInputs, begin, scales, positions):
            reads, after = memorize_levels(
                self.rule,
                params,
                Levels(parts, position),
                *inputs[:4],
                scales,
                form,
                resets=inputs.resets,
                positions=positions,
                start=None if begin is None else Levels(begin, first.position),
                rematerialised=self.rematerialised,
            )
            return reads, after.parts

        heads = jax.vmap(one, in_axes=(None, 0, 0, head_axes(inputs), 0, 1, None), out_axes=(1, 0))
        rows = jax.vmap(heads, in_axes=(None, 0, 0, 0, 0, 0, 0))
        begin = None if first is None else broadcast(first.parts, batch)
        if form == "fused":
            rows = per_device(rows, batch, inputs.gates, levelled=True)
        reads, parts = rows(
            state.position, broadcast(self.params(), batch), state.parts, inputs, begin, scales, positions
        )
        return reads, Levels(parts, state.position + time)
