"""Layers (Flax NNX) between the memory core and the models. State goes in and comes out; no layer hides any."""

from titans_jax.layers.attention import Attention
from titans_jax.layers.cached_memory import CachedMemory
from titans_jax.layers.continuum_memory import ContinuumMemory
from titans_jax.layers.convolution import CausalConvolution
from titans_jax.layers.feed_forward import FeedForward
from titans_jax.layers.gated_merge import GatedMerge
from titans_jax.layers.hierarchical_memory import HierarchicalMemory
from titans_jax.layers.log_linear_memory import LogLinearMemory
from titans_jax.layers.mamba import Mamba
from titans_jax.layers.memory_layer import memory_layer
from titans_jax.layers.neural_memory import NeuralMemory
from titans_jax.layers.norms import RMSNorm
from titans_jax.layers.persistent import PersistentTokens
from titans_jax.layers.self_referential import SelfReferentialMemory

__all__ = [
    "Attention",
    "CachedMemory",
    "CausalConvolution",
    "ContinuumMemory",
    "FeedForward",
    "GatedMerge",
    "HierarchicalMemory",
    "LogLinearMemory",
    "Mamba",
    "NeuralMemory",
    "PersistentTokens",
    "RMSNorm",
    "SelfReferentialMemory",
    "memory_layer",
]
