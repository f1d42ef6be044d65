"""Attention blocks: Transformer++ (full attention) and its sliding-window form, the baselines of the memories."""

import jax
from flax import nnx

from titans_jax.config import ModelConfig
from titans_jax.layers.attention import Attention, AttentionState
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.feed_forward import FeedForward
from titans_jax.layers.norms import RMSNorm
from titans_jax.models.block import Block, register_block
from titans_jax.models.flops import attention_flops, feed_forward_flops, mean_causal_keys


@register_block("attention")
class AttentionBlock(Block):
    """x += attention(norm(x)); x += feed_forward(norm(x)), with rotary positions and no persistent tokens (Llama)."""

    def __init__(self, config: ModelConfig, window: int | None = None, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.attention = Attention(config, window, rngs=rngs)
        self.feed_forward_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, state: AttentionState | None = None, documents: Documents | None = None
    ) -> tuple[jax.Array, AttentionState | None, dict[str, jax.Array]]:
        """See `Block`."""
        y, state = self.attention(self.attention_norm(x), state, documents)
        x = x + y
        return x + self.feed_forward(self.feed_forward_norm(x)), state, {}

    def init_state(self, batch: int, max_length: int | None = None) -> AttentionState:
        """See `Block`; room for max_length tokens, or for a window's."""
        return self.attention.init_state(batch, max_length)

    @staticmethod
    def forward_flops(config: ModelConfig, time: int) -> float:
        """See `Block`."""
        return attention_flops(config, mean_causal_keys(time, time)) + feed_forward_flops(config)


@register_block("window")
class WindowBlock(AttentionBlock):
    """x += window_attention(norm(x)); x += feed_forward(norm(x)): attention to the last `config.window` tokens."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, config.window, rngs=rngs)

    @staticmethod
    def forward_flops(config: ModelConfig, time: int) -> float:
        """See `Block`."""
        return attention_flops(config, mean_causal_keys(time, config.window)) + feed_forward_flops(config)
