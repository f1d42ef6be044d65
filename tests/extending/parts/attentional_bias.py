"""An attentional bias: the logarithm of the error's hyperbolic cosine, L2 near 0 and L1 far away.

titans train attentional_bias.py
"""

import dataclasses

import jax.numpy as jnp

from titans_jax import memory
from titans_jax.config import Config, MemoryConfig, ModelConfig


@memory.register_bias()
@dataclasses.dataclass(frozen=True)
class LogCosh(memory.biases.AttentionalBias):
    def __call__(self, read, value, gate=None):
        error = read - value
        return jnp.sum(jnp.logaddexp(error, -error), axis=-1)


config = Config(model=ModelConfig(pattern=("lmm",), memory=MemoryConfig(bias="log_cosh")))
