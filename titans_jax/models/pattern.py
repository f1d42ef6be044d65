"""A model's pattern of blocks as a whole: what it refuses, its operations, and the alignment of documents it needs."""

from __future__ import annotations

import math

from titans_jax.config import ConfigError, ModelConfig, did_you_mean, gate_choices, memory_rule
from titans_jax.memory.pallas.entry import supports as kernel_runs
from titans_jax.models.block import BLOCKS, Block


def blocks_of(config: ModelConfig) -> list[type[Block]]:
    """The blocks of one cycle of the pattern.

    Raises:
      ConfigError: the pattern names a block that nothing is registered under.
    """
    for kind in config.pattern:
        if kind not in BLOCKS:
            *names, last = BLOCKS
            near = did_you_mean(str(kind), BLOCKS)
            raise ConfigError(
                f"model.pattern is {config.pattern!r}; use one or more of {', '.join(names)} or {last}{near}"
            )
    return [BLOCKS[kind] for kind in config.pattern]


def check_model(config: ModelConfig) -> None:
    """Refuse an empty or unfitting pattern, what its blocks refuse, and a kernel that does not run its memories.

    Raises:
      ConfigError: one sentence with the field, its value and what would work.
    """
    if not config.pattern:
        raise ConfigError('model.pattern is empty; name at least one block, such as ("mac",)')
    blocks = blocks_of(config)
    if config.depth % len(blocks):
        raise ConfigError(
            f"model.depth is {config.depth}; use a multiple of {len(blocks)}, the length of model.pattern"
        )
    for block in blocks:
        block.check(config)
    if config.memory.form == "fused" and has_memory(config):
        rule = memory_rule(config.memory)
        if not kernel_runs(rule, gate_choices(config.memory).example(rule)):
            raise ConfigError(
                f"model.memory.form is 'fused', and no kernel runs {config.memory.preset} with chunk_size "
                f"{rule.chunk_size}; use auto or chunked"
            )


def has_memory(config: ModelConfig) -> bool:
    """Whether any block of the pattern holds a memory."""
    return any(block.has_memory for block in blocks_of(config))


def granularity(config: ModelConfig) -> int:
    """Packed documents start at multiples of this, which suits every block of the pattern."""
    return math.lcm(*(block.granularity(config) for block in blocks_of(config)))


def forward_flops_per_token(config: ModelConfig, time: int) -> float:
    """Forward operations per token of rows of `time` tokens: the blocks and the output head."""
    cycles = config.depth // len(config.pattern)
    blocks = sum(block.forward_flops(config, time) for block in blocks_of(config))
    return cycles * blocks + 2 * config.dim * config.vocab_size


def training_flops_per_token(config: ModelConfig, time: int) -> float:
    """Forward and backward operations per token of rows of `time` tokens; a backward pass costs two forward passes."""
    return 3 * forward_flops_per_token(config, time)
