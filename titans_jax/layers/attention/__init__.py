"""Causal attention: the layer, the two operations behind it, and their implementations.

`api` says what the operations compute and which implementation runs: `xla` (plain JAX, everywhere), `splash` (JAX's TPU
kernel, with `prefix_pallas` for what every query sees), `segment_pallas` (our own, for a segment of MAC on TPU) or
`cudnn` (NVIDIA's, on GPUs).
"""

from titans_jax.layers.attention.api import causal_attention, segment_attention
from titans_jax.layers.attention.layer import Attention, AttentionState, ConvolutionTails
from titans_jax.layers.attention.rotary import rotate
from titans_jax.layers.attention.xla import KeyValues

__all__ = [
    "Attention",
    "AttentionState",
    "ConvolutionTails",
    "KeyValues",
    "causal_attention",
    "rotate",
    "segment_attention",
]
