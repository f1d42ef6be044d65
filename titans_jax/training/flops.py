"""Floating point operations of a model, counted from its configuration.

XLA's own count sees the body of a scan once whatever its length, so it cannot be used. A multiply and an add are two
operations. Attention counts the keys a token sees on average, so causal attention is half of a full one and a window
caps it. Work that rematerialisation repeats is not counted.
"""

import jax

from titans_jax.config import ModelConfig, memory_rule
from titans_jax.layers.feed_forward import hidden_width
from titans_jax.layers.memory_gates import GATES, channel_gates, scalar_gates
from titans_jax.memory.forms.delta_rule import TOKENS_PER_BLOCK
from titans_jax.ops.chips import peak_flops


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
    memory, choices = model.memory, GATES[model.memory.preset]
    rule = memory_rule(memory)
    # Queries, and keys and values of every inner step.
    inputs = 1 + 2 * (1 if choices.keys == "removal" else rule.algorithm.steps)
    projections = (inputs + 2) * 2 * model.dim**2
    convolutions = inputs * 2 * model.conv_size * model.dim
    scalars = sum(width for width, _ in scalar_gates(choices, rule, model.head_dim).values())
    channels = len(channel_gates(choices, rule))
    low_rank = 2 * memory.gate_rank * (model.dim + channels * model.dim) if channels else 0
    gates = 2 * model.dim * model.num_heads * scalars + low_rank
    return projections + convolutions + gates + model.num_heads * memory_flops(model)


def memory_flops(model: ModelConfig) -> float:
    """Operations per token of one head's memory, chunked (papers.md 1.6.9, any depth and width).

    Keys forward; cotangents back through all but the matrices that read the keys; queries on weights and on momentum;
    updates of both; and the products between the tokens of a chunk (or of a block, where every token is a chunk), for
    both sides of every matrix. A least-squares read repeats its two products with every iteration.
    """
    rule, matrices = memory_rule(model.memory), memory_matrices(model)
    weights = sum(rows * columns for rows, columns in matrices)
    reads_keys = 2 if model.memory.architecture == "gated_mlp" else 1
    behind = sum(rows * columns for rows, columns in matrices[reads_keys:])
    states = 2 if rule.algorithm.has_momentum else 1
    tokens = TOKENS_PER_BLOCK if rule.chunk_size == 1 else rule.chunk_size
    between = sum(tokens * (rows + columns) for rows, columns in matrices)
    reads = getattr(rule.algorithm, "iterations", 0) + 1
    return 2 * rule.algorithm.steps * (weights + behind + states * weights + reads * (states * weights + between))


def memory_matrices(model: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Shapes [in, out] of one head's fast matrices, in the order they are applied."""
    return memory_rule(model.memory).shapes(model.head_dim)


def peak_flops_per_second() -> float | None:
    """Peak of all devices together in bfloat16, or None where it is not known."""
    peak = peak_flops(jax.devices()[0].device_kind)
    return peak * jax.device_count() if peak else None
