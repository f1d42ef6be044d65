"""A memory beside the attention of a Transformer that was trained without one (TPTT, arXiv 2506.17671)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from titans_jax.config import ModelConfig
from titans_jax.layers.attention import AttentionState
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.memory_layer import AnyMemoryState, memory_layer
from titans_jax.layers.projections import param_dtype
from titans_jax.models.attention_block import WindowBlock
from titans_jax.models.block import register_block
from titans_jax.models.flops import caching_flops, memory_layer_flops
from titans_jax.sharding import logical

FIRST_SHARE = 0.3
"""The memory's first share of the output: with TPTT's 0.01 the memory is learned later (memory/what_was_tried.md)."""


class RetrofitState(NamedTuple):
    """States of the two branches."""

    memory: AnyMemoryState
    attention: AttentionState | None


@register_block("retrofit")
class Retrofit(WindowBlock):
    """x += (1 - a) window_attention(n) + a memory(n), n = norm(x); x += feed_forward(norm(x)); a learned per channel.

    The parameters are those of an "attention" or "window" block, the memory's, and a. `training.init_from` names a run
    of such blocks, whose attention, even a full one, then sees a window only. Their weights stay as they are with
    `optimizer.train_only` memory share, or else are trained with the memory.

    TPTT has linear memories that share the attention's projections, and raises a from 0.01 to 1/2 by a schedule; here
    any memory has its own, as its convolutions need, and a is learned, from 0.3.
    """

    has_memory = True
    added = ("memory", "share")

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.memory = memory_layer(config, rngs=rngs)
        share = jnp.full(config.dim, FIRST_SHARE, param_dtype(config))
        self.share = nnx.Param(logical(lambda: share, "embed")())

    def __call__(
        self, x: jax.Array, state: RetrofitState | None = None, documents: Documents | None = None
    ) -> tuple[jax.Array, RetrofitState, dict[str, jax.Array]]:
        """See `Block`."""
        memory, attention = (None, None) if state is None else state
        normed = self.attention_norm(x)
        y, attention = self.attention(normed, attention, documents)
        said, memory, report = self.memory(normed, memory, documents)
        share = self.share[...].astype(y.dtype)[None, None]
        x = x + y + share * (said - y)
        return x + self.feed_forward(self.feed_forward_norm(x)), RetrofitState(memory, attention), report

    def init_state(self, batch: int, max_length: int | None = None) -> RetrofitState:
        """See `Block`; of constant size unless memories are kept (`caching`), which needs max_length."""
        return RetrofitState(self.memory.init_state(batch, None, max_length), super().init_state(batch, max_length))

    @staticmethod
    def forward_flops(config: ModelConfig, time: int) -> float:
        """See `Block`."""
        return WindowBlock.forward_flops(config, time) + memory_layer_flops(config) + caching_flops(config, time)
