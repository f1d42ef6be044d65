"""What goes in and out of a form, and what a chunkwise algorithm is: a part that its start state does not enter, done
for many blocks at once, and a step from one block's start state to its end.

A block is some whole chunks that a step takes together; how many never changes the numbers.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax

from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, Params, Surprise
from titans_jax.ops.backend import Backend, BlockSize
from titans_jax.ops.matmul import to_state_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MemoryInputs:
    """What a memory reads. Leaves [time, ...]; in blocks [blocks, tokens, ...].

    queries, keys, values: [time, head_dim]. gates: completed (`gates.complete_gates`). resets: bool [time], True at a
    document's first token, or None.
    """

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    gates: Gates
    resets: jax.Array | None

    def tokens(self) -> Tokens:
        """What a step reads of them; the other gates have gone into what is prepared."""
        gates = self.gates
        own = gates.bias_gate, gates.key_step_size, gates.value_step_size, gates.erase
        return Tokens(self.queries, self.keys, self.values, *own)


class Tokens(NamedTuple):
    """What the formulas of a step read of their tokens: leaves [tokens, ...].

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
    """What a step leaves: the state, whose anchor is the start of the block's last chunk that holds tokens; reads
    [tokens, head_dim]; and the surprise, [tokens] each, None where a kernel was not asked for it."""

    end: MemoryState
    reads: jax.Array
    surprise: Surprise | None


class MemoryOutputs(NamedTuple):
    """What a form returns: reads [time, head_dim], the state after them, the surprise [time] or None."""

    reads: jax.Array
    state: MemoryState
    surprise: Surprise | None


class FormOptions(NamedTuple):
    """What a caller does not need, which a kernel need not make; see `interface.memorize`."""

    with_surprise: bool = True
    with_anchor: bool = True
    rematerialised: bool = False


@dataclasses.dataclass(frozen=True)
class ChunkAlgorithm(abc.ABC):
    """One way to run a rule's blocks on a backend: the same code under XLA, in a Pallas kernel and under jax.vjp."""

    rule: MemoryRule
    backend: Backend

    @classmethod
    @abc.abstractmethod
    def supports(cls, rule: MemoryRule, gates: Gates) -> bool:
        """Whether this algorithm is the rule with these gates, exactly."""

    @property
    @abc.abstractmethod
    def block_size(self) -> BlockSize:
        """Tokens of a block, a multiple of the rule's chunk_size, and blocks of a group."""

    @abc.abstractmethod
    def prepare(self, inputs: MemoryInputs) -> Any:
        """What the start state does not enter, of inputs with leaves [blocks, tokens, ...]; leaves [blocks, ...]."""

    @abc.abstractmethod
    def step(
        self, params: Params, start: MemoryState, initial: MemoryState | None, tokens: Tokens, prepared: Any
    ) -> ChunkResult:
        """One block from its start state.

        start: its anchor differs from its weights only where a sequence is read on inside a chunk. initial: the state
        that documents begin with, None without resets. prepared: one block's share of what `prepare` made.
        """
