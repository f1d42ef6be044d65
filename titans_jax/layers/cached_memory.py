"""Memory Caching as a layer: a neural memory, read together with copies of it from the ends of earlier segments.

    shares_t = what scores of the kept memories say                     layers/cache_shares.py
    reads_t = aggregation of M(1)(q_t), .., M(s-1)(q_t), M_t(s)(q_t)    titans_jax.memory.caching
    y = (rms_norm(reads) * silu(x W_g)) W_o                             as without caches

A whole row is written and then read at once, with gradients through all that was kept.
Streaming keeps memories in an array of fixed size. Which ones a token reads, all of them or logarithmically many, is
decided in memory/cache_segments.py. How we read the paper: memory/later_models.md, Memory Caching.

Shapes: b batch, t time, h heads, d head_dim, n kept memories, r queries of a token, where it has several (Mamba-3's
MIMO).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from titans_jax import memory
from titans_jax.config import ModelConfig, cache_aggregation
from titans_jax.layers.cache_shares import (
    Asked,
    at_ends,
    chosen_alone,
    means_of_pieces,
    numbered,
    opened_by,
    running_means,
    shares_of,
)
from titans_jax.layers.document_layout import Documents, aligned
from titans_jax.layers.head_reads import READS
from titans_jax.layers.memory_report import memory_report, weights_read
from titans_jax.layers.neural_memory import MemoryLayerState, NeuralMemory, broadcast
from titans_jax.layers.prediction_gate import Reads
from titans_jax.layers.projections import projection
from titans_jax.layers.segments import from_segments, report_of_tokens
from titans_jax.memory.cache_segments import CACHE_SEGMENTS, Extended, Levels
from titans_jax.memory.caching import read_together
from titans_jax.memory.state import Carried, Matrices
from titans_jax.ops.matmul import wide_dtype


class Pools(NamedTuple):
    """Inputs of the scores: the mean input of the piece that each kept memory ends [b, slots, dim], the sum of the open
    segment's inputs [b, dim], and u of the open chunk's first token [b, dim]."""

    means: jax.Array
    total: jax.Array
    opening: jax.Array


class CachedMemoryState(NamedTuple):
    """What streaming carries.

    running: the memory that is written. kept: weights as they are read at the ends of segments, [b, slots, h, in, out]
    of every fast matrix. pools: None where there are no scores. first: the state that every segment begins with, None
    where a segment continues from the one before. tokens: int32 scalar, the number of tokens read.
    """

    running: MemoryLayerState
    kept: Matrices
    pools: Pools | None
    first: Carried | None
    tokens: jax.Array


class Segments(NamedTuple):
    """Results of writing tokens from a segment's start on: queries [b, t, h, (r,) d], the features that they are among,
    the running memory's reads [b, t, h, (r,) d], the weights at the ends of the whole segments [b, n, h, in, out], the
    state of the running memory, a report."""

    queries: jax.Array
    features: dict[str, jax.Array]
    reads: jax.Array
    ends: Matrices
    after: MemoryLayerState
    report: dict[str, jax.Array]


class CachedMemory(NeuralMemory):
    """A `NeuralMemory`, read together with copies of it from the ends of earlier segments, [b, t, dim] -> [b, t, dim].

    `memorize` and `retrieve` are those of the running memory alone. Without `writes` all memories, kept ones too, stay
    at the start, so that with shares that sum to 1 the reads are those of a memory without caches.
    """

    provides = ("caching",)

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.aggregation = cache_aggregation(config.memory)
        self.segment, self.restarts = config.memory.cache_segment, config.memory.cache_restart
        self.counted = config.memory.cache_counted
        self.cut = CACHE_SEGMENTS[config.memory.cache_segmentation]
        axes = ("embed", None) if self.aggregation.scored else None
        self.score = axes and projection(config, config.dim, config.dim, axes, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        state: CachedMemoryState | None = None,
        documents: Documents | None = None,
        persistent: jax.Array | None = None,
    ) -> tuple[jax.Array, CachedMemoryState | None, dict[str, jax.Array]]:
        """Args and results are those of `NeuralMemory`, except that documents must start at multiples of a segment
        (else all reads of the row are NaN), and that a call without a state returns None for it. Reads in segments that
        the state has no room for are NaN.

        Raises:
          ValueError: x alone is longer than what the state has room for.
        """
        if state is None:
            reads, report = self._row(x, self.start(persistent), documents)
            return self.read_out(x, reads), None, report
        time, room = x.shape[1], (self.cut.room(state.kept[0].shape[1]) + 1) * self.segment
        if time > room:
            raise ValueError(
                f"x holds {time} tokens, and the state has room for {room}: give init_state a longer max_length"
            )
        at_start = isinstance(state.running.memory.position, int)
        if at_start:
            reads, state, report = self._from_start(x, state)
        elif time == 1:
            reads, state, report = self._inside(x, state)
        else:
            position = state.tokens % self.segment
            one_by_one = functools.partial(self._token_by_token, x, state)
            if time <= self.segment:
                fits, at_once = position + time <= self.segment, functools.partial(self._inside, x, state)
            else:
                fits, at_once = position == 0, functools.partial(self._from_start, x, state)
            reads, state, report = jax.lax.cond(fits, at_once, one_by_one)
        return self.read_out(x, reads), state, report

    def init_state(
        self, batch: int, persistent: jax.Array | None = None, max_length: int | None = None
    ) -> CachedMemoryState:
        """An empty state with room for the segments of `max_length` tokens.

        Raises:
          ValueError: max_length is None.
        """
        if max_length is None:
            raise ValueError("max_length is None; a memory is kept every segment, so give the longest length to come")
        slots = max(1, self.cut.slots((max_length - 1) // self.segment))
        running = super().init_state(batch, persistent)
        weights = self._as_read(running.memory.weights)
        kept = tuple(jnp.zeros((batch, slots, *w.shape[1:]), w.dtype) for w in weights)
        pools = None
        if self.score is not None:
            dim, dtype = self.score.in_features, wide_dtype(self.dtype)
            empty = jnp.zeros((batch, dim), dtype)
            pools = Pools(jnp.zeros((batch, slots, dim), dtype), empty, empty.astype(self.dtype))
        first = Carried.of(running.memory) if self.restarts else None
        return CachedMemoryState(running, kept, pools, first, jnp.zeros((), jnp.int32))

    # Writing

    def _segments(
        self,
        x: jax.Array,
        running: MemoryLayerState,
        first: Carried | None,
        documents: Documents | None = None,
        start: MemoryLayerState | None = None,
    ) -> Segments:
        """Write x [b, t, dim] from a segment's start on: the whole segments, then the rest.

        Args:
          first: what a document begins with, and with `cache_restart` every segment.
          start: the state before a document's first token, without the batch axis; with documents.
        """
        features, running = self.features(x, running, documents, start)
        batch, time = x.shape[:2]
        whole = time - time % self.segment
        weights = running.memory.weights
        if not self.writes:
            count = whole // self.segment
            ends = tuple(jnp.broadcast_to(w[:, None], (batch, count, *w.shape[1:])) for w in self._as_read(weights))
            queries = features["query"]
            return Segments(queries, features, self.retrieve(weights, queries), ends, running, {})
        inputs, running = self.head_inputs(x, features, running, documents, start)
        if self.restarts:
            begins = jnp.arange(time, dtype=jnp.int32) % self.segment == 0
            inputs = inputs._replace(resets=jnp.broadcast_to(begins[None], (batch, time)))
        begin = None if inputs.resets is None else first.state()
        after, parts, ends = running.memory, [], tuple(w[:, :, None][:, :, :0] for w in weights)
        if whole:
            here = jax.tree.map(lambda leaf: leaf[:, :whole], inputs)
            reads, after, surprise, ends = self._memorize(after, here, begin, segment=self.segment)
            after = memory.start_chunk(after)
            parts.append((reads, surprise))
        if whole < time:
            rest = jax.tree.map(lambda leaf: leaf[:, whole:], inputs)
            reads, after, surprise, _ = self._memorize(after, rest, begin, read_on=True)
            parts.append((reads, surprise))
        reads, surprise = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *parts)
        report = memory_report(self.rule, self.params(), inputs.gates, inputs.values, surprise, after.weights)
        ends = jax.vmap(self._as_read, in_axes=2, out_axes=1)(ends)
        # Named, or a backward pass would write the row once more for them.
        kept, ends = self.kept(self.whole_reads(inputs, reads)).astype(reads.dtype), checkpoint_name(ends, READS)
        return Segments(self.own_queries(inputs), features, kept, ends, running._replace(memory=after), report)

    # Reading a whole row

    def _row(
        self, x: jax.Array, start: MemoryLayerState, documents: Documents | None
    ) -> tuple[Reads, dict[str, jax.Array]]:
        """Reads of x [b, t, dim] from the start of a row, and a report."""
        batch, time = x.shape[:2]
        running = broadcast(start, batch)
        first = Carried.of(running.memory)
        queries, features, reads, kept, running, report = self._segments(x, running, first, documents, start)
        count = (time - 1) // self.segment  # the last segment's end is read by no token of the row
        if count:
            number, same = numbered(count + 1, self.segment, documents)
            ends, slots, asked = jnp.broadcast_to(number[:, :-1] + 1, (batch, count)), self.cut.slots(count), None
            read = same & self.cut.read(ends[:, None], number[..., None])
            if self.score is not None:
                u, means = self.score(x), running_means(x, self.segment)
                before = jnp.zeros((batch, slots, x.shape[-1]), means.dtype)
                pieces = means_of_pieces(self.cut, before, at_ends(means, self.segment)[:, :count], ends)
                asked = Asked(u, self._opened(u), pieces, means)
            levels = self._levels(read, ends, slots, first=True)
            kept = tuple(w[:, :count] for w in kept)
            shares = self._shares(self._of_tokens(read, time), asked)
            reads = self._together(kept, shares, queries, reads, self.segment, levels)
        if documents is not None:
            whole = aligned(documents, self.segment).reshape(-1, *[1] * (reads.ndim - 1))
            reads = jnp.where(whole, reads, jnp.nan)
        reads, _ = self.complete(reads, features, running, documents, start)
        return reads, report

    # Streaming

    def _inside(self, x: jax.Array, state: CachedMemoryState) -> tuple[Reads, CachedMemoryState, dict[str, jax.Array]]:
        """x [b, t, dim] whose last token is at most the last of the open segment."""
        batch, time = x.shape[:2]
        number, position, slots = state.tokens // self.segment, state.tokens % self.segment, state.kept[0].shape[1]
        running = state.running
        if state.first is not None:
            now = running.memory
            carry = jax.tree.map(functools.partial(jnp.where, position == 0), state.first, Carried.of(now))
            anchor = jax.tree.map(functools.partial(jnp.where, position == 0), state.first.weights, now.anchor)
            running = running._replace(memory=dataclasses.replace(carry.state(), anchor=anchor, position=now.position))
        features, running = self.features(x, running)
        if self.writes:
            inputs, running = self.head_inputs(x, features, running)
            reads, running, report = self.write(inputs, running)
            queries = self.own_queries(inputs)
        else:
            queries, report = features["query"], {}
            reads = self.retrieve(running.memory.weights, queries)
        is_over = position + time == self.segment
        slot = jnp.where(is_over, self.cut.slot(number + 1), slots)
        put = lambda old, new: old.at[:, slot].set(new, mode="drop")  # noqa: E731
        kept, asked, pools = jax.tree.map(put, state.kept, self._as_read(running.memory.weights)), None, None
        if self.score is not None:
            inputs = x.astype(state.pools.total.dtype)
            sums = state.pools.total[:, None] + jnp.cumsum(inputs, axis=1)
            counts = position + 1 + jnp.arange(time, dtype=jnp.int32)
            means = sums / counts.astype(sums.dtype)[None, :, None]
            piece = means_of_pieces(self.cut, state.pools.means, means[:, -1:], number[None, None] + 1)
            kept_means, u = put(state.pools.means, piece[:, 0]), self.score(x)
            opening = self._opened(u, position, state.pools.opening)
            pools = Pools(kept_means, jnp.where(is_over, 0, sums[:, -1]), opening[:, -1])
            asked = Asked(u, opening, kept_means, means)
        # No token of the segment that ends here reads the new kept memory, nor the one that it replaces.
        visible = jnp.broadcast_to(self.cut.held(number, slots) > 0, (batch, time, slots))
        chosen = chosen_alone(self.aggregation, kept, self._shares(visible, asked))
        reads = self._within_room(number, slots, self._together(*chosen, queries, reads))
        reads, running = self.complete(reads, features, running)
        return reads, self._state(running, kept, pools, state.first, state.tokens + time), report

    def _from_start(
        self, x: jax.Array, state: CachedMemoryState
    ) -> tuple[Reads, CachedMemoryState, dict[str, jax.Array]]:
        """x [b, t, dim] from a segment's start on."""
        batch, time = x.shape[:2]
        whole = time // self.segment
        running = state.running
        running = running._replace(memory=dataclasses.replace(running.memory, position=0))
        queries, features, reads, ends, running, report = self._segments(x, running, state.first)
        number, slots = state.tokens // self.segment, state.kept[0].shape[1]
        new, asked, pools = number + jnp.arange(1, whole + 1, dtype=jnp.int32), None, None
        means = pieces = means_before = None
        if self.score is not None:
            means, means_before = running_means(x, self.segment), state.pools.means
            pieces = means_of_pieces(self.cut, means_before, at_ends(means, self.segment), new[None])
        extend = jax.vmap(self.cut.extend, in_axes=(0, 0, None), out_axes=Extended(0, 0, None))
        (kept, kept_means), (readable, readable_means), ends = extend(
            (state.kept, means_before), (ends, pieces), number
        )
        if self.score is not None:
            u = self.score(x)
            opening = self._opened(u)
            total = jnp.sum(x[:, whole * self.segment :].astype(means.dtype), axis=1)
            pools, asked = Pools(kept_means, total, opening[:, -1]), Asked(u, opening, readable_means, means)
        numbers = number + jnp.arange(-(-time // self.segment), dtype=jnp.int32)
        read = jnp.broadcast_to(self.cut.read(ends[None], numbers[:, None]), (batch, len(numbers), len(ends)))
        levels = self._levels(read, jnp.broadcast_to(ends, (batch, len(ends))), slots, first=False)
        shares = self._shares(self._of_tokens(read, time), asked)
        reads = self._together(readable, shares, queries, reads, None if levels is None else self.segment, levels)
        reads = self._within_room(self._of_tokens(numbers[None], time), slots, reads)
        reads, running = self.complete(reads, features, running)
        return reads, self._state(running, kept, pools, state.first, state.tokens + time), report

    def _token_by_token(
        self, x: jax.Array, state: CachedMemoryState
    ) -> tuple[Reads, CachedMemoryState, dict[str, jax.Array]]:
        """x [b, t, dim] from anywhere in a segment on."""

        def one_token(state: CachedMemoryState, token: jax.Array) -> tuple[CachedMemoryState, Any]:
            reads, state, report = self._inside(token[:, None], state)
            return state, (reads, report)

        state, (reads, report) = jax.lax.scan(one_token, state, jnp.moveaxis(x, 1, 0))
        return jax.tree.map(from_segments, reads), state, report_of_tokens(report)  # segments of one token

    def _within_room(self, number: jax.Array, slots: int, reads: jax.Array) -> jax.Array:
        """Reads [b, t, h, (r,) d] of tokens after `number` whole segments ([] or [1, t]), NaN where there are too few
        slots."""
        fits = number <= self.cut.room(slots)
        return jnp.where(fits.reshape(1, -1, *[1] * (reads.ndim - 2)), reads, jnp.nan)

    def _state(
        self,
        running: MemoryLayerState,
        kept: Matrices,
        pools: Pools | None,
        first: Carried | None,
        tokens: jax.Array,
    ) -> CachedMemoryState:
        position = jnp.asarray(running.memory.position, jnp.int32)
        running = running._replace(memory=dataclasses.replace(running.memory, position=position))
        return CachedMemoryState(running, kept, pools, first, tokens)

    # What is read, and how much of it

    def _of_tokens(self, segments: jax.Array, time: int) -> jax.Array:
        """[b, s, ...] of segments as [b, time, ...] of their tokens."""
        return jnp.repeat(segments, self.segment, axis=1)[:, :time]

    def _levels(self, read: jax.Array, ends: jax.Array, slots: int, first: bool) -> Levels | None:
        """`CacheSegments.levels` of a batch, [b, ...]."""
        return jax.vmap(functools.partial(self.cut.levels, slots=slots, first=first))(read, ends)

    def _opened(self, u: jax.Array, position: int | jax.Array = 0, carried: jax.Array | None = None) -> jax.Array:
        """See `opened_by`."""
        chunk = max(1, self.rule.chunk_size // self.rule.algorithm.steps)
        return opened_by(u, chunk, self.segment, position, carried)

    def _shares(self, visible: jax.Array, asked: Asked | None) -> jax.Array:
        """See `shares_of`."""
        return shares_of(self.aggregation, visible, asked, self.dtype, self.counted)

    def _together(
        self,
        kept: Matrices,
        shares: jax.Array,
        queries: jax.Array,
        reads: jax.Array,
        segment: int | None = None,
        levels: Levels | None = None,
    ) -> jax.Array:
        """`read_together` of a batch of heads, [b, t, h, (r,) d]; all queries of a token read with the same shares."""

        def one(params, kept, shares, queries, reads, levels):
            def together(queries, reads):
                return read_together(self.aggregation, self.rule, params, kept, shares, queries, reads, segment, levels)

            return (jax.vmap(together, 1, 1) if queries.ndim > 2 else together)(queries, reads)

        heads = jax.vmap(one, in_axes=(0, 1, None, 1, 1, None), out_axes=1)
        return jax.vmap(heads, in_axes=(None, 0, 0, 0, 0, 0))(self.params(), kept, shares, queries, reads, levels)

    def _as_read(self, weights: Matrices) -> Matrices:
        """The fast weights [b, h, in, out] that a segment starting with the carried ones would read."""
        return weights_read(self.rule, self.params(), weights)
