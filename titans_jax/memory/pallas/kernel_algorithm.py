"""The arrays of a kernel, and what a chunkwise algorithm needs to run inside one: gates are packed in rows outside, and
its prepared part is made from them inside. The step itself is the chunked form's own.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.chunk_algorithm import ChunkAlgorithm, Tokens
from titans_jax.memory.forms.scan_chunks import BlockLayout
from titans_jax.memory.gates import CHANNEL_GATES, Gates
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import Matrices, MemoryState, Params
from titans_jax.ops import backend


class Chunks(NamedTuple):
    """The inputs of the steps over chunks, leaves [n, chunks, rows, columns], n heads of any sequences.

    rows: the scalar gates, padding and flags (`gate_rows`), in one array because a small one fills a whole tile of
    memory. bias_gate: [.., tokens, 1 or head_dim] or None. log_key_retention .. erase: [.., tokens, head_dim] or None;
    retentions are 0 at padding.
    """

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    rows: jax.Array
    bias_gate: jax.Array | None
    log_key_retention: jax.Array | None
    log_value_retention: jax.Array | None
    key_step_size: jax.Array | None
    value_step_size: jax.Array | None
    erase: jax.Array | None


TOKENS = ("queries", "keys", "values", *CHANNEL_GATES)
"""Leaves of `Chunks` with head_dim numbers a token."""


class HeadState(NamedTuple):
    """The state of a head that a kernel carries from chunk to chunk: one matrix per fast weight each."""

    weights: Matrices
    momentum: Matrices


class Heads(NamedTuple):
    """The inputs that all chunks of a head share, leaves [n, rows, columns].

    slow: slow parameters, vectors as rows; a number that belongs to a matrix fills a row. start: the state before the
    first token. initial: the state that documents start with, None without resets. anchor: where gradients of the first
    chunk are taken, None if at `start`.
    """

    slow: dict[str, jax.Array | tuple]
    start: HeadState
    anchor: Matrices | None
    initial: HeadState | None


class Results(NamedTuple):
    """reads, surprise: [n, chunks, tokens, head_dim or 2]; end: the state after the last chunk; anchor: the weights at
    the start of the chunk that stays open; ends: the weights after every segment, [n, segments, rows, columns].
    surprise, anchor and ends are None where they are not asked for."""

    reads: jax.Array
    surprise: jax.Array | None
    end: HeadState
    anchor: Matrices | None
    ends: Matrices | None


class Asked(NamedTuple):
    """Which outputs a kernel is asked for, besides reads and the last state. segment: chunks after which the weights
    are, or None."""

    surprise: bool
    anchor: bool
    segment: int | None


class UnpackedChunk(NamedTuple):
    """One chunk of one head, as a step takes it. is_open: 1 for the chunk that stays open, else 0, [1, 1]; or None."""

    tokens: Tokens
    prepared: Any
    is_open: jax.Array | None


@dataclasses.dataclass(frozen=True)
class KernelAlgorithm(abc.ABC):
    """A chunkwise algorithm inside a kernel."""

    rule: MemoryRule
    algorithm: ClassVar[type[ChunkAlgorithm]]

    @classmethod
    @abc.abstractmethod
    def supports(cls, rule: MemoryRule, gates: Gates) -> bool:
        """Whether a kernel runs the rule with these gates by this algorithm."""

    @property
    @abc.abstractmethod
    def block_tokens(self) -> int:
        """Tokens that a step takes, a multiple of the rule's chunk_size."""

    @abc.abstractmethod
    def pack(self, layout: BlockLayout, asked: Asked) -> Chunks:
        """The kernel's inputs, from one head laid out in blocks."""

    @abc.abstractmethod
    def unpack(self, chunk: Chunks, asked: Asked, restarts: bool) -> UnpackedChunk:
        """The inverse of `pack` for one chunk, inside the kernel. restarts: documents may start."""

    def step(
        self,
        asked: Asked,
        slow: Params,
        state: HeadState,
        anchor: Matrices | None,
        initial: HeadState | None,
        chunk: Chunks,
    ) -> tuple[HeadState, Matrices | None, jax.Array, jax.Array | None]:
        """One chunk of one head, leaves without their leading axes: (state, anchor, reads, surprise) as `Results`."""
        tokens, prepared, is_open = self.unpack(chunk, asked, initial is not None)
        start = MemoryState(*state, state.weights if anchor is None else anchor, 0)
        fresh = None if initial is None else MemoryState(*initial, initial.weights, 0)
        end, reads, surprise = self.chunkwise.step(slow, start, fresh, tokens, prepared)
        # Only the chunk that stays open has a 1; the sum over chunks is its anchor.
        kept = tuple(is_open * w for w in end.anchor) if asked.anchor else None
        measured = jnp.stack([surprise.loss, surprise.cotangent_norm], axis=1) if asked.surprise else None
        return HeadState(end.weights, end.momentum), kept, reads, measured

    @property
    def chunkwise(self) -> ChunkAlgorithm:
        """The algorithm on the backend of kernels."""
        return self.algorithm(self.rule, backend.PALLAS)


def tokens_of(chunk: Chunks) -> Tokens:
    """The leaves of a chunk that a step takes."""
    own = chunk.bias_gate, chunk.key_step_size, chunk.value_step_size, chunk.erase
    return Tokens(chunk.queries, chunk.keys, chunk.values, *own)


def chunks_of(layout: BlockLayout, rows: jax.Array) -> Chunks:
    """The inputs of a layout as `Chunks`, with packed rows."""
    inputs, gates = layout.inputs, layout.inputs.gates
    channels = {name: getattr(gates, name) for name in CHANNEL_GATES}
    return Chunks(inputs.queries, inputs.keys, inputs.values, rows, gates.bias_gate, **channels)
