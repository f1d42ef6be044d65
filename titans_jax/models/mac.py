"""MAC: memory as context (Titans eq 21-25; papers.md 1.8, reading 1).

Per segment of `config.segment` tokens, x being its normalised rows and M the memory that the segments before left:

    h = M(q(x))                              read only: what the past says about every token of the segment
    y = attention(x; [P | h | x])            token i sees P, and h_j and x_j for j <= i
    m = read of the memory at q(y), after writing k(y), v(y)     token t reads its own write and none later
    o = (norm_a(y) * sigmoid(norm_b(m))) W_o

Readings taken where the paper is open or would leak the future (papers.md 1.8, 1.11): one h per token, seen causally;
the last read is per token, with its own query q(y); only the segment's rows are written, not P or h; the gate is MAG's;
h and m pass the memory layer's own norm, gate (by x and by y) and output projection; convolutions run over the whole
sequence, one stream of x for h and one of y for the write. Attention is full causal inside the segment; h_j takes the
rotary position of token j, counted from the segment's start.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from titans_jax.config import ModelConfig
from titans_jax.layers.attention import Attention, KeyValues, attend
from titans_jax.layers.documents import Documents
from titans_jax.layers.feed_forward import FeedForward
from titans_jax.layers.gated_merge import GatedMerge
from titans_jax.layers.neural_memory import MemoryLayerState, NeuralMemory, broadcast
from titans_jax.layers.norms import RMSNorm
from titans_jax.layers.persistent import PersistentTokens


class Carry(NamedTuple):
    """What crosses the border of two segments: the memory y is written to, and the convolution tail of x for h.

    The memory's position is left None: it is the index in the segment modulo chunk_size.
    """

    memory: MemoryLayerState
    tail: jax.Array


class MACState(NamedTuple):
    """What streaming carries, of constant size.

    weights: the memory's weights [b, h, ...] at the open segment's start. context: keys and values of h and x in the
    open segment, [b, 2, segment, heads, head_dim]; prefix: those of P. index: int32 scalar, tokens of it read so far.
    """

    carry: Carry
    weights: tuple[jax.Array, ...]
    context: KeyValues
    prefix: KeyValues
    index: jax.Array


class MAC(nnx.Module):
    """x += mac(norm(x)); x += feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.segment, self.chunk_size = config.segment, config.memory.chunk_size
        self.persistent = PersistentTokens(config, rngs=rngs)
        self.norm = RMSNorm(config, config.dim, rngs=rngs)
        self.attention = Attention(config, None, rngs=rngs)
        self.memory = NeuralMemory(config, rngs=rngs)
        self.merge = GatedMerge(config, rngs=rngs)
        self.feed_forward_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, state: MACState | None = None, documents: Documents | None = None
    ) -> tuple[jax.Array, MACState, dict[str, jax.Array]]:
        normed = self.norm(x)
        if state is None:
            y, state, report = self._from_segment_start(normed, self._start(x.shape[0]), self._prefix(), documents)
        elif x.shape[1] == 1:
            y, state, report = self._token(normed, state)
        else:
            y, state, report = jax.lax.cond(
                state.index == 0,
                lambda: self._from_segment_start(normed, state.carry, state.prefix),
                lambda: self._token_by_token(normed, state),
            )
        x = x + y
        return x + self.feed_forward(self.feed_forward_norm(x)), state, report

    def init_state(self, batch: int, max_length: int | None = None) -> MACState:
        return self._open_segment(self._start(batch), self._prefix())

    def _start(self, batch: int) -> Carry:
        start = self.memory.start()
        start = start._replace(memory=dataclasses.replace(start.memory, position=None))
        return Carry(*broadcast((start, start.tails[0]), batch))

    def _prefix(self) -> KeyValues:
        return self.attention.prefix(self.persistent())

    def _open_segment(self, carry: Carry, prefix: KeyValues) -> MACState:
        """The state at a segment's border."""
        batch = carry.tail.shape[0]
        shape = (batch, 2, self.segment, self.attention.num_heads, self.attention.head_dim)
        empty = jnp.zeros(shape, self.attention.dtype)
        return MACState(carry, carry.memory.memory.weights, KeyValues(empty, empty), prefix, jnp.zeros((), jnp.int32))

    def _from_segment_start(
        self, x: jax.Array, carry: Carry, prefix: KeyValues, documents: Documents | None = None
    ) -> tuple[jax.Array, MACState, dict[str, jax.Array]]:
        """x [b, t, dim] from a segment's border on: a scan over the whole segments, then what is left."""
        batch, time, _ = x.shape
        start = self._start(batch)

        def one_segment(carry: Carry, rows: tuple[jax.Array, Documents | None]):
            x, documents = rows
            mask = None
            if documents is not None:
                mask, begins = documents.mask, documents.starts[:, 0]
                carry = jax.tree.map(lambda new, old: jnp.where(_like(begins, old), new, old), start, carry)
            weights = carry.memory.memory.weights
            y, carry, context, report = self._read_and_write(x, carry, weights, prefix, mask=mask)
            return carry, (y, weights, context, report)

        def scanned(carry: Carry, rows: tuple[jax.Array, Documents | None]):
            carry, (y, _, _, report) = one_segment(carry, rows)
            return carry, (y, report)

        whole, rest = divmod(time, self.segment)
        border = whole * self.segment
        parts = []
        if whole:
            segments = jax.tree.map(lambda rows: _cut(rows[:, :border], whole), (x, documents))
            carry, (y, report) = jax.lax.scan(scanned, carry, segments)
            parts.append((_uncut(y), {n: r[-1] if n == "weight_norm" else _uncut(r) for n, r in report.items()}))
        state = self._open_segment(carry, prefix)
        if rest:
            carry, (y, weights, context, report) = one_segment(
                carry, jax.tree.map(lambda rows: rows[:, border:], (x, documents))
            )
            room = [(0, 0), (0, 0), (0, self.segment - rest), (0, 0), (0, 0)]
            context = KeyValues(*(jnp.pad(rows, room) for rows in context))
            state = MACState(carry, weights, context, prefix, jnp.full((), rest, jnp.int32))
            parts.append((y, report))
        ys, reports = zip(*parts, strict=True)
        return jnp.concatenate(ys, axis=1), state, _join(reports)

    def _token_by_token(self, x: jax.Array, state: MACState) -> tuple[jax.Array, MACState, dict[str, jax.Array]]:
        """x [b, t, dim] from anywhere in a segment on."""

        def one_token(state, token):
            y, state, report = self._token(token, state)
            return state, (y, report)

        state, (y, report) = jax.lax.scan(one_token, state, _cut(x, x.shape[1]))
        report = {n: r[-1] if n == "weight_norm" else _uncut(r) for n, r in report.items()}
        return _uncut(y), state, report

    def _token(self, x: jax.Array, state: MACState) -> tuple[jax.Array, MACState, dict[str, jax.Array]]:
        """One token, x [b, 1, dim]."""
        opens = state.index == 0
        weights = jax.tree.map(
            lambda now, before: jnp.where(opens, now, before), state.carry.memory.memory.weights, state.weights
        )
        y, carry, context, report = self._read_and_write(
            x, state.carry, weights, state.prefix, index=state.index, context=state.context
        )
        return y, MACState(carry, weights, context, state.prefix, (state.index + 1) % self.segment), report

    def _read_and_write(
        self,
        x: jax.Array,
        carry: Carry,
        weights: tuple[jax.Array, ...],
        prefix: KeyValues,
        *,
        index: int | jax.Array = 0,
        context: KeyValues | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[jax.Array, Carry, KeyValues, dict[str, jax.Array]]:
        """The equations at the top, for x [b, t, dim] inside one segment.

        Args:
          weights: the memory at the segment's start, which h reads.
          index: place of x's first token in the segment; static 0 keeps the memory's chunks static.
          context: keys and values of the segment so far; None when x begins it.
          mask: bool [b, t], False at padding.

        Returns:
          o [b, t, dim], the carry after x, the context with x, the memory's report.
        """
        batch, time, _ = x.shape
        positions = index + jnp.arange(time, dtype=jnp.int32)
        queries, tail = self.memory.query(x, carry.tail)
        h = self.memory.output(x, self.memory.retrieve(weights, queries))

        new = self.attention.key_values(jnp.stack([h, x], axis=1), positions)
        if context is None:
            context = new
        else:
            write = jax.lax.dynamic_update_slice_in_dim
            context = KeyValues(*(write(old, rows, index, axis=2) for old, rows in zip(context, new, strict=True)))
        size = context.keys.shape[2]
        past = KeyValues(*(rows.reshape(batch, 2 * size, *rows.shape[3:]) for rows in context))
        causal = jnp.arange(size, dtype=jnp.int32)[None] <= positions[:, None]
        visible = jnp.concatenate([causal, causal], axis=1)[None]
        y = self.attention.merge(attend(self.attention.queries(x, positions), past, prefix, visible))

        written = dataclasses.replace(carry.memory.memory, position=index % self.chunk_size)
        reads, memory, report = self.memory.memorize(y, carry.memory._replace(memory=written), mask=mask)
        memory = memory._replace(memory=dataclasses.replace(memory.memory, position=None))
        return self.merge(y, self.memory.output(y, reads)), Carry(memory, tail), context, report


def _cut(rows: jax.Array, pieces: int) -> jax.Array:
    """[b, t, ...] -> [pieces, b, t / pieces, ...]."""
    return jnp.moveaxis(rows.reshape(rows.shape[0], pieces, -1, *rows.shape[2:]), 1, 0)


def _uncut(pieces: jax.Array) -> jax.Array:
    """[pieces, b, n, ...] -> [b, pieces n, ...]."""
    rows = jnp.moveaxis(pieces, 0, 1)
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])


def _like(rows: jax.Array, leaf: jax.Array) -> jax.Array:
    """[b] with trailing axes, to broadcast against leaf [b, ...]."""
    return rows.reshape(-1, *(1,) * (leaf.ndim - 1))


def _join(reports: tuple[dict[str, jax.Array], ...]) -> dict[str, jax.Array]:
    """Reports of consecutive pieces: leaves [b, t] are concatenated, weight_norm is the last piece's."""
    return {
        name: last if name == "weight_norm" else jnp.concatenate([report[name] for report in reports], axis=1)
        for name, last in reports[-1].items()
    }
