"""LMM: the neural memory alone, without attention (Titans 4.3)."""

import jax
from flax import nnx

from titans_jax.config import ModelConfig
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.feed_forward import FeedForward
from titans_jax.layers.memory_layer import AnyMemoryState, memory_layer
from titans_jax.layers.norms import RMSNorm
from titans_jax.layers.persistent import PersistentTokens
from titans_jax.models.block import Block, register_block
from titans_jax.models.flops import caching_flops, feed_forward_flops, memory_layer_flops


@register_block("lmm")
class LMM(Block):
    """x += memory([P | norm(x)]); x += feed_forward(norm(x)).

    The memory reads the persistent tokens P first, as the paper's ablation implies (memory/README.md, Readings); their
    outputs are dropped.
    """

    has_memory = True

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.persistent = PersistentTokens(config, rngs=rngs)
        self.memory_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.memory = memory_layer(config, rngs=rngs)
        self.feed_forward_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        state: AnyMemoryState | None = None,
        documents: Documents | None = None,
    ) -> tuple[jax.Array, AnyMemoryState | None, dict[str, jax.Array]]:
        """See `Block`."""
        y, state, report = self.memory(self.memory_norm(x), state, documents, self.persistent())
        x = x + y
        return x + self.feed_forward(self.feed_forward_norm(x)), state, report

    def init_state(self, batch: int, max_length: int | None = None) -> AnyMemoryState:
        """See `Block`; of constant size unless memories are kept (`caching`), which needs max_length."""
        return self.memory.init_state(batch, self.persistent(), max_length)

    @staticmethod
    def forward_flops(config: ModelConfig, time: int) -> float:
        """See `Block`."""
        return memory_layer_flops(config) + caching_flops(config, time) + feed_forward_flops(config)
