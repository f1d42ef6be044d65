"""The small models of studies: how they are described, counted and made equally large."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from titans_jax.config import ConfigError, MemoryConfig, ModelConfig, did_you_mean, gate_choices, memory_rule
from titans_jax.layers.cached_memory import CachedMemoryState
from titans_jax.layers.feed_forward import hidden_width
from titans_jax.layers.mamba import MambaState
from titans_jax.memory import MemoryState
from titans_jax.memory.log_linear import Levels
from titans_jax.memory.rule.presets import PRESETS
from titans_jax.models import BLOCKS, empty_state, has_memory
from titans_jax.training.run import abstract_model, count_params, with_parameters

Made = TypeVar("Made")

ATTENTION, WINDOW, MAMBA, SAMBA = "attention", "window", "mamba", "samba"
"""Names of Transformer++, of the same with a sliding window, of Mamba and of Samba, in a table, in place of a
preset."""
CONVOLVED = {"attention_conv": (ATTENTION,), "window_conv": (WINDOW,)}
"""The first two with convolutions in their attention, as the other models have them."""
WITHOUT_MEMORY = {ATTENTION: (ATTENTION,), WINDOW: (WINDOW,), **CONVOLVED, MAMBA: (MAMBA,), SAMBA: (SAMBA, WINDOW)}
"""Models without a memory, with their patterns of blocks."""
NEVER = 1e-6
"""A largest step size so small that nothing is written."""


def small_model(
    preset: str, block: str, dim: int, depth: int, head_dim: int, memory: MemoryConfig, *, segment: int | None = None
) -> ModelConfig:
    """`depth` blocks of width `dim` with this memory rule, float32, without persistent tokens; Mamba has twice as many,
    since its blocks have no feed-forward layer.

    preset: of the memory, or one of WITHOUT_MEMORY, whose pattern takes the place of `block`.
    memory: the other fields of the memory. segment: of mac, and the window of attention; None: the default's. Raises
    ConfigError where head_dim does not divide dim.
    """
    if head_dim < 1 or dim % head_dim:
        raise ConfigError(f"head_dim is {head_dim}; use a divisor of dim {dim}")
    check_unnamed(memory, preset)
    sizes = {} if segment is None else {"segment": segment, "window": segment}
    return ModelConfig(
        pattern=WITHOUT_MEMORY.get(preset, (block,)),
        dim=dim,
        depth=2 * depth if preset == MAMBA else depth,
        num_heads=dim // head_dim,
        head_dim=head_dim,
        num_persistent=0,
        attention_conv=preset in CONVOLVED,
        dtype="float32",
        memory=memory if preset in WITHOUT_MEMORY else dataclasses.replace(memory, preset=preset),
        **sizes,
    )


def check_unnamed(memory: MemoryConfig, preset: str) -> None:
    """Refuse the options of a memory that name another preset than the row of a table that they are for.

    Raises:
      ConfigError: names the preset.
    """
    if memory.preset not in (MemoryConfig().preset, preset):
        raise ConfigError(f"memory.preset is {memory.preset!r}; leave it out, as the rows of this table name presets")


def in_blocks(blocks: Sequence[str], presets: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(block, preset) for each preset in each block, repeated names once.

    A model without a memory (WITHOUT_MEMORY) has no block that holds one: it comes once, with the block "".
    """
    for block, preset in itertools.product(dict.fromkeys(blocks), dict.fromkeys(presets)):
        if preset not in WITHOUT_MEMORY:
            yield block, preset
        elif block == blocks[0]:
            yield "", preset


def bounded(preset: str) -> bool:
    """Whether a preset's inner step has the bound `MemoryConfig.max_step_size`."""
    return preset not in WITHOUT_MEMORY and gate_choices(MemoryConfig(preset=preset)).bounded


def check_presets(names: Iterable[str], others: Iterable[str] = ()) -> None:
    """Refuse a name that is none of the presets, nor one of `others`.

    Raises:
      ConfigError: names the most similar preset, or all.
    """
    every = (*PRESETS, *others)
    for name in names:
        if name not in every:
            hint = did_you_mean(name, every) or f"; use {', '.join(every)}"
            raise ConfigError(f"there is no preset {name!r} in presets{hint}")


def check_blocks(names: Iterable[str]) -> None:
    """Refuse a name that is not a block with a memory.

    Raises:
      ConfigError: names all such blocks.
    """
    every = [name for name, block in BLOCKS.items() if block.has_memory]
    for name in names:
        if name not in every:
            raise ConfigError(f"blocks has {name!r}; use {', '.join(every[:-1])} or {every[-1]}")


def same_size(models: Iterable[ModelConfig]) -> dict[ModelConfig, ModelConfig]:
    """Every model with its feed-forward layers widened until it has nearly as many parameters as the largest model of
    the same width, vocabulary and head.

    Nothing else changes, so that one memory's advantage over another does not come from its number of parameters.
    Mamba, which has no feed-forward layers, gets the number of blocks that comes nearest.
    """
    counts = {model: count_params(model) for model in dict.fromkeys(models)}
    largest: dict[tuple[int, int, str], int] = {}
    for model, count in counts.items():
        kind = (model.dim, model.vocab_size, model.head)
        largest[kind] = max(count, largest.get(kind, 0))
    sized = {}
    for model, count in counts.items():
        target = largest[model.dim, model.vocab_size, model.head]
        nearest = model if count == target else with_parameters(model, target, multiple=1)
        sized[model] = model if hidden_width(nearest) == hidden_width(model) else nearest
        if model.pattern == WITHOUT_MEMORY[MAMBA]:
            sized[model] = with_blocks(model, target)
    return sized


def with_blocks(model: ModelConfig, count: int) -> ModelConfig:
    """The model with as many blocks as bring it nearest to `count` parameters."""
    one, two = (count_params(dataclasses.replace(model, depth=depth)) for depth in (1, 2))
    return dataclasses.replace(model, depth=max(1, 1 + round((count - one) / (two - one))))


def state_floats(model: ModelConfig, sequence_length: int) -> int:
    """Floats that a layer carries from token to token for one sequence: its memories, with cached and local ones and
    the parts of log-linear ones, or the state of Mamba, or the cache of attention.

    Not counted: the last inputs of the convolutions, the same for all memories; the open chunk's keys, where steps are
    shared; the anchor of a memory with chunks of one token, which is a copy of its weights; and the tokens in the
    window of attention that blocks with attention and a memory keep, or that of Samba.
    """
    graphdef, params = abstract_model(model)
    state = jax.eval_shape(lambda params: empty_state(graphdef, params, 1, sequence_length), params)
    if has_memory(model):
        kept = [layer.kept for layer in _nodes(state, CachedMemoryState)]
        memories = _nodes(state, MemoryState)
        if memory_rule(model.memory).chunk_size == 1:
            memories = [dataclasses.replace(memory, anchor=()) for memory in memories]
        parts = [levels.parts for levels in _nodes(state, Levels)]
        state = memories, kept, parts
    elif layers := _nodes(state, MambaState):
        state = [layer.hidden for layer in layers]
    floats = [x.size for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(floats) // model.depth


def _nodes(state: Any, kind: type[Made]) -> list[Made]:
    """The nodes of a state that are of this type."""
    is_one = lambda node: isinstance(node, kind)  # noqa: E731
    return [node for node in jax.tree.leaves(state, is_leaf=is_one) if is_one(node)]


def one_graph(make: Callable[[nnx.GraphDef], Made]) -> Callable[[nnx.GraphDef], Made]:
    """`make` with a cache of one result: called with the graphdef of the last call, it returns the same object.

    A compiled function is thus shared by the models of all seeds, whose graphdef is one object.
    """
    last: list[Any] = [None, None]

    @functools.wraps(make)
    def made(graphdef: nnx.GraphDef) -> Made:
        if last[0] is not graphdef:
            last[:] = graphdef, make(graphdef)
        return last[1]

    return made
