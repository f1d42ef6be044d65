"""The chunkwise delta rule: linear memories, exactly, a block of many chunks by one triangular solve, momentum and
retention included.

For M(x) = x W and a bias whose cotangent is s * read - value, the errors e_t of a block satisfy a unit lower-triangular
system (memory/README.md, Linear memories: one triangular system). With a(t) the number of tokens in the block before
token t's chunk, and the rows of `Coefficients` at a:

    e_t = s k_t (beta_a W_0 + f_a S_0 + sum_{i<=a} G_ai k_i^T e_i) - v_t
    W_t = beta_t W_0 + f_t S_0 + sum_{i<=t} G_ti k_i^T e_i ,   S_t = p_t S_0 + sum_{i<=t} N_ti k_i^T e_i

chunk_size 1 is the exact online rule (DeltaNet and its momentum form), whose error may be taken after the retention
(Gated DeltaNet: rows at t, without the token's own write). A document that starts inside the block brings the initial
state's terms (`restart`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.chunk_algorithm import ChunkAlgorithm, ChunkResult, MemoryInputs, Tokens
from titans_jax.memory.forms.decay import Coefficients, block_coefficients
from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, Params, Surprise
from titans_jax.ops import solve_tril
from titans_jax.ops.backend import BlockSize
from titans_jax.ops.matmul import inner_products, matmul, to_state_dtype
from titans_jax.ops.platform import SUBLANES
from titans_jax.ops.whole_matrix import scale_matrix


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OpenChunk:
    """The chunk that stays open at a block's end. scales: those of the sources at its start, [1, 1 or more equal
    numbers] each. errors: how errors weigh there, [1, tokens]. is_first: whether it is the block's first, [1, 1]."""

    scales: list[jax.Array]
    errors: jax.Array
    is_first: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreparedDeltaRule:
    """The part of a block's computation that does not depend on its start state. Lists have an entry for each source:
    weights and momentum at the block's start, and the initial ones if documents may start in it.

    error_scales, read_scales: how the sources weigh, [tokens, 1], where a token's error is taken and where it reads.
    kept, carried: how they weigh in the weights and in the momentum at the block's end, rows [1, 1 or more equal
    numbers]. open_chunk: None where every chunk is one token.
    G, N: how errors weigh in the weights and in the momentum at the block's end, rows [1, tokens].
    overlap: how errors weigh in other errors, [tokens, tokens]. inverse: of the system that errors solve, None where
    they do not depend on each other. scores: how errors weigh in reads.
    """

    error_scales: list[jax.Array]
    read_scales: list[jax.Array]
    kept: list[jax.Array]
    carried: list[jax.Array | None]
    open_chunk: OpenChunk | None
    G: jax.Array
    N: jax.Array | None
    overlap: jax.Array
    inverse: jax.Array | None
    scores: jax.Array


class DeltaRule(ChunkAlgorithm):
    """Plain linear memories with scalar gates whose bias has a linear cotangent of one slope."""

    @classmethod
    def supports(cls, rule: MemoryRule, gates: Gates) -> bool:
        plain = rule.architecture.linear and rule.retention.linear and rule.bias.constant_slope is not None
        plain = plain and not rule.algorithm.whole_tokens
        return plain and rule.algorithm.descends and not gates.channel_wise

    @property
    def block_size(self) -> BlockSize:
        tokens, group = self.backend.delta_rule
        return BlockSize(self.rule.chunk_size * max(1, tokens // self.rule.chunk_size), group)

    def prepare(self, inputs: MemoryInputs) -> PreparedDeltaRule:
        gates, resets, size = inputs.gates, inputs.resets, self.rule.chunk_size
        c = jax.tree.map(lambda leaf: leaf[:, 0], block_coefficients(gates, resets, self.backend.decay_tile))
        starts = None if resets is None else jnp.repeat(resets[:, ::size], size, axis=1)[..., None]
        open_at = None
        if gates.mask is not None and size > 1:
            slots = jnp.arange(inputs.keys.shape[1], dtype=jnp.int32)[None]
            last = jnp.max(jnp.where(gates.mask, slots, 0), axis=1, keepdims=True)
            open_at = (slots == last // size * size).astype(c.G.dtype)[..., None]
        return jax.vmap(self.prepare_block)(inputs.queries, inputs.keys, c, starts, open_at)

    def prepare_block(
        self,
        queries: jax.Array,
        keys: jax.Array,
        c: Coefficients,
        starts: jax.Array | None,
        open_at: jax.Array | None,
    ) -> PreparedDeltaRule:
        """`prepare` for one block.

        starts, open_at: columns [tokens, 1]: whether the token's chunk starts with a document, and 1 at the first token
        of the chunk that stays open.
        """
        rule, slope = self.rule, self.rule.bias.constant_slope
        scales = [(c.beta, None)] if c.f is None else [(c.beta, None), (c.f, c.p)]
        if c.restart is not None:
            beta, f, p = c.restart
            scales += [(beta, None)] if f is None else [(beta, None), (f, p)]
        read_scales, in_momentum = (list(columns) for columns in zip(*scales, strict=True))
        start_G, *error_scales = self.at_chunk_start(starts, c.G, read_scales)
        overlap = -start_G * inner_products(keys, keys, keys.dtype)
        solves = slope and rule.chunk_size < len(keys)
        open_chunk = None
        if open_at is not None:
            at_start = [self.row(x, open_at) for x in error_scales]
            open_chunk = OpenChunk(at_start, jnp.sum(start_G * open_at, axis=0, keepdims=True), open_at[:1])
        return PreparedDeltaRule(
            error_scales=error_scales,
            read_scales=read_scales,
            kept=[self.row(x) for x in read_scales],
            carried=[x if x is None else self.row(x) for x in in_momentum],
            open_chunk=open_chunk,
            G=c.G[-1:],
            N=c.N,
            overlap=overlap,
            inverse=self.backend.inverse(slope * overlap, keys.dtype) if solves else None,
            scores=inner_products(queries, keys, keys.dtype) * c.G,
        )

    def row(self, column: jax.Array, at: jax.Array | None = None) -> jax.Array:
        """A column's last number, or that of the token at which the column `at` is 1, as a row of equal numbers."""
        lanes = self.backend.number_lanes
        if at is not None:
            return jnp.sum(jnp.broadcast_to(column, (len(column), lanes)) * at, axis=0, keepdims=True)
        rows = min(SUBLANES, len(column))
        return jnp.broadcast_to(column[-rows:], (rows, lanes))[-1:]

    def at_chunk_start(self, starts: jax.Array | None, G: jax.Array, scales: list[jax.Array]) -> list[jax.Array]:
        """G and the scales of the sources where each token's error is taken: after the token before its chunk.

        There, at the block's first chunk, only the carried weights (source 0) count, and at a reset only the initial
        ones. A rule that decays first takes its error at the token itself, before that token's write.
        """
        if self.rule.algorithm.decay_first:
            t, i = (jax.lax.broadcasted_iota(jnp.int32, G.shape, axis) for axis in (0, 1))
            return [jnp.where(t > i, G, 0), *scales]
        # One array: a kernel has no gradient of numbers that are repeated along two axes.
        rows, size = jnp.concatenate([G, *scales], axis=1), self.rule.chunk_size
        column = jax.lax.broadcasted_iota(jnp.int32, (1, rows.shape[1]), 1)
        source = lambda i: (column == len(G) + i).astype(rows.dtype)  # noqa: E731
        last = rows.reshape(-1, size, rows.shape[1])[:, -1:] if size > 1 else rows
        last = jnp.concatenate([source(0).reshape(last[:1].shape), last[:-1]])
        if size > 1:
            last = jnp.broadcast_to(last, (len(last), size, rows.shape[1])).reshape(rows.shape)
        if starts is not None:
            last = jnp.where(starts, source(len(scales) // 2), last)
        return jnp.split(last, list(range(len(G), rows.shape[1])), axis=1)

    def step(
        self,
        params: Params,
        start: MemoryState,
        initial: MemoryState | None,
        tokens: Tokens,
        prepared: PreparedDeltaRule,
    ) -> ChunkResult:
        keys, operand_dtype, slope = tokens.keys, tokens.keys.dtype, self.rule.bias.constant_slope
        sources = [*start.weights, *start.momentum]
        if len(prepared.read_scales) > len(sources):
            sources += [*initial.weights, *initial.momentum]

        def from_sources(scales, rows, first=None):
            """rows_t times the weighted sum of sources; `first`: the rows times the first source, if that is known."""
            products = [first] if first is not None else []
            products += [matmul(rows, source, operand_dtype) for source in sources[len(products) :]]
            return sum(scale * product for scale, product in zip(scales, products, strict=True))

        (anchor,) = start.anchor
        at_anchor = None
        if anchor is not sources[0]:  # the first chunk's own anchor, where a sequence goes on inside a chunk
            size = self.rule.chunk_size
            parts = zip((keys[:size], keys[size:]), (anchor, sources[0]), strict=True)
            at_anchor = jnp.concatenate([matmul(x, w, operand_dtype) for x, w in parts])
        from_start, values = from_sources(prepared.error_scales, keys, at_anchor), to_state_dtype(tokens.values)
        if self.rule.forget_to_start:  # the same system for the carried change: the start's own reads are added
            (learned,) = params["weights"]
            from_start = from_start + matmul(keys, learned, operand_dtype)
        errors = slope * from_start - values
        if prepared.inverse is not None:
            errors = solve_tril.solve(False, slope * prepared.overlap, prepared.inverse, errors)
        reads = from_sources(prepared.read_scales, tokens.queries) + matmul(prepared.scores, errors, operand_dtype)
        if self.rule.forget_to_start:
            reads = reads + matmul(tokens.queries, learned, operand_dtype)

        def moved(scales, sources, written):
            parts = zip(scales, sources, strict=True)
            return written + sum(scale_matrix(scale, source) for scale, source in parts if scale is not None)

        def written(rows):
            return self.backend.weighted_outer_products(rows, wide_keys, errors, operand_dtype)

        rows, wide_keys = [prepared.G] if prepared.N is None else [prepared.G, prepared.N], to_state_dtype(keys)
        ends = zip((prepared.kept, prepared.carried), written(rows), strict=False)
        weights, *momentum = (moved(scales, sources, total) for scales, total in ends)
        opened = anchor
        if prepared.open_chunk is not None:
            chunk = prepared.open_chunk
            first = jnp.where(chunk.is_first > 0, anchor, sources[0])
            opened = moved(chunk.scales, [first, *sources[1:]], *written([chunk.errors]))
        anchor_reads = from_start - matmul(prepared.overlap, errors, operand_dtype)
        surprise = jax.lax.stop_gradient((self.rule.bias(anchor_reads, values), jnp.linalg.norm(errors, axis=-1)))
        return ChunkResult(MemoryState((weights,), tuple(momentum), (opened,), 0), reads, Surprise(*surprise))
