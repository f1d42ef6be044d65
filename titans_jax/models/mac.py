"""MAC: memory as context (Titans eq 21-25).

Per segment of `config.segment` tokens, x being its normalised rows and M the memory that the segments before left:

    h = norm(M(q(x)))                        read only: what the memory returns for every token of the segment
    y = attention(x; [P | h | x])            token i sees P, and h_j and x_j for j <= i
    z = norm(x + y)                          what is written: attention's output with a residual around it
    m = read of the memory at q(z), after writing k(z), v(z)     token t reads its own write and none later
    o = m + 2 a y * sigmoid(b m)             a, b learned vectors; `GatedMerge` also has the papers' form

With `mac_long_term` N, h is read with N learned queries of the layer in place of the segment's, h = norm(M(q_1 ..
q_N)), and every token sees all of h, as it depends on no token of the segment. Only in this reading are the papers' 256
long-term tokens fewer than the 512 tokens of their segments. Like P, h then has no positions.

The papers write y itself (`mac_write` "attention", z = y). As a mean over tokens, y hardly tells which token it belongs
to, so that what is written cannot be found again (memory/what_was_tried.md). They also say that blocks have residual
connections; x in z is one.

Readings where the paper is open or would leak the future (memory/README.md, Readings): one h per token, seen causally;
the last read is per token, with its own query q(z); only the segment's rows are written, not P or h; the gate is MAG's;
h is normalised per head, and m passes the memory layer's norm, gate and output projection; convolutions run over the
whole sequence (one of x for h, one of z for the write). Attention is full causal inside the segment; h_j takes
the rotary position of token j, counted from the segment's start.

Only what needs the memory runs segment by segment; what depends on x alone is computed before it for the whole row, and
the merge after it. A gradient would store all intermediate values of every segment; with remat `full` the backward pass
recomputes a segment, except for its kernels. On a mesh each device runs the segments of its own rows, so that
parameters are gathered, and their gradients added up, once for all segments (`sharding.on_own_rows`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from titans_jax.config import ConfigError, ModelConfig, gate_choices, memory_rule
from titans_jax.layers.attention import Attention, ConvolutionTails, KeyValues, segment_attention
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.feed_forward import FeedForward
from titans_jax.layers.gated_merge import GatedMerge
from titans_jax.layers.head_channels import side_by_side
from titans_jax.layers.neural_memory import MemoryLayerState, NeuralMemory, broadcast, check_other_layers
from titans_jax.layers.norms import RMSNorm
from titans_jax.layers.persistent import LongTermQueries, PersistentTokens
from titans_jax.layers.prediction_gate import Reads
from titans_jax.layers.segments import flags_like, from_segments, report_of_tokens, to_segments
from titans_jax.models.block import Block, register_block
from titans_jax.models.flops import (
    attention_flops,
    feed_forward_flops,
    mean_causal_keys,
    memory_layer_flops,
    memory_read_flops,
    merge_flops,
    persistent_flops,
    projection_flops,
)
from titans_jax.ops.platform import KERNELS
from titans_jax.sharding import BATCH, constrain, on_own_rows


class Rows(NamedTuple):
    """What depends on x alone: queries of memory and of attention, keys and values of x.

    All [b, t, heads head_dim]: a scan keeps its inputs' and outputs' layout, in which narrow heads fill no tile.
    recall: None where h has learned queries. residual: the block's normalised input, None where attention's output
    alone is written.
    """

    recall: jax.Array | None
    queries: jax.Array
    past: KeyValues
    residual: jax.Array | None


class RowTails(NamedTuple):
    """Convolution tails of x: for the queries of h, None where they are learned; and of attention, None without."""

    recall: jax.Array | None
    attention: ConvolutionTails | None


class MACState(NamedTuple):
    """What streaming carries, of constant size.

    memory: the memory that z is written to; its position is None, as `index` determines it.
    tail: the convolution tail of x for h. weights: the memory's weights [b, h, ...] at the open segment's start.
    context: keys and values of h and of x in the open segment, [b, segment, heads, head_dim].
    prefix: keys and values of P [b, n, heads, head_dim], one copy per row: gradients of a single one would be summed
    over rows in every segment.
    index: int32 scalar, tokens of the segment read so far. attention_tails: of attention's convolutions, None without.

    With `mac_long_term`, h is read when the segment opens and stands behind P in prefix; context has x alone, tail is
    None and weights are ().
    """

    memory: MemoryLayerState
    tail: jax.Array | None
    weights: tuple[jax.Array, ...]
    context: tuple[KeyValues, ...]
    prefix: KeyValues
    index: jax.Array
    attention_tails: ConvolutionTails | None = None


@register_block("mac")
class MAC(Block):
    """x += mac(norm(x)); x += feed_forward(norm(x))."""

    has_memory = True

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.segment, self.remat = config.segment, config.remat == "full"
        self.num_persistent = config.num_persistent
        self.persistent = PersistentTokens(config, rngs=rngs)
        self.norm = RMSNorm(config, config.dim, rngs=rngs)
        self.attention = Attention(config, None, rngs=rngs)
        self.memory = NeuralMemory(config, rngs=rngs)
        self.long_term = LongTermQueries(config, rngs=rngs) if config.mac_long_term is not None else None
        self.recall_norm = RMSNorm(config, config.num_heads, config.head_dim, axes=("heads", None), rngs=rngs)
        self.write_norm = RMSNorm(config, config.dim, rngs=rngs) if config.mac_write == "residual" else None
        self.merge = GatedMerge(config, rngs=rngs)
        self.feed_forward_norm = RMSNorm(config, config.dim, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, state: MACState | None = None, documents: Documents | None = None
    ) -> tuple[jax.Array, MACState, dict[str, jax.Array]]:
        """See `Block`."""
        if state is None:
            y, reads, state, report = self._segments(x, self.init_state(x.shape[0]), documents)
        elif isinstance(state.index, int):
            y, reads, state, report = self._segments(x, state)
        elif x.shape[1] == 1:
            y, reads, state, report = self._token(x, state)
        else:
            y, reads, state, report = jax.lax.cond(
                state.index == 0, lambda: self._segments(x, state), lambda: self._token_by_token(x, state)
            )
        written = self._written(self.norm(x), y)
        found = self.attention.by_head(reads.reads)
        # What the segments' own rematerialisation names is not known by name behind it.
        reads = reads._replace(reads=self.memory.kept(found) if self.remat else found)
        x = x + self.merge(y, self.memory.read_out(written, reads))
        return x + self.feed_forward(self.feed_forward_norm(x)), state, report

    def init_state(self, batch: int, max_length: int | None = None) -> MACState:
        """See `Block`; of constant size, so max_length changes nothing."""
        start = self.memory.start()
        start = start._replace(memory=dataclasses.replace(start.memory, position=None))
        prefix = self.attention.prefix(self.persistent())
        tail = start.tails["query"] if self.long_term is None else None
        memory, tail, prefix = broadcast((start, tail, prefix), batch)
        tails = RowTails(tail, self.attention.start_tails(batch))
        return self._open_segment(memory, tails, self._seen_by_all(prefix, memory.memory.weights))

    @staticmethod
    def closed(state: MACState) -> MACState:
        """See `Block`: at a segment's start."""
        return state._replace(index=0)

    @staticmethod
    def forward_flops(config: ModelConfig, time: int) -> float:
        """See `Block`."""
        # Token i of a segment sees h_j and x_j for j <= i. For h: queries, a read of the memory, keys and values.
        keys = mean_causal_keys(min(time, config.segment), config.segment)
        if config.mac_long_term is None:
            segment = attention_flops(config, 2 * keys) + persistent_flops(config)
            context = 3 * projection_flops(config) + memory_read_flops(config)
        else:  # a segment that is not whole has as many reads as a whole one
            segment = attention_flops(config, keys + config.mac_long_term) + persistent_flops(config)
            reads = config.mac_long_term * -(-time // config.segment) / time
            context = reads * (2 * projection_flops(config) + memory_read_flops(config))
        return segment + context + memory_layer_flops(config) + merge_flops(config) + feed_forward_flops(config)

    @staticmethod
    def granularity(config: ModelConfig) -> int:
        """A segment."""
        return config.segment

    @staticmethod
    def check(config: ModelConfig) -> None:
        """See `Block`: a segment is a whole number of the memory's chunks and longer than `mac_long_term`; caching,
        local memories, levels, and several reads a token (`mimo_rank`) are refused."""
        if config.mac_long_term is not None and not 1 <= config.mac_long_term < config.segment:
            raise ConfigError(
                f"model.mac_long_term is {config.mac_long_term}; use 1 to {config.segment - 1}, fewer than "
                f"model.segment {config.segment}, or None for one per token"
            )
        check_other_layers(config, "mac", "its segments' attention reads the memory of every segment's start")
        rank = gate_choices(config.memory).key_rank(memory_rule(config.memory))
        if rank > 1:
            raise ConfigError(
                f"model.memory.mimo_rank is {rank}, and mac's attention takes one read of the memory for every token; "
                "use 1, or a pattern of lmm, mag, mal or retrofit"
            )
        chunk_size = memory_rule(config.memory).chunk_size  # a preset may have one of its own
        if config.segment % chunk_size:
            below = max(config.segment // chunk_size, 1) * chunk_size
            raise ConfigError(
                f"model.segment is {config.segment}; use a multiple of model.memory.chunk_size {chunk_size}, such as "
                f"{below}"
            )

    def _open_segment(self, memory: MemoryLayerState, tails: RowTails, prefix: KeyValues) -> MACState:
        """The state at a segment's start."""
        batch, _, heads, head_dim = prefix.keys.shape
        empty = KeyValues(*[jnp.zeros((batch, self.segment, heads, head_dim), self.attention.dtype)] * 2)
        contexts, weights = ((empty, empty), memory.memory.weights) if self.long_term is None else ((empty,), ())
        start = jnp.zeros((), jnp.int32)
        return MACState(memory, tails.recall, weights, contexts, prefix, start, tails.attention)

    def _seen_by_all(self, prefix: KeyValues, weights: tuple[jax.Array, ...]) -> KeyValues:
        """Keys and values that all tokens of a segment see: P, the front of `prefix`, and behind it h, where it has
        learned queries; weights: the memory's at the segment's start, [b, h, ...]."""
        if self.long_term is None:
            return prefix
        batch = prefix.keys.shape[0]
        h = self._recalled(weights, jnp.broadcast_to(self.long_term(), (batch, *self.long_term.shape)))
        new = self.attention.prefix(h)
        return jax.tree.map(lambda p, h: jnp.concatenate([p[:, : self.num_persistent], h], axis=1), prefix, new)

    def _recalled(self, weights: tuple[jax.Array, ...], queries: jax.Array) -> jax.Array:
        """h [b, t, dim], read from weights with queries [b, t, heads, head_dim]."""
        h = self.recall_norm(self.memory.retrieve(weights, queries)).astype(self.attention.dtype)
        return constrain(side_by_side(h), BATCH, None, None)

    def _segments(
        self, x: jax.Array, state: MACState, documents: Documents | None = None
    ) -> tuple[jax.Array, Reads, MACState, dict[str, jax.Array]]:
        """x [b, t, dim] from a segment's start on: a scan over the whole segments, then the rest."""
        batch, time, _ = x.shape
        first = self.init_state(batch)
        first_tail = None if first.tail is None else first.tail[0]
        positions = jnp.arange(time, dtype=jnp.int32) % self.segment
        tails = RowTails(state.tail, state.attention_tails)
        rows, tails = self._rows(x, tails, positions, documents, first_tail)

        whole, rest = divmod(time, self.segment)
        end = whole * self.segment
        memory, parts = state.memory, []
        if whole:
            graphdef, shared, unused = nnx.split(self, _in_segments, ...)
            scan = functools.partial(_scan_segments, graphdef, unused, whole)
            memory, part = on_own_rows(scan, shared, (memory, first.memory, state.prefix, (rows, documents)))
            parts.append(part)
        prefix = state.prefix
        state = self._open_segment(memory, tails, prefix)
        if rest:
            memory, (y, reads, (weights, context, prefix), report) = self._segment_of(
                memory, first.memory, prefix, jax.tree.map(lambda rows: rows[:, end:], (rows, documents))
            )
            room = [(0, 0), (0, self.segment - rest), (0, 0), (0, 0)]
            context = jax.tree.map(lambda rows: jnp.pad(rows, room), context)
            weights = weights if self.long_term is None else ()
            index = jnp.full((), rest, jnp.int32)
            state = MACState(memory, tails.recall, weights, context, prefix, index, tails.attention)
            parts.append((y, reads, report))
        ys, reads, reports = zip(*parts, strict=True)
        reads = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *reads)
        return jnp.concatenate(ys, axis=1), reads, state, _join(reports)

    def _segment_of(
        self,
        memory: MemoryLayerState,
        first: MemoryLayerState,
        prefix: KeyValues,
        inputs: tuple[Rows, Documents | None],
    ) -> tuple[MemoryLayerState, Any]:
        """A segment, or the beginning of one, from its first token on. first: the memory with which documents begin.

        Returns:
          the memory after it; y, reads, what a state inside this segment holds of it (weights, context, prefix), and
          the report.
        """
        rows, documents = inputs
        mask = None
        if documents is not None:
            mask, starts = documents.mask, documents.starts[:, 0]
            memory = jax.tree.map(lambda new, old: jnp.where(flags_like(starts, old), new, old), first, memory)
        weights = memory.memory.weights
        prefix = self._seen_by_all(prefix, weights)
        memory, (y, reads, context, report) = self._attend_and_write(rows, memory, weights, prefix, mask=mask)
        return memory, (y, reads, (weights, context, prefix), report)

    def _token_by_token(self, x: jax.Array, state: MACState) -> tuple[jax.Array, Reads, MACState, dict[str, jax.Array]]:
        """x [b, t, dim] from anywhere in a segment on."""

        def one_token(state: MACState, token: jax.Array) -> tuple[MACState, Any]:
            y, reads, state, report = self._token(token[:, None], state)
            return state, (y, reads, report)

        state, (y, reads, report) = jax.lax.scan(one_token, state, jnp.moveaxis(x, 1, 0))
        y, reads = jax.tree.map(from_segments, (y, reads))  # segments of one token
        return y, reads, state, report_of_tokens(report)

    def _token(self, x: jax.Array, state: MACState) -> tuple[jax.Array, Reads, MACState, dict[str, jax.Array]]:
        """One token, x [b, 1, dim]."""
        opens, now = state.index == 0, state.memory.memory.weights
        if self.long_term is None:
            weights = jax.tree.map(lambda now, before: jnp.where(opens, now, before), now, state.weights)
            prefix = state.prefix
        else:
            weights = ()
            prefix = jax.lax.cond(opens, lambda: self._seen_by_all(state.prefix, now), lambda: state.prefix)
        rows, tails = self._rows(x, RowTails(state.tail, state.attention_tails), state.index[None])
        memory, (y, reads, context, report) = self._attend_and_write(
            rows, state.memory, weights, prefix, index=state.index, context=state.context
        )
        index = (state.index + 1) % self.segment
        state = MACState(memory, tails.recall, weights, context, prefix, index, tails.attention)
        return y, reads, state, report

    def _rows(
        self,
        x: jax.Array,
        tails: RowTails,
        positions: jax.Array,
        documents: Documents | None = None,
        initial_tail: jax.Array | None = None,
    ) -> tuple[Rows, RowTails]:
        """What depends on the block's input x [b, t, dim] alone, at `positions` [t] of its segment, and the next
        convolution tails."""
        normed = self.norm(x)
        residual = None if self.write_norm is None else self.attention.by_head(normed)
        recall, tail = None, None
        if self.long_term is None:
            recall, tail = self.memory.query(normed, tails.recall, documents, initial_tail)
        queries, past, attention = self.attention.features(normed, positions, tails.attention, documents)
        return jax.tree.map(side_by_side, Rows(recall, queries, past, residual)), RowTails(tail, attention)

    def _written(self, residual: jax.Array | None, y: jax.Array) -> jax.Array:
        """z [b, t, dim], the memory's input, from the block's normalised input and attention's output."""
        return y if self.write_norm is None else self.write_norm(residual + y)

    def _attend_and_write(
        self,
        rows: Rows,
        memory: MemoryLayerState,
        weights: tuple[jax.Array, ...],
        prefix: KeyValues,
        *,
        index: int | jax.Array = 0,
        context: tuple[KeyValues, ...] | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[MemoryLayerState, tuple[jax.Array, Reads, tuple[KeyValues, ...], dict[str, jax.Array]]]:
        """h, y, z and m of the equations at the top, for tokens inside one segment.

        Args:
          weights: the memory at the segment's start, which the h of tokens read.
          prefix: keys and values that all tokens see, [b, n, heads, head_dim].
          index: place of the first token in the segment; static 0 keeps the memory's chunks and the mask static.
          context: keys and values of h and x, or of x, in the segment so far; None when the tokens start it.
          mask: bool [b, t], False at padding.

        Returns:
          the memory after z; y [b, t, dim], its reads [b, t, heads head_dim] with their hits, the context with these
          tokens, a report.
        """
        time = rows.queries.shape[1]
        rows = jax.tree.map(self.attention.by_head, rows)
        positions = index + np.arange(time, dtype=np.int32)
        new: tuple[KeyValues, ...] = (rows.past,)
        if rows.recall is not None:
            new = (self.attention.key_values(self._recalled(weights, rows.recall), positions), rows.past)
        if context is None:
            context = new
        else:
            write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=index, axis=1)
            context = jax.tree.map(write, context, new)
        y = self.attention.merge(segment_attention(rows.queries, context, prefix, index))

        rule = self.memory.rule
        written = dataclasses.replace(memory.memory, position=index * rule.algorithm.steps % rule.chunk_size)
        z = self._written(None if rows.residual is None else side_by_side(rows.residual), y)
        reads, memory, report = self.memory.memorize(z, memory._replace(memory=written), mask=mask)
        memory = memory._replace(memory=dataclasses.replace(memory.memory, position=None))
        return memory, (y, reads._replace(reads=side_by_side(reads.reads)), context, report)


def _in_segments(path: tuple[Any, ...], value: Any) -> bool:
    """Whether this is a parameter of what runs segment by segment."""
    return path[0] in ("attention", "memory", "long_term", "recall_norm", "write_norm")


def _scan_segments(
    graphdef: nnx.GraphDef,
    unused: nnx.State,
    count: int,
    shared: nnx.State,
    rows: tuple[MemoryLayerState, MemoryLayerState, KeyValues, tuple[Rows, Documents | None]],
) -> tuple[MemoryLayerState, tuple[jax.Array, Reads, dict[str, jax.Array]]]:
    """`count` whole segments of a block of these parameters, as `MAC._segment_of` takes them, rows [b, t, ...]: the
    memory after them, y, reads and the report."""
    block: MAC = nnx.merge(graphdef, shared, unused)
    memory, first, prefix, inputs = rows

    def scanned(memory: MemoryLayerState, inputs: tuple[Rows, Documents | None]) -> tuple[MemoryLayerState, Any]:
        memory, (y, reads, _, report) = block._segment_of(memory, first, prefix, inputs)
        return memory, (y, reads, report)

    if block.remat:
        policy = jax.checkpoint_policies.save_only_these_names(KERNELS)
        scanned = jax.checkpoint(scanned, prevent_cse=False, policy=policy)
    cut = functools.partial(to_segments, count, block.segment)
    memory, (y, reads, report) = jax.lax.scan(scanned, memory, jax.tree.map(cut, inputs))
    report = {n: r[-1] if n == "weight_norm" else from_segments(r) for n, r in report.items()}
    return memory, (from_segments(y), jax.tree.map(from_segments, reads), report)


def _join(reports: tuple[dict[str, jax.Array], ...]) -> dict[str, jax.Array]:
    """Reports of consecutive pieces: leaves [b, t] are concatenated, weight_norm is the last piece's."""
    return {
        name: last if name == "weight_norm" else jnp.concatenate([report[name] for report in reports], axis=1)
        for name, last in reports[-1].items()
    }
