"""Hope: self-referential Titans, or softmax attention, in front of a continuum memory (Nested Learning, arXiv
2512.24695; the equations are from secondary notes)."""

import math
from typing import NamedTuple

import jax
from flax import nnx

from titans_jax.config import ModelConfig, memory_rule
from titans_jax.layers.attention import Attention, AttentionState
from titans_jax.layers.continuum_memory import ContinuumMemory
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.neural_memory import check_other_layers
from titans_jax.layers.norms import RMSNorm
from titans_jax.layers.self_referential import SelfReferentialMemory, SelfReferentialState, check_rule
from titans_jax.memory import MemoryState
from titans_jax.models.block import Block, register_block
from titans_jax.models.flops import attention_flops, continuum_flops, mean_causal_keys, self_referential_flops
from titans_jax.models.pattern import blocks_of


class HopeState(NamedTuple):
    """States of the two layers; one memory of every level of the continuum."""

    memory: SelfReferentialState
    continuum: tuple[MemoryState, ...]


class HopeAttentionState(NamedTuple):
    """States of the two layers."""

    attention: AttentionState | None
    continuum: tuple[MemoryState, ...]


@register_block("hope")
class Hope(Block):
    """x += self_referential_memory(norm(x)); x += continuum_memory(norm(x)), without persistent tokens."""

    has_memory = True

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.memory_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.memory = SelfReferentialMemory(config, rngs=rngs)
        self.continuum_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.continuum = ContinuumMemory(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, state: HopeState | None = None, documents: Documents | None = None
    ) -> tuple[jax.Array, HopeState, dict[str, jax.Array]]:
        """See `Block`; the report is that of M_memory, the memory that the output is read from."""
        memory, continuum = (None, None) if state is None else state
        y, memory, report = self.memory(self.memory_norm(x), memory, documents)
        x = x + y
        y, continuum = self.continuum(self.continuum_norm(x), continuum, documents)
        return x + y, HopeState(memory, continuum), report

    def init_state(self, batch: int, max_length: int | None = None) -> HopeState:
        """See `Block`; of constant size."""
        return HopeState(self.memory.init_state(batch), self.continuum.init_state(batch))

    @classmethod
    def granularity(cls, config: ModelConfig) -> int:
        """See `Block`; whole windows of every level."""
        return math.lcm(memory_rule(config.memory).chunk_size, config.memory.continuum_chunks[-1])

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """See `Block`."""
        check_rule(config)

    @staticmethod
    def forward_flops(config: ModelConfig, time: int) -> float:
        """See `Block`."""
        return self_referential_flops(config) + continuum_flops(config)


@register_block("hope_attention")
class HopeAttention(Block):
    """x += attention(norm(x)); x += continuum_memory(norm(x)), with rotary positions and no persistent tokens."""

    has_memory = True

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.attention = Attention(config, None, rngs=rngs)
        self.continuum_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.continuum = ContinuumMemory(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, state: HopeAttentionState | None = None, documents: Documents | None = None
    ) -> tuple[jax.Array, HopeAttentionState, dict[str, jax.Array]]:
        """See `Block`; the levels report nothing."""
        attention, continuum = (None, None) if state is None else state
        y, attention = self.attention(self.attention_norm(x), attention, documents)
        x = x + y
        y, continuum = self.continuum(self.continuum_norm(x), continuum, documents)
        return x + y, HopeAttentionState(attention, continuum), {}

    def init_state(self, batch: int, max_length: int | None = None) -> HopeAttentionState:
        """See `Block`; room for max_length tokens."""
        return HopeAttentionState(self.attention.init_state(batch, max_length), self.continuum.init_state(batch))

    @classmethod
    def granularity(cls, config: ModelConfig) -> int:
        """See `Block`; whole windows of every level."""
        return config.memory.continuum_chunks[-1]

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """See `Block`: caching, local memories and levels, unless the pattern has another block with a memory."""
        if not any(block.has_memory and block is not cls for block in blocks_of(config)):
            check_other_layers(config, "hope_attention", "its memory is the weights of its levels")

    @staticmethod
    def forward_flops(config: ModelConfig, time: int) -> float:
        """See `Block`."""
        return attention_flops(config, mean_causal_keys(time, time)) + continuum_flops(config)
