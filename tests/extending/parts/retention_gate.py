"""A retention gate: decay, and after every chunk no weight larger than a limit.

titans train retention_gate.py
"""

import dataclasses

import jax.numpy as jnp

from titans_jax import memory
from titans_jax.config import Config, MemoryConfig, ModelConfig


@memory.register_retention()
@dataclasses.dataclass(frozen=True)
class Limited(memory.retentions.Decay):
    limit: float = 0.3

    def close(self, carried, opened, params):
        return tuple(jnp.clip(weights, -self.limit, self.limit) for weights in carried)


config = Config(model=ModelConfig(pattern=("lmm",), memory=MemoryConfig(retention="limited")))
