"""Floating point operations that blocks are made of, counted from a configuration; all per token, forward.

XLA's own count sees the body of a scan once whatever its length, so it cannot be used. A multiply and an add are two
operations. Attention counts the keys a token sees on average, so causal attention is half of a full one and a window
caps it. Work that rematerialisation repeats is not counted, nor look-ups and elementwise work.
"""

from __future__ import annotations

import dataclasses

from titans_jax.config import (
    ModelConfig,
    cache_aggregation,
    gate_choices,
    gates_predictions,
    local_memories,
    memory_rule,
    projects_skip,
    ties_keys,
)
from titans_jax.layers.continuum_memory import level_width
from titans_jax.layers.feed_forward import hidden_width
from titans_jax.layers.key_projection import BLOCK
from titans_jax.layers.mamba import STATE, inner_width, step_rank
from titans_jax.layers.prediction_gate import LAGS
from titans_jax.memory.cache_segments import CACHE_SEGMENTS

TOKENS_PER_BLOCK = 64
"""Tokens whose products with each other are counted where every token is a chunk: those that a form takes at once."""


def projection_flops(model: ModelConfig) -> int:
    """A square projection of the residual stream."""
    return 2 * model.dim**2


def feed_forward_flops(model: ModelConfig) -> int:
    """The three projections of SwiGLU."""
    return 6 * model.dim * hidden_width(model)


def mean_causal_keys(time: int, window: int) -> float:
    """Keys a token of a row of `time` tokens sees on average: the last `window`, itself included."""
    seen = min(time, window)
    return (seen * (seen + 1) / 2 + (time - seen) * seen) / time


def attention_flops(model: ModelConfig, keys: float) -> float:
    """Four projections, the convolutions of three, and scores and weighted sum over `keys` keys."""
    convolutions = 3 * 2 * model.conv_size * model.dim if model.attention_conv else 0
    return 4 * projection_flops(model) + convolutions + 2 * 2 * keys * model.dim


def mamba_flops(model: ModelConfig) -> int:
    """Inputs, gate and output; what the scan does, and the steps of all channels; the convolution; and the scan, by
    entry of the state: its exponent, what is written, decay and addition, and the read."""
    channels, rank = inner_width(model), step_rank(model)
    maps = 3 * model.dim + rank + 2 * STATE + rank
    scan = STATE * (1 + 1 + 2 + 2)
    return channels * (2 * maps + 2 * model.conv_size + scan)


def merge_flops(model: ModelConfig) -> int:
    """The projection after attention and memory with `merge` "product" (`layers.GatedMerge`)."""
    return projection_flops(model) * (model.merge == "product")


def persistent_flops(model: ModelConfig) -> int:
    """An attention's scores and weighted sum over the persistent tokens."""
    return 4 * model.num_persistent * model.dim


def memory_layer_flops(model: ModelConfig) -> float:
    """Queries, keys, values, output gate and output; convolutions; gates; the memories of all heads, local ones
    and parts too."""
    rule, choices = memory_rule(model.memory), gate_choices(model.memory)
    steps, rank = choices.projected_steps(rule), choices.key_rank(rule)
    inputs = rank + steps * (rank + 1)  # queries, and keys and values of every inner step
    inputs += projects_skip(model.memory) - ties_keys(model.memory) * rank
    projections = (inputs + 2) * projection_flops(model)
    convolutions = inputs * 2 * model.conv_size * model.dim
    ranks = 4 * rank**2 * model.dim * (rank > 1)  # what is read of the writes of the other ranks
    predictions = 2 * (LAGS + 3) * model.num_heads * model.head_dim * gates_predictions(model.memory)
    memories = gated_memory_flops(model) + local_flops(model) + level_flops(model)
    return projections + convolutions + ranks + predictions + memories


def gated_memory_flops(model: ModelConfig) -> float:
    """The memories of all heads, and their gates."""
    rule, choices = memory_rule(model.memory), gate_choices(model.memory)
    scalars = sum(width for width, _ in choices.scalar_logits(rule, model.head_dim).values())
    scalars += 2 * choices.preconditioned + 3 * choices.rotated_keys
    by_channel = channel_gates_flops(model, len(choices.channel_logits(rule)))
    return 2 * model.dim * model.num_heads * scalars + by_channel + model.num_heads * memory_flops(model)


def channel_gates_flops(model: ModelConfig, gates: int) -> int:
    """Channel-wise gates, `gates` of them: full maps, or low-rank ones whose first map is shared or each gate's own."""
    rank = model.memory.gate_rank
    if rank is None:
        return 2 * gates * model.dim**2
    down = min(gates, 1) if model.memory.gate_maps == "shared" else gates
    return 2 * rank * model.dim * (down + gates)


def local_flops(model: ModelConfig) -> float:
    """Local memories with their gates, and the projection of queries, with its products between the tokens of a block;
    0 without them."""
    memories = local_memories(model.memory)
    if not memories:
        return 0.0
    block = min(BLOCK, model.memory.shard)
    projection = model.num_heads * (4 * model.head_dim**2 + 4 * block * model.head_dim)
    return projection + sum(gated_memory_flops(dataclasses.replace(model, memory=each)) for each in memories)


def level_flops(model: ModelConfig) -> float:
    """What a memory in parts (`log_linear_levels`) costs more: one more run of it; for every part a read, and making
    and adding what a block of head_dim tokens changes; the block's own values; and the scales. 0 with one part."""
    levels, heads = model.memory.log_linear_levels, model.num_heads
    if not levels:
        return 0.0
    matrix = 2 * model.head_dim**2
    return heads * (memory_flops(model) + (3 * levels + 1) * matrix + 2 * model.dim * (levels + 1))


def caching_flops(model: ModelConfig, time: int) -> float:
    """Reads of kept memories, of which a row of `time` tokens sees its earlier segments' (`CacheSegments`), and the
    projection of scores; 0 without caching. Training also reads the memories that sparse reads leave out."""
    aggregation = cache_aggregation(model.memory)
    if aggregation is None:
        return 0.0
    whole, rest = divmod(time, model.memory.cache_segment)
    seen = CACHE_SEGMENTS[model.memory.cache_segmentation].count
    kept = (model.memory.cache_segment * sum(map(seen, range(whole))) + rest * seen(whole)) / time
    kept *= gate_choices(model.memory).key_rank(memory_rule(model.memory))  # each query of a token reads
    return kept * memory_read_flops(model) + projection_flops(model) * aggregation.scored


def self_referential_flops(model: ModelConfig) -> float:
    """Queries, output gate and output; convolutions; two gates; in every head five memories that are written. One is
    read after every token's write; at the chunk's start, four are read with the token and all five with its value."""
    reads, writes = memory_read_flops(model), model.num_heads * memory_flops(model)
    layer = 3 * projection_flops(model) + 2 * 2 * model.conv_size * model.dim + 2 * 2 * model.dim
    return layer + 5 * writes - 4 * reads + (4 + 5) * reads


def continuum_flops(model: ModelConfig) -> float:
    """Values and gates; of every level a read, the cotangents behind it, and the update of two matrices; that reads and
    keys are the same product is left to the compiler."""
    levels = len(model.memory.continuum_chunks)
    matrices = 2 * 2 * model.dim * level_width(model)
    gates = 2 * 2 * model.dim * levels
    return projection_flops(model) + gates + levels * (matrices + matrices / 2 + matrices)


def memory_read_flops(model: ModelConfig) -> int:
    """A read of the memories of all heads that writes nothing."""
    return 2 * model.num_heads * sum(rows * columns for rows, columns in memory_matrices(model))


def memory_flops(model: ModelConfig) -> int:
    """One head's memory in the chunked form, any depth and width.

    Counted are keys forward; cotangents back through all but the matrices that read the keys; queries on weights and on
    momentum; updates of both; and the products between the tokens of a chunk (or of a block of tokens, where every
    token is a chunk), for both sides of every matrix. A stale memory's queries are on weights only, and there are no
    products between its tokens. With a window, its tokens are keys once more in the chunk after theirs. A least-squares
    read repeats its two products with every iteration. A rule that steps by chunks writes to the momentum alone, reads
    no token of its own chunk, and makes its step once a chunk.
    """
    rule, matrices = memory_rule(model.memory), memory_matrices(model)
    weights = sum(rows * columns for rows, columns in matrices)
    behind = sum(rows * columns for rows, columns in matrices[rule.architecture.input_matrices :])
    states = 2 if rule.algorithm.has_momentum else 1
    tokens = TOKENS_PER_BLOCK if rule.chunk_size == 1 else rule.chunk_size
    written = tokens + rule.algorithm.window - 1  # in every chunk
    between = sum(written * (rows + columns) for rows, columns in matrices)
    if rule.algorithm.steps_by_chunk:
        keys, steps = (weights + behind + weights) * written, sum(newton_schulz_products(*shape) for shape in matrices)
        return 2 * (weights + (keys + steps) // tokens)
    reads, keys = rule.algorithm.products_per_read, (weights + behind + states * weights) * written // tokens
    read = weights if rule.stale else states * weights + between
    return 2 * rule.algorithm.steps * (keys + reads * read)


def newton_schulz_products(rows: int, columns: int) -> int:
    """Multiplications of five steps of Newton-Schulz on a matrix."""
    narrow, wide = min(rows, columns), max(rows, columns)
    return 5 * narrow**2 * (2 * wide + narrow)


def memory_matrices(model: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Shapes [in, out] of one head's fast matrices, in the order they are applied."""
    return memory_rule(model.memory).shapes(model.head_dim)
