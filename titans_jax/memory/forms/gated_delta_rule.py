"""The gated delta rule: linear memories whose every token is a chunk of its own, exactly, with scalar or channel-wise
retention.

The memory is M(x) = x S with retention a_t, a scalar or one per input channel. Errors are taken at the state before t,
either as it is (r_t = 1) or, if the rule decays first, after this token's retention (r_t = a_t), with the part b_t of
the key (`Gates.erase`, or 1):

    e_t = s_t (b_t * k_t * r_t) S_{t-1} - v_t ,      S_t = Diag(a_t) S_{t-1} - theta_t (eta_t * k_t)^T e_t

The errors of a block solve one unit lower-triangular system (memory/README.md, Linear memories: one triangular system).
GLA, HGRN2, DFW (s = 0, no system), Kimi Delta Attention, Gated DeltaNet-2 and RWKV-7 are cases; with scalar gates,
momentum or longer chunks see `delta_rule`.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.chunk_algorithm import ChunkAlgorithm, ChunkResult, MemoryInputs, Tokens
from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, Params, Surprise
from titans_jax.ops import channel_decay, channel_decay_pallas, solve_tril
from titans_jax.ops.backend import BlockSize
from titans_jax.ops.matmul import matmul, outer_products, to_state_dtype


class WriteGates(NamedTuple):
    """The gates of a block's tokens: leaves [tokens, ...].

    step_size: [tokens, 1], 0 at padding. log_key_retention: [tokens, head_dim or 1], with the scalar retention in it;
    log_value_retention: [tokens, head_dim] or None; both at least LOG_CUT, and 0 at padding. document: int [1, tokens],
    how many documents have started in the block up to and including each token, None without resets.
    """

    step_size: jax.Array
    log_key_retention: jax.Array
    log_value_retention: jax.Array | None
    document: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreparedGatedDeltaRule:
    """The part of a block's computation that does not depend on its start state.

    by_value: decay of value channels. error_keys, read_queries: keys and queries for each source (the carried state
    and, with resets, the initial one), scaled by what is left of the source's rows where a token's error is taken and
    where it reads. kept: what is left of these rows after the last token, [channels, 1]. error_columns, read_columns:
    what is left of the source's columns where errors are taken and where tokens read; to_end: what is left of each
    token's columns at the block's end; None where columns do not decay. written: minus step times keys, as they enter
    the weights at the block's end. overlap: how errors weigh in other errors, None where that is not needed; scores:
    how they weigh in reads. inverse: of the system that the errors solve, None where they do not depend on each other.
    """

    by_value: channel_decay.ChannelDecay | channel_decay_pallas.ChannelDecay | None
    error_keys: list[jax.Array]
    read_queries: list[jax.Array]
    kept: list[jax.Array]
    error_columns: jax.Array | None
    read_columns: jax.Array | None
    to_end: jax.Array | None
    written: jax.Array
    overlap: jax.Array | None
    scores: jax.Array
    inverse: jax.Array | None


class GatedDeltaRule(ChunkAlgorithm):
    """Plain linear memories, chunk_size 1, with channel-wise retention and step sizes. Output channels may have their
    own only where the bias does not depend on the read, and a token's slope must be one number for all channels."""

    @classmethod
    def supports(cls, rule: MemoryRule, gates: Gates) -> bool:
        by_outputs = gates.log_value_retention is not None or gates.value_step_size is not None
        plain = rule.architecture.linear and rule.bias.affine and rule.retention.linear
        plain = plain and not rule.algorithm.has_momentum and rule.algorithm.descends
        plain = plain and (gates.bias_gate is None or gates.bias_gate.shape[-1] == 1)
        plain = plain and not rule.forget_to_start and rule.algorithm.window == 1
        return plain and rule.chunk_size == 1 and (not by_outputs or rule.bias.constant_slope == 0)

    @property
    def block_size(self) -> BlockSize:
        return self.backend.gated_delta_rule

    def prepare(self, inputs: MemoryInputs) -> PreparedGatedDeltaRule:
        document = None if inputs.resets is None else count_documents(inputs.resets)[:, None]
        gates = jax.vmap(write_gates)(inputs.gates)._replace(document=document)
        return jax.vmap(self.prepare_block)(inputs.tokens(), gates)

    def prepare_block(self, token: Tokens, gates: WriteGates, with_surprise: bool = True) -> PreparedGatedDeltaRule:
        """`prepare` for one block. with_surprise: whether the surprise is asked for."""
        rule, backend, operand_dtype = self.rule, self.backend, token.keys.dtype
        queries, keys, document = to_state_dtype(token.queries), to_state_dtype(token.keys), gates.document
        error_keys = token.error_keys()
        tokens, width = keys.shape
        visible = in_document = None
        if document is not None:
            in_document = document.T
            # `~(>)`, not `<=`: the NaN of a layout with misplaced resets must hide nothing.
            visible = jnp.tri(tokens, dtype=bool) & ~(in_document > document)
        by_key, by_value = (
            None if x is None else backend.channel_decay(x, visible)
            for x in (gates.log_key_retention, gates.log_value_retention)
        )

        def left(decay):
            """What is left of a document's start state at its tokens: at each read, and where each error is taken."""
            remaining = backend.broadcast_column(decay.since_start(), width)
            if rule.algorithm.decay_first:
                return remaining, remaining
            # Before a token forgets, as much is left as at the token before it.
            starts = row_numbers(remaining) == 0
            if document is not None:
                starts |= in_document > row_before(in_document)
            return remaining, jnp.where(starts, 1, row_before(remaining))

        def by_source(x):
            """x [tokens, channels] for each source, 0 at tokens whose document starts with another source."""
            if document is None:
                return [x]
            return [jnp.where(in_document > 0, 0, x), jnp.where(in_document > 0, x, 0)]

        remaining, at_error = left(by_key)
        error_columns = read_columns = to_end = None
        if by_value is not None:
            (read_columns, error_columns) = left(by_value)
            to_end = backend.broadcast_column(by_value.to_end(), width)
        written = -backend.broadcast_column(gates.step_size, width) * keys
        written = written if token.key_step_size is None else written * token.key_step_size
        solves = rule.bias.constant_slope != 0
        takes_errors = [error_keys if rule.algorithm.decay_first else row_after(error_keys)]
        takes_errors = takes_errors if solves or with_surprise else []
        scores, *overlap = by_key.scores((queries, *takes_errors), written, operand_dtype, rule.algorithm.steps)
        overlap, inverse = overlap[0] if overlap else None, None
        if overlap is not None and rule.algorithm.decay_first:
            overlap = jnp.tril(overlap, -1)
        elif overlap is not None:
            overlap = row_before(overlap) if visible is None else jnp.where(visible, row_before(overlap), 0)
        if solves:
            slope = backend.broadcast_column(rule.bias.slope(token.bias_gate), tokens)
            inverse = backend.inverse(-slope * overlap, operand_dtype)
        lasting = written * backend.broadcast_column(by_key.to_end(), width)
        return PreparedGatedDeltaRule(
            by_value=by_value,
            error_keys=by_source(error_keys * at_error),
            read_queries=by_source(queries * remaining),
            kept=[x[-1:].T for x in by_source(remaining)],
            error_columns=error_columns,
            read_columns=read_columns,
            to_end=to_end,
            written=lasting if document is None else jnp.where(in_document < in_document[-1:], 0, lasting),
            overlap=overlap,
            scores=scores,
            inverse=inverse,
        )

    def step(
        self,
        params: Params,
        start: MemoryState,
        initial: MemoryState | None,
        tokens: Tokens,
        prepared: PreparedGatedDeltaRule,
    ) -> ChunkResult:
        bias, backend, operand_dtype = self.rule.bias, self.backend, tokens.keys.dtype
        by_value, values = prepared.by_value, to_state_dtype(tokens.values)
        sources = [start.weights[0]] if len(prepared.read_queries) == 1 else [start.weights[0], initial.weights[0]]

        def from_start(rows, columns):
            """rows_t times what is left of the state that token t's document started with."""
            total = sum(matmul(row, source, operand_dtype) for row, source in zip(rows, sources, strict=True))
            return total if columns is None else total * columns

        def from_tokens(scores, stepped):
            """The sum over past tokens i of scores_ti stepped_i times what is left of it."""
            if by_value is None:
                return matmul(scores, stepped, operand_dtype)
            return by_value.mix(scores, stepped, operand_dtype)

        anchor_reads, errors = from_start(prepared.error_keys, prepared.error_columns), -values
        if prepared.inverse is not None:
            slopes = bias.slope(tokens.bias_gate)
            errors = backend.broadcast_column(slopes, values.shape[1]) * anchor_reads - values
            system = -backend.broadcast_column(slopes, len(values)) * prepared.overlap
            errors = solve_tril.solve(False, system, prepared.inverse, errors)
        stepped = errors if tokens.value_step_size is None else errors * tokens.value_step_size
        surprise = None
        if prepared.overlap is not None:  # decay of value channels up to the token before
            if by_value is None:
                own = from_tokens(prepared.overlap, stepped)
            else:
                own = row_before(from_tokens(row_after(prepared.overlap), stepped))
            loss = bias(anchor_reads + own, values, tokens.bias_gate)
            surprise = Surprise(*jax.lax.stop_gradient((loss, jnp.linalg.norm(errors, axis=-1))))

        reads = from_start(prepared.read_queries, prepared.read_columns) + from_tokens(prepared.scores, stepped)
        kept = zip(prepared.kept, sources, strict=True)
        kept = sum(backend.broadcast_column(rows, values.shape[1]) * source for rows, source in kept)
        kept = kept if by_value is None else kept * prepared.read_columns[-1:]
        stepped = stepped if by_value is None else stepped * prepared.to_end
        weights = (kept + outer_products(prepared.written, stepped, operand_dtype),)
        return ChunkResult(MemoryState(weights, (), weights, 0), reads, surprise)


def write_gates(gates: Gates) -> WriteGates:
    """`WriteGates` without `document`, from gates [tokens, ...]."""
    by_key = gates.log_retention
    if gates.log_key_retention is not None:
        by_key = by_key + gates.log_key_retention
    by_value = gates.log_value_retention
    return WriteGates(
        step_size=gates.step_size if gates.mask is None else jnp.where(gates.mask[:, None], gates.step_size, 0),
        log_key_retention=channel_decay.clipped(by_key, gates.mask),
        log_value_retention=by_value if by_value is None else channel_decay.clipped(by_value, gates.mask),
        document=None,
    )


def count_documents(resets: jax.Array) -> jax.Array:
    """How many documents have started in a block up to and including each of its tokens, [blocks, tokens]."""
    return jnp.cumsum(resets, axis=1, dtype=jnp.int32)


def row_before(x: jax.Array) -> jax.Array:
    """Rows of the token before, 0 before the first."""
    return jnp.where(row_numbers(x) == 0, 0, jnp.roll(x, 1, axis=0))


def row_after(x: jax.Array) -> jax.Array:
    """Rows of the token after, 0 after the last."""
    return jnp.where(row_numbers(x) == len(x) - 1, 0, jnp.roll(x, -1, axis=0))


def row_numbers(x: jax.Array) -> jax.Array:
    """The row of every number."""
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
