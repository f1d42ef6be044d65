"""Models: blocks around a memory or an attention, a cycled pattern of them, and a head over it."""

from titans_jax.models import heads, lmm, mac, mag, mal, mamba, retrofit  # noqa: F401  (they register their blocks and heads)
from titans_jax.models.attention_block import AttentionBlock, WindowBlock
from titans_jax.models.block import BLOCKS, Block, register_block
from titans_jax.models.hope import Hope, HopeAttention
from titans_jax.models.language_model import LanguageModel
from titans_jax.models.pattern import (
    check_model,
    forward_flops_per_token,
    granularity,
    has_memory,
    training_flops_per_token,
)
from titans_jax.models.stack import (
    HEADS,
    BlockStack,
    TokenStack,
    cycles_apart,
    empty_state,
    head_of,
    make_model,
    register_head,
)
from titans_jax.models.writes import without_writes

__all__ = [
    "BLOCKS",
    "AttentionBlock",
    "Block",
    "BlockStack",
    "HEADS",
    "Hope",
    "HopeAttention",
    "LanguageModel",
    "TokenStack",
    "WindowBlock",
    "check_model",
    "cycles_apart",
    "empty_state",
    "forward_flops_per_token",
    "granularity",
    "has_memory",
    "head_of",
    "make_model",
    "register_block",
    "register_head",
    "training_flops_per_token",
    "without_writes",
]
