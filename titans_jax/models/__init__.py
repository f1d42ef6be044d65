"""Models: blocks around a memory or an attention, and a language model as a cycled pattern of them."""

from titans_jax.models import attention_block, lmm, mac, mag, mal  # noqa: F401  (registers them)
from titans_jax.models.block import BLOCKS, Block, register_block
from titans_jax.models.language_model import LanguageModel
from titans_jax.models.pattern import (
    check_model,
    forward_flops_per_token,
    granularity,
    has_memory,
    training_flops_per_token,
)

__all__ = [
    "BLOCKS",
    "Block",
    "LanguageModel",
    "check_model",
    "forward_flops_per_token",
    "granularity",
    "has_memory",
    "register_block",
    "training_flops_per_token",
]
