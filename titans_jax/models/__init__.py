"""Models: blocks around a memory or an attention, and a language model as a cycled pattern of them."""

from titans_jax.models import lmm, mac, mag, mal  # noqa: F401  (they register their blocks)
from titans_jax.models.attention_block import AttentionBlock, WindowBlock
from titans_jax.models.block import BLOCKS, Block, register_block
from titans_jax.models.language_model import LanguageModel
from titans_jax.models.pattern import (
    check_model,
    forward_flops_per_token,
    granularity,
    has_memory,
    training_flops_per_token,
)
from titans_jax.models.writes import without_writes

__all__ = [
    "BLOCKS",
    "AttentionBlock",
    "Block",
    "LanguageModel",
    "WindowBlock",
    "check_model",
    "forward_flops_per_token",
    "granularity",
    "has_memory",
    "register_block",
    "training_flops_per_token",
    "without_writes",
]
