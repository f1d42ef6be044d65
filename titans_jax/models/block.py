"""The block contract, and blocks by name.

    @register_block("lmm")
    class LMM(Block):
        def __init__(self, config, *, rngs): ...
        def __call__(self, x, state=None, documents=None): ...     # -> x, state, report
        def init_state(self, batch, max_length=None): ...

A model is a pattern of blocks cycled over its depth (`titans_jax.models.language_model`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from titans_jax.config import ModelConfig, memory_rule
from titans_jax.layers.document_layout import Documents
from titans_jax.memory import MemoryState
from titans_jax.registry import Registry


class Block(nnx.Module):
    """One layer of a model with its residual connections, [batch, time, dim] -> [batch, time, dim].

    has_memory: the block holds a memory of `config.memory`, and reports on it. added: its parts that may be missing in
    the run that `training.init_from` names; they are then drawn anew.
    """

    has_memory = False
    added: tuple[str, ...] = ()

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """The block's parameters, drawn from `rngs`."""
        raise NotImplementedError

    def __call__(
        self, x: jax.Array, state: Any = None, documents: Documents | None = None
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        """Read x, from the start of a sequence or from where a state ends.

        Any split of a sequence into calls that pass the state on gives the outputs of one call, to rounding; token t of
        the output depends on tokens <= t only.

        Args:
          x: [batch, time, dim].
          state: of the tokens before, as `init_state` or a call made it; None is the start of a sequence.
          documents: packed documents, which do not see each other and start at multiples of `granularity(config)`; None
            is one document a row. Never given with a state.

        Returns:
          x [batch, time, dim]; the state after it, of no use after documents (None where there is none); a report of
          the block's memory, {name: [batch, time] or [batch]}, empty without one.
        """
        raise NotImplementedError

    def init_state(self, batch: int, max_length: int | None = None) -> Any:
        """The state before the first token of `batch` rows: a pytree of arrays only, whose shapes no call changes.

        max_length: tokens to make room for, where a state grows with what is read.
        Raises ValueError where the block needs max_length and it is None.
        """
        raise NotImplementedError

    @staticmethod
    def closed(state: Any) -> Any:
        """A state after a multiple of `granularity(config)` tokens, marked so before compilation: unless a block
        overrides this, its memories' positions become a static 0, a chunk's start."""
        is_memory = lambda node: isinstance(node, MemoryState)  # noqa: E731
        start = lambda node: dataclasses.replace(node, position=0) if is_memory(node) else node  # noqa: E731
        return jax.tree.map(start, state, is_leaf=is_memory)

    @classmethod
    def forward_flops(cls, config: ModelConfig, time: int) -> float:
        """Forward operations per token of rows of `time` tokens, a multiply and an add being two.

        Unless a block overrides this, two for each of its parameters.
        """
        block = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0)))
        return 2.0 * sum(leaf.size for leaf in jax.tree.leaves(nnx.state(block, nnx.Param)))

    @classmethod
    def granularity(cls, config: ModelConfig) -> int:
        """Packed documents start at multiples of this: a chunk of the memory, if there is one, else 1; where memories
        are kept, a segment of `cache_segment` tokens, and where there are local ones, the longer of chunk and shard."""
        if not cls.has_memory:
            return 1
        chunk_size = memory_rule(config.memory).chunk_size
        if config.memory.local_chunks:
            return max(chunk_size, config.memory.shard)
        return chunk_size if config.memory.caching is None else config.memory.cache_segment

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Refuse a configuration that the block cannot be built from.

        Raises:
          ConfigError: one sentence with the field, its value and what would work.
        """


BLOCKS: Registry[type[Block]] = Registry("block")
"""Blocks by name."""

register_block: Callable[..., Callable[[type[Block]], type[Block]]] = BLOCKS.register
