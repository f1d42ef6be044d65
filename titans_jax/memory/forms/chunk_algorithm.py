"""The inputs and outputs of a form, and the interface of a chunkwise algorithm: `prepare`, which does not depend on the
start state and runs for many blocks at once, and `step`, from one block's start state to its end.

A block is one or more whole chunks that a step takes together; how many never changes the numbers.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import Matrices, MemoryState, Params, Surprise
from titans_jax.ops.backend import Backend, BlockSize
from titans_jax.ops.matmul import to_state_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MemoryInputs:
    """The inputs of a form. Leaves [time, ...]; in blocks [blocks, tokens, ...].

    queries, keys, values: [time, head_dim]. gates: completed (`gates.complete_gates`). resets: bool [time], True at a
    document's first token, or None.
    """

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    gates: Gates
    resets: jax.Array | None

    def tokens(self) -> Tokens:
        """The inputs that a step needs; the other gates are used up in `ChunkAlgorithm.prepare`."""
        gates = self.gates
        own = gates.bias_gate, gates.key_step_size, gates.value_step_size, gates.erase
        return Tokens(self.queries, self.keys, self.values, *own)


class Tokens(NamedTuple):
    """The inputs of a step, leaves [tokens, ...].

    bias_gate [tokens, 1 or head_dim], key_step_size, value_step_size, erase [tokens, head_dim]: see `Gates`; or None.
    """

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    bias_gate: jax.Array | None
    key_step_size: jax.Array | None
    value_step_size: jax.Array | None
    erase: jax.Array | None

    def error_keys(self) -> jax.Array:
        """The keys that errors are taken with, [tokens, head_dim], in the state's dtype."""
        keys = to_state_dtype(self.keys)
        return keys if self.erase is None else keys * self.erase


class ChunkResult(NamedTuple):
    """The outputs of a step. end: the state, whose anchor is that of the block's last chunk with tokens. reads:
    [tokens, head_dim]. surprise: [tokens] each, None where a kernel was not asked for it."""

    end: MemoryState
    reads: jax.Array
    surprise: Surprise | None


class MemoryOutputs(NamedTuple):
    """The outputs of a form: reads [time, head_dim], the state after the last token, the surprise [time] or None; ends:
    what is carried at the ends of segments, [segments, in, out] of every matrix, or None."""

    reads: jax.Array
    state: MemoryState
    surprise: Surprise | None
    ends: Matrices | None = None


class FormOptions(NamedTuple):
    """What the caller needs and what it recomputes, so that a kernel can save work; see `interface.memorize`."""

    with_surprise: bool
    with_anchor: bool
    rematerialised: bool
    segment: int | None = None


Form = Callable[[MemoryRule, Params, MemoryState, MemoryState | None, MemoryInputs, FormOptions], MemoryOutputs]
"""A way to run a rule: of (rule, params, state, initial, inputs, options)."""


@dataclasses.dataclass(frozen=True)
class ChunkAlgorithm(abc.ABC):
    """One way to run a rule's blocks on a backend: the same code under XLA, in a Pallas kernel and under jax.vjp."""

    rule: MemoryRule
    backend: Backend

    @classmethod
    @abc.abstractmethod
    def supports(cls, rule: MemoryRule, gates: Gates) -> bool:
        """Whether this algorithm computes the rule with these gates, exactly."""

    @property
    @abc.abstractmethod
    def block_size(self) -> BlockSize:
        """Tokens of a block, a multiple of the rule's chunk_size, and blocks of a group."""

    @abc.abstractmethod
    def prepare(self, inputs: MemoryInputs) -> Any:
        """All that does not depend on the start state, [blocks, ...], from inputs with leaves [blocks, tokens, ...]."""

    @abc.abstractmethod
    def step(
        self, params: Params, start: MemoryState, initial: MemoryState | None, tokens: Tokens, prepared: Any
    ) -> ChunkResult:
        """One block from its start state.

        start: its anchor differs from its weights only where a sequence goes on inside a chunk. initial: the state
        that documents begin with, None without resets. prepared: one block's share of what `prepare` made.
        """
