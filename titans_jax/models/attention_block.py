"""Attention blocks: Transformer++ (full attention) and its sliding-window form, the baselines beside the memories."""

import jax
from flax import nnx

from titans_jax.config import ModelConfig
from titans_jax.layers.attention.layer import Attention, AttentionState
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.feed_forward import FeedForward
from titans_jax.layers.norms import RMSNorm


class AttentionBlock(nnx.Module):
    """x += attention(norm(x)); x += feed_forward(norm(x)), with rotary positions and no persistent tokens (Llama)."""

    def __init__(self, config: ModelConfig, window: int | None = None, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.attention = Attention(config, window, rngs=rngs)
        self.feed_forward_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, state: AttentionState | None = None, documents: Documents | None = None
    ) -> tuple[jax.Array, AttentionState | None, dict[str, jax.Array]]:
        y, state = self.attention(self.attention_norm(x), state, documents)
        x = x + y
        return x + self.feed_forward(self.feed_forward_norm(x)), state, {}

    def init_state(self, batch: int, max_length: int | None = None) -> AttentionState:
        return self.attention.init_state(batch, max_length)


class WindowBlock(AttentionBlock):
    """The same with attention to the last `config.window` tokens."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, config.window, rngs=rngs)
