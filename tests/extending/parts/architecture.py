"""A memory architecture: M(x) = x + tanh(x W_0) W_1 through half as many channels.

titans train architecture.py
"""

import dataclasses

import jax.numpy as jnp

from titans_jax import memory
from titans_jax.config import Config, MemoryConfig, ModelConfig


@memory.register_architecture()
@dataclasses.dataclass(frozen=True)
class Bottleneck(memory.architectures.Architecture):
    def shapes(self, head_dim):
        return ((head_dim, head_dim // 2), (head_dim // 2, head_dim))

    def read(self, linear, params, x):
        return x + linear(1, jnp.tanh(linear(0, x)))


config = Config(model=ModelConfig(pattern=("lmm",), memory=MemoryConfig(architecture="bottleneck")))
