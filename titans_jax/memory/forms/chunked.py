"""The chunked form: all gradients of a chunk at once, all reads by matrix products, no weights of single tokens.

Sequential over chunks, parallel inside; a linear memory takes an exact triangular solve where there is one. See
memory/README.md, Chunks and anchors and Reads inside a chunk.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.chunk_algorithm import (
    ChunkAlgorithm,
    ChunkResult,
    FormOptions,
    MemoryInputs,
    MemoryOutputs,
    Tokens,
)
from titans_jax.memory.forms.decay import Coefficients, block_coefficients
from titans_jax.memory.forms.delta_rule import DeltaRule
from titans_jax.memory.forms.gated_delta_rule import GatedDeltaRule
from titans_jax.memory.forms.inner_gradient import (
    ChunkEnd,
    close_chunk,
    gradient_weights,
    inner_gradients,
    slopes_at,
    split_columns,
    weights_at,
)
from titans_jax.memory.forms.intra_chunk import ChannelIntraChunk, IntraChunk, intra_chunks
from titans_jax.memory.forms.lag_token import LagToken
from titans_jax.memory.forms.scan_chunks import BLOCKS_PER_GROUP, scan_blocks
from titans_jax.memory.forms.stale_reads import StaleReads
from titans_jax.memory.forms.steps_by_chunk import GatheringChunk, gathering_chunks, step_totals
from titans_jax.memory.forms.token_weights import TokenWeights
from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, Params, select_state
from titans_jax.ops.backend import Backend, BlockSize, current_backend
from titans_jax.ops.matmul import matmul, outer_products, to_state_dtype


def memorize(
    rule: MemoryRule,
    params: Params,
    state: MemoryState,
    initial: MemoryState | None,
    inputs: MemoryInputs,
    options: FormOptions,
) -> MemoryOutputs:
    """Run the rule by the first algorithm that supports it."""
    return scan_blocks(choose_algorithm(rule, inputs.gates, current_backend()), params, state, initial, inputs)


def choose_algorithm(rule: MemoryRule, gates: Gates, backend: Backend) -> ChunkAlgorithm:
    """`StaleReads` for a stale rule, `LagToken` for a lag token; else the first of `DeltaRule`, `GatedDeltaRule`,
    `TokenWeights` and, where the backend has a `read_tile`, `TiledLeastSquares` that supports the rule; for all others
    `ChunkwiseGradient`."""
    if rule.stale:
        return StaleReads(rule, backend)
    if rule.retention.lags:
        return LagToken(rule, backend, ChunkwiseGradient(rule, backend))
    algorithms = [DeltaRule, GatedDeltaRule, TokenWeights] + [TiledLeastSquares] * (backend.read_tile is not None)
    found = next((one for one in algorithms if one.supports(rule, gates)), ChunkwiseGradient)
    return found(rule, backend)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreparedChunk:
    """The part of a chunk's computation that does not depend on its start state.

    matrices: the coefficients of every fast matrix; for `TiledLeastSquares` those of its only matrix's tiles. is_full:
    bool [1, 1], whether the last slot holds a token; None: it does. starts_document: bool, whether the chunk starts
    from the initial state; None without resets. first_gate: the gates of the only token of a chunk whose gradient is
    taken after its retention, else None. step_total: the sum of the step sizes of the chunk's tokens, [matrices], for
    an algorithm that steps by chunks, else None; in a kernel a row for each matrix, [matrices, 1, lanes], with those
    that the open chunk had before.
    """

    matrices: tuple[IntraChunk | ChannelIntraChunk | GatheringChunk, ...] | Coefficients
    is_full: jax.Array | None = None
    starts_document: jax.Array | None = None
    first_gate: Gates | None = None
    step_total: jax.Array | None = None


class ChunkwiseGradient(ChunkAlgorithm):
    """Any memory, bias and algorithm, and any retention that has one slope: gradients of all tokens at the chunk's
    anchor, then reads and the carried matrices by products. A block is one chunk."""

    @classmethod
    def supports(cls, rule: MemoryRule, gates: Gates) -> bool:
        return rule.retention.one_slope and not rule.retention.lags

    @property
    def block_size(self) -> BlockSize:
        return BlockSize(self.rule.chunk_size, BLOCKS_PER_GROUP)

    def prepare(self, inputs: MemoryInputs) -> PreparedChunk:
        gates, resets = inputs.gates, inputs.resets
        return PreparedChunk(
            matrices=self.coefficients(gates),
            is_full=None if gates.mask is None else gates.mask[:, -1:, None],
            starts_document=None if resets is None else resets[:, 0],
            first_gate=jax.tree.map(lambda x: x[:, 0], gates) if self.rule.algorithm.decay_first else None,
            step_total=step_totals(self.rule, gates),
        )

    def coefficients(self, gates: Gates) -> Any:
        """The coefficients of every fast matrix, leaves [chunks, ...], from gates [chunks, tokens, ...]."""
        if self.rule.algorithm.steps_by_chunk:
            return gathering_chunks(self.rule, gates, self.backend)
        return intra_chunks(gates, self.backend)

    def step(
        self,
        params: Params,
        start: MemoryState,
        initial: MemoryState | None,
        tokens: Tokens,
        prepared: PreparedChunk,
    ) -> ChunkResult:
        rule, retention, operand_dtype = self.rule, self.rule.retention, tokens.keys.dtype
        if prepared.starts_document is not None:
            start = select_state(prepared.starts_document, initial, start)
        anchor, slopes = weights_at(rule, params, start.anchor), slopes_at(rule, params, start.anchor)
        found = inner_gradients(rule, params, gradient_weights(rule, params, anchor, prepared.first_gate), tokens)
        momenta = start.momentum or (None,) * len(start.weights)

        def linears(parts):
            both = zip(split_columns(start.weights, parts), split_columns(found.deltas, parts), strict=True)
            return [functools.partial(linear, *matrices) for matrices in both]

        def linear(carried, deltas, i, x):
            """x times the fast matrix i after every token's own write."""
            scales = retention.linear or retention.homogeneous
            learned = params["weights"][i] if rule.forget_to_start and scales else None
            matrix, written = prepared.matrices[i], (found.inputs[i], deltas[i])
            moved = matrix.read(x, carried[i], momenta[i], *written, learned, operand_dtype)
            if scales:
                return moved if retention.linear else slopes[i] * moved
            return matmul(x, anchor[i] - slopes[i] * start.anchor[i], operand_dtype) + slopes[i] * moved

        reads = rule.algorithm.read(rule.architecture, linears, params, to_state_dtype(tokens.queries))
        ends = zip(prepared.matrices, start.weights, momenta, found.inputs, found.deltas, strict=True)
        carried, momentum = zip(*(one.carry(self.backend, *parts, operand_dtype) for one, *parts in ends), strict=True)
        total = prepared.step_total
        if start.step_total is not None:
            total = start.step_total + total
        end = ChunkEnd(carried, momentum, start.anchor, reads, prepared.is_full, total)
        weights, reads = close_chunk(rule, params, end, tokens.queries, self.backend.unrolled)
        end = MemoryState(weights, momentum if start.momentum else (), start.anchor, 0, step_total=total)
        own = len(found.surprise.loss) - len(reads)  # they follow the window's tokens before the chunk
        return ChunkResult(end, reads, jax.tree.map(lambda x: x[own:], found.surprise))


class TiledLeastSquares(ChunkwiseGradient):
    """`ChunkwiseGradient` for least squares, whose read takes many products. First come the states from tile to tile,
    then the reads of all tiles at once, in fewer and smaller products that still keep a core busy."""

    @classmethod
    def supports(cls, rule: MemoryRule, gates: Gates) -> bool:
        return rule.algorithm.keeps_statistics and not gates.channel_wise

    def coefficients(self, gates: Gates) -> Coefficients:
        """The coefficients of tiles, leaves [chunks, tiles, 1, ...]."""
        make = functools.partial(block_coefficients, resets=None, tile=None)
        return jax.vmap(make)(self.to_tiles(gates, axis=1))

    def step(
        self,
        params: Params,
        start: MemoryState,
        initial: MemoryState | None,
        tokens: Tokens,
        prepared: PreparedChunk,
    ) -> ChunkResult:
        rule, operand_dtype = self.rule, tokens.keys.dtype
        if prepared.starts_document is not None:
            start = select_state(prepared.starts_document, initial, start)
        (inner,), (deltas,), surprise = inner_gradients(rule, params, start.anchor, tokens)
        inner, deltas = self.to_tiles((inner, deltas))
        tiles: Coefficients = jax.tree.map(lambda leaf: leaf[:, 0], prepared.matrices)

        def add(tile, inner, deltas):
            return outer_products(tile.G[-1:].T * inner, deltas, operand_dtype)

        (state,), starts = start.weights, []
        for kept, added in zip(tiles.beta[:, -1:], jax.vmap(add)(tiles, inner, deltas), strict=True):
            starts.append(state)
            state = kept * state + added

        def read(queries, weights, tile, inner, deltas):
            # Broadcast by a product: the gradient of the column would otherwise be a sum of elementwise products.
            left = self.backend.broadcast_column(tile.beta, queries.shape[1])

            def linears(parts):
                return [linear(*columns) for columns in split_columns((weights, deltas), parts)]

            def linear(weights, deltas):
                both = jnp.concatenate([weights, inner.T], axis=1)

                def apply(_, x):
                    out, scores = jnp.split(matmul(x, both, operand_dtype), [weights.shape[1]], axis=1)
                    return left * out + matmul(tile.G * scores, deltas, operand_dtype)

                return apply

            return rule.algorithm.read(rule.architecture, linears, params, to_state_dtype(queries))

        queries = self.to_tiles(tokens.queries)
        reads = jax.vmap(read)(queries, jnp.stack(starts), tiles, inner, deltas).reshape(tokens.queries.shape)
        return ChunkResult(MemoryState((state,), (), start.anchor, 0), reads, surprise)

    def to_tiles(self, x: Any, axis: int = 0) -> Any:
        """Leaves with their `axis` of tokens cut into tiles and tokens."""

        def split(leaf):
            tile = math.gcd(leaf.shape[axis], self.backend.read_tile)
            return leaf.reshape(*leaf.shape[:axis], -1, tile, *leaf.shape[axis + 1 :])

        return jax.tree.map(split, x)
