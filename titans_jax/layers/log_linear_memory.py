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
from titans_jax.layers.head_inputs import HeadInputs, head_axes, per_device
from titans_jax.layers.memory_gates import HEAD_KERNEL
from titans_jax.layers.neural_memory import MemoryLayerState, NeuralMemory, broadcast
from titans_jax.layers.projections import param_dtype
from titans_jax.memory.log_linear import Levels, memorize_levels
from titans_jax.memory.rule.gate_choices import SOFTPLUS_ONE
from titans_jax.ops.matmul import wide_dtype
from titans_jax.sharding import logical


class LogLinearMemory(NeuralMemory):
    """A `NeuralMemory` whose reads are sums over levels, [b, t, dim] -> the same; its state holds `Levels`."""

    provides = ("log_linear_levels",)

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.levels = config.memory.log_linear_levels
        shape, dtype = (config.num_heads, self.levels + 1), param_dtype(config)
        self.scale = nnx.Param(HEAD_KERNEL(rngs.params(), (config.dim, *shape), dtype))
        self.scale_bias = nnx.Param(logical(lambda: jnp.full(shape, SOFTPLUS_ONE, dtype), "heads", None)())

    def head_inputs(
        self,
        x: jax.Array,
        features: dict[str, jax.Array],
        state: MemoryLayerState,
        documents: Documents | None = None,
        start: MemoryLayerState | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[HeadInputs, MemoryLayerState]:
        """As of `NeuralMemory`, with scales and positions."""
        inputs, state = super().head_inputs(x, features, state, documents, start, mask)
        logits = jnp.einsum("btd,dhl->bthl", x.astype(self.scale.dtype), self.scale[...])
        scales = jax.nn.softplus(logits + self.scale_bias[...][None, None]).astype(wide_dtype(self.dtype))
        positions = None if documents is None else start.memory.position + documents.positions
        return inputs._replace(scales=scales, positions=positions), state

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

    def _memorize(
        self, state: Levels, inputs: HeadInputs, start: Levels | None, read_on: bool = False
    ) -> tuple[jax.Array, Levels, memory.Surprise, None]:
        """As of `NeuralMemory`; the surprise is that of the memory without levels. There are no ends of segments."""
        plain = inputs._replace(scales=None, positions=None)
        unsplit = whole(state), plain, None if start is None else whole(start)
        _, _, surprise, _ = super()._memorize(*jax.lax.stop_gradient(unsplit))
        batch, time = inputs.queries.shape[:2]
        form = "recurrent" if time == 1 else memory.choose_form(self.form, self.rule, inputs.gates)
        # Without persistent tokens a document starts with nothing.
        first = None if start is None or start.position == 0 else start

        def one(position, params, parts, inputs: HeadInputs, begin):
            reads, after = memorize_levels(
                self.rule,
                params,
                Levels(parts, position),
                *inputs[:4],
                inputs.scales,
                form,
                resets=inputs.resets,
                positions=inputs.positions,
                start=None if begin is None else Levels(begin, first.position),
                rematerialised=self.rematerialised,
            )
            return reads, after.parts, None, None

        heads = jax.vmap(one, in_axes=(None, 0, 0, head_axes(inputs), 0), out_axes=(1, 0, None, None))
        rows = jax.vmap(heads, in_axes=(None, 0, 0, 0, 0))
        if form == "fused":
            rows = per_device(rows, batch, inputs.gates)
        begin = None if first is None else first.parts
        reads, parts, *_ = rows(state.position, broadcast(self.params(), batch), state.parts, inputs, begin)
        return reads, Levels(parts, state.position + time), surprise, None


def whole(levels: Levels) -> memory.MemoryState:
    """The sum of the parts, as the state of a memory without levels."""
    return memory.MemoryState(levels.weights, (), levels.weights, 0)
