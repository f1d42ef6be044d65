"""Mamba (arXiv 2312.00752), and the block of Samba that holds it (arXiv 2406.07522): baselines of the papers."""

import jax
from flax import nnx

from titans_jax.config import ModelConfig
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.feed_forward import FeedForward
from titans_jax.layers.mamba import Mamba, MambaState
from titans_jax.layers.norms import RMSNorm
from titans_jax.models.block import Block, register_block
from titans_jax.models.flops import feed_forward_flops, mamba_flops


@register_block("mamba")
class MambaBlock(Block):
    """x += mamba(norm(x)), without a feed-forward layer: two of them have the parameters of attention with an MLP."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.mamba_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.mamba = Mamba(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, state: MambaState | None = None, documents: Documents | None = None
    ) -> tuple[jax.Array, MambaState, dict[str, jax.Array]]:
        """See `Block`."""
        y, state = self.mamba(self.mamba_norm(x), state, documents)
        return x + y, state, {}

    def init_state(self, batch: int, max_length: int | None = None) -> MambaState:
        """See `Block`; of constant size."""
        return self.mamba.init_state(batch)

    @staticmethod
    def forward_flops(config: ModelConfig, time: int) -> float:
        """See `Block`."""
        return mamba_flops(config)


@register_block("samba")
class SambaBlock(MambaBlock):
    """x += mamba(norm(x)); x += feed_forward(norm(x)): in turn with the block "window" it is Samba."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.feed_forward_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, state: MambaState | None = None, documents: Documents | None = None
    ) -> tuple[jax.Array, MambaState, dict[str, jax.Array]]:
        """See `Block`."""
        x, state, report = super().__call__(x, state, documents)
        return x + self.feed_forward(self.feed_forward_norm(x)), state, report

    @staticmethod
    def forward_flops(config: ModelConfig, time: int) -> float:
        """See `Block`."""
        return mamba_flops(config) + feed_forward_flops(config)
