"""MAG: memory as gate (Titans eq 26-28)."""

from typing import NamedTuple

import jax
from flax import nnx

from titans_jax.config import ModelConfig
from titans_jax.layers.attention import Attention, AttentionState
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.feed_forward import FeedForward
from titans_jax.layers.gated_merge import GatedMerge
from titans_jax.layers.memory_layer import AnyMemoryState, memory_layer
from titans_jax.layers.norms import RMSNorm
from titans_jax.layers.persistent import PersistentTokens
from titans_jax.models.block import Block, register_block
from titans_jax.models.flops import (
    attention_flops,
    caching_flops,
    feed_forward_flops,
    mean_causal_keys,
    memory_layer_flops,
    merge_flops,
    persistent_flops,
)


class MAGState(NamedTuple):
    """States of the two branches."""

    memory: AnyMemoryState | None
    attention: AttentionState | None


@register_block("mag")
class MAG(Block):
    """x += m + 2 a y * sigmoid(b m), y = window_attention(x~), m = memory(x~), x~ = [P | norm(x)]; then feed_forward.

    The paper normalises both branches with learned vectors, and states neither how nor the non-linearity. Here a and b
    are these vectors, and a sigmoid of the memory gates attention, with a residual connection for the memory
    (`layers.GatedMerge`, which also has the product alone). Both branches read the same persistent tokens P; their
    outputs are dropped.
    """

    has_memory = True

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.persistent = PersistentTokens(config, rngs=rngs)
        self.norm = RMSNorm(config, config.dim, rngs=rngs)
        self.attention = Attention(config, config.window, rngs=rngs)
        self.memory = memory_layer(config, rngs=rngs)
        self.merge = GatedMerge(config, rngs=rngs)
        self.feed_forward_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, state: MAGState | None = None, documents: Documents | None = None
    ) -> tuple[jax.Array, MAGState, dict[str, jax.Array]]:
        """See `Block`."""
        memory, attention = (None, None) if state is None else state
        normed = self.norm(x)
        content, attention = self.attention(normed, attention, documents, self.persistent())
        gate, memory, report = self.memory(normed, memory, documents, self.persistent())
        x = x + self.merge(content, gate)
        return x + self.feed_forward(self.feed_forward_norm(x)), MAGState(memory, attention), report

    def init_state(self, batch: int, max_length: int | None = None) -> MAGState:
        """See `Block`; of constant size unless memories are kept (`caching`), which needs max_length."""
        return MAGState(
            self.memory.init_state(batch, self.persistent(), max_length),
            self.attention.init_state(batch, max_length, self.persistent()),
        )

    @staticmethod
    def forward_flops(config: ModelConfig, time: int) -> float:
        """See `Block`."""
        window = attention_flops(config, mean_causal_keys(time, config.window)) + persistent_flops(config)
        return (
            window
            + memory_layer_flops(config)
            + caching_flops(config, time)
            + merge_flops(config)
            + feed_forward_flops(config)
        )
