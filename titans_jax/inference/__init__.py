"""Text from a trained model, token by token, with a state of constant size."""

from titans_jax.inference.generate import Generator, NotFiniteLogits, decode_step, prefill
from titans_jax.inference.reading import Memory, MemoryFileError, Reader
from titans_jax.inference.sampling import Sampling, sample

__all__ = [
    "Generator",
    "Memory",
    "MemoryFileError",
    "Reader",
    "NotFiniteLogits",
    "Sampling",
    "decode_step",
    "prefill",
    "sample",
]
