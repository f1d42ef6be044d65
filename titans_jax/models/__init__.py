"""Models: blocks around a memory or an attention, and a language model as a cycled pattern of them."""

from titans_jax.models.language_model import BLOCKS, LanguageModel

__all__ = ["BLOCKS", "LanguageModel"]
