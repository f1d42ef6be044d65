"""MAL: memory as a layer, under a sliding-window attention (Titans eq 29-31)."""

from typing import NamedTuple

import jax
from flax import nnx

from titans_jax.config import ModelConfig
from titans_jax.layers.attention import Attention, AttentionState
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.feed_forward import FeedForward
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
    persistent_flops,
)


class MALState(NamedTuple):
    """States of the two layers."""

    memory: AnyMemoryState | None
    attention: AttentionState | None


@register_block("mal")
class MAL(Block):
    """x += memory([P | norm(x)]); x += window_attention([P | norm(x)]); x += feed_forward(norm(x)).

    Each layer has its own norm and residual connection, interleaved as in Samba with one feed-forward per block
    (memory/README.md, Readings). Both read the same persistent tokens P, which for the attention stand in place of the
    memory's outputs at P; no output at P is computed.
    """

    has_memory = True

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.persistent = PersistentTokens(config, rngs=rngs)
        self.memory_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.memory = memory_layer(config, rngs=rngs)
        self.attention_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.attention = Attention(config, config.window, rngs=rngs)
        self.feed_forward_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, state: MALState | None = None, documents: Documents | None = None
    ) -> tuple[jax.Array, MALState, dict[str, jax.Array]]:
        """See `Block`."""
        memory, attention = (None, None) if state is None else state
        y, memory, report = self.memory(self.memory_norm(x), memory, documents, self.persistent())
        x = x + y
        y, attention = self.attention(self.attention_norm(x), attention, documents, self.persistent())
        x = x + y
        return x + self.feed_forward(self.feed_forward_norm(x)), MALState(memory, attention), report

    def init_state(self, batch: int, max_length: int | None = None) -> MALState:
        """See `Block`; of constant size unless memories are kept (`caching`), which needs max_length."""
        return MALState(
            self.memory.init_state(batch, self.persistent(), max_length),
            self.attention.init_state(batch, max_length, self.persistent()),
        )

    @staticmethod
    def forward_flops(config: ModelConfig, time: int) -> float:
        """See `Block`."""
        window = attention_flops(config, mean_causal_keys(time, config.window)) + persistent_flops(config)
        return memory_layer_flops(config) + caching_flops(config, time) + window + feed_forward_flops(config)
