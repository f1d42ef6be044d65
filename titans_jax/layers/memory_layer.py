"""The memory layer of a configuration."""

from flax import nnx

from titans_jax.config import ModelConfig
from titans_jax.layers.cached_memory import CachedMemory, CachedMemoryState
from titans_jax.layers.hierarchical_memory import HierarchicalMemory, HierarchicalState
from titans_jax.layers.log_linear_memory import LogLinearMemory
from titans_jax.layers.neural_memory import MemoryLayerState, NeuralMemory

AnyMemoryState = MemoryLayerState | CachedMemoryState | HierarchicalState
"""What a memory layer carries."""


def memory_layer(config: ModelConfig, *, rngs: nnx.Rngs) -> NeuralMemory:
    """The layer of a configuration: with caching a `CachedMemory`, with local memories a `HierarchicalMemory`, with
    levels a `LogLinearMemory`, else a `NeuralMemory`."""
    if config.memory.local_chunks:
        return HierarchicalMemory(config, rngs=rngs)
    if config.memory.log_linear_levels:
        return LogLinearMemory(config, rngs=rngs)
    return (NeuralMemory if config.memory.caching is None else CachedMemory)(config, rngs=rngs)
