"""Floating point operations of a model, counted from its configuration.

XLA's own count sees the body of a scan once whatever its length, so it cannot be used. A multiply and an add are two
operations. Attention counts the keys a token sees on average, so causal attention is half of a full one and a window
caps it. Work that rematerialisation repeats is not counted.
"""

import jax

from titans_jax.config import ModelConfig
from titans_jax.layers.feed_forward import hidden_width

# Peak bfloat16 operations per second of one chip, by jax's device kind.
PEAK_FLOPS = {
    "TPU v4": 2.75e14,
    "TPU v5 lite": 1.97e14,
    "TPU v5": 4.59e14,
    "TPU v6 lite": 9.2e14,
    "TPU7x": 2.307e15,
}


def training_flops_per_token(model: ModelConfig, time: int) -> float:
    """Forward and backward operations per token of rows of `time` tokens; a backward pass costs two forward passes."""
    return 3 * forward_flops_per_token(model, time)


def forward_flops_per_token(model: ModelConfig, time: int) -> float:
    """Forward operations per token: the blocks and the output head. Look-ups and elementwise work are left out."""
    blocks = [model.pattern[i % len(model.pattern)] for i in range(model.depth)]
    return sum(block_flops(kind, model, time) for kind in blocks) + 2 * model.dim * model.vocab_size


def block_flops(kind: str, model: ModelConfig, time: int) -> float:
    """Forward operations per token of one block, with its feed-forward layers."""
    memory, feed_forward = memory_layer_flops(model), 6 * model.dim * hidden_width(model)
    window = attention_flops(model, mean_causal_keys(time, model.window))
    prefix = 4 * model.num_persistent * model.dim  # scores and weighted sum over the persistent tokens
    projection = 2 * model.dim**2
    if kind == "mac":
        # Token i of a segment sees h_j and x_j for j <= i. For h: queries, a read of the memory, keys and values.
        segment = attention_flops(model, 2 * mean_causal_keys(min(time, model.segment), model.segment))
        read = 2 * model.num_heads * sum(rows * columns for rows, columns in memory_matrices(model))
        return segment + prefix + 3 * projection + read + memory + projection + feed_forward
    return {
        "lmm": memory + feed_forward,
        "mag": window + prefix + memory + projection + feed_forward,
        "mal": memory + window + prefix + feed_forward,
        "attention": attention_flops(model, mean_causal_keys(time, time)) + feed_forward,
        "window": window + feed_forward,
    }[kind]


def mean_causal_keys(time: int, window: int) -> float:
    """Keys a token of a row of `time` tokens sees on average: the last `window`, itself included."""
    seen = min(time, window)
    return (seen * (seen + 1) / 2 + (time - seen) * seen) / time


def attention_flops(model: ModelConfig, keys: float) -> float:
    """Four projections, and scores and weighted sum over `keys` keys, per token."""
    return 4 * 2 * model.dim**2 + 2 * 2 * keys * model.dim


def memory_layer_flops(model: ModelConfig) -> float:
    """Queries, keys, values, output gate and output; convolutions; gates; the memories of all heads. Per token."""
    matrices = len(memory_matrices(model))
    projections = 5 * 2 * model.dim**2
    convolutions = 3 * 2 * model.conv_size * model.dim
    gates = 2 * model.dim * model.num_heads * matrices * (3 if model.memory.momentum else 2)
    return projections + convolutions + gates + model.num_heads * memory_flops(model)


def memory_flops(model: ModelConfig) -> float:
    """Operations per token of one head's memory, chunked (papers.md 1.6.9, any depth and width).

    Keys forward; cotangents back through all but the matrices that read the keys; queries on weights and on momentum;
    updates of both; and the products between the tokens of a chunk, for both sides of every matrix.
    """
    matrices = memory_matrices(model)
    weights = sum(rows * columns for rows, columns in matrices)
    reads_keys = 2 if model.memory.architecture == "gated_mlp" else 1
    behind = sum(rows * columns for rows, columns in matrices[reads_keys:])
    states = 2 if model.memory.momentum else 1
    between = sum(model.memory.chunk_size * (rows + columns) for rows, columns in matrices)
    return 2 * (weights + behind + states * weights + states * weights + between)


def memory_matrices(model: ModelConfig) -> list[tuple[int, int]]:
    """Shapes [in, out] of one head's fast matrices, in the order they are applied."""
    narrow, wide = model.head_dim, model.memory.expansion * model.head_dim
    if model.memory.architecture == "linear":
        return [(narrow, narrow)]
    if model.memory.architecture == "gated_mlp":
        return [(narrow, wide), (narrow, wide), (wide, narrow)]
    widths = [narrow, *[wide] * (model.memory.depth - 1), narrow]
    return list(zip(widths[:-1], widths[1:], strict=True))


def peak_flops_per_second() -> float | None:
    """Peak of all devices together in bfloat16, or None where it is not known."""
    peak = PEAK_FLOPS.get(jax.devices()[0].device_kind)
    return peak * jax.device_count() if peak else None
