"""Linear memories, exactly: a block of many chunks by one triangular solve, momentum and retention included.

For M(x) = x W and a bias whose cotangent is s * read - value, the errors e_t of a block satisfy a unit lower-triangular
system (design 3.2). With a(t) the tokens of the block before token t's chunk, and rows of `coefficients` at a:

    e_t = s k_t (beta_a W_0 + f_a S_0 + sum_{i<=a} G_ai k_i^T e_i) - v_t
    W_t = beta_t W_0 + f_t S_0 + sum_{i<=t} G_ti k_i^T e_i ,   S_t = p_t S_0 + sum_{i<=t} N_ti k_i^T e_i

chunk_size 1 is the exact online rule (DeltaNet and its momentum form), which may judge after its retention (Gated
DeltaNet: rows at t, without the token's own write); the block is an implementation size and never changes the numbers.
A document that starts inside the block brings the initial state's terms (`restart`).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from titans_jax.memory.forms import intra_chunk
from titans_jax.memory.forms.decay import Coefficients, of_chunks
from titans_jax.memory.forms.scan_chunks import GROUP
from titans_jax.memory.gates import Gates
from titans_jax.memory.rule import algorithms, architectures, biases
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, Surprise
from titans_jax.ops import solve_tril
from titans_jax.ops.platform import SUBLANES, target_platform
from titans_jax.ops.matmul import inner_products, matmul, to_state_dtype, weighted_outer_products

TOKENS_PER_BLOCK = 64


def runs(rule: MemoryRule, gates: Gates) -> bool:
    """Whether this path is the rule: a plain linear memory with scalar gates whose bias has a linear cotangent."""
    plain = isinstance(rule.architecture, architectures.Linear) and rule.retention.linear
    plain = plain and isinstance(rule.bias, biases.L2 | biases.DotProduct)
    plain = plain and (rule.chunk_size == 1 or not rule.algorithm.decay_first)
    return plain and not isinstance(rule.algorithm, algorithms.LeastSquares) and not gates.channel_wise


def grouping(rule: MemoryRule, gates: Gates) -> tuple[int, int]:
    """(tokens per block, whole chunks; blocks that are prepared at once); for a CPU, what its cache holds of them, and
    where channels forget at rates of their own, which takes work at every halving, shorter ones."""
    tokens, blocks = TOKENS_PER_BLOCK, GROUP
    if target_platform() == "cpu":
        tokens, blocks = (tokens // 4, blocks) if gates.channel_wise else (tokens // 2, blocks // 2)
    return rule.chunk_size * max(1, tokens // rule.chunk_size), blocks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """What of a block does not depend on its start state. Lists have an entry for each source: weights and momentum
    at the block's start, and the initial ones if documents may start in it.

    judged, read: the scales [tokens, 1] of the sources in what is judged and in what is read. kept, carried: those of
    the weights and of the momentum at the block's end, rows [1, 1 or more equal]; opened: of the chunk's start that
    stays open, and its row of weighed errors, None where every chunk is one token.
    G, N: how errors weigh in the weights and in the momentum at the block's end, rows [1, tokens].
    overlap: how errors weigh in what is judged, [tokens, tokens]. inverse: of the system that they solve, None where
    they depend on no other. scores: how they weigh in reads.
    """

    judged: list[jax.Array]
    read: list[jax.Array]
    kept: list[jax.Array]
    carried: list[jax.Array | None]
    opened: tuple[list[jax.Array], jax.Array, jax.Array] | None
    G: jax.Array
    N: jax.Array | None
    overlap: jax.Array
    inverse: jax.Array | None
    scores: jax.Array


def prepare(rule: MemoryRule, queries, keys, values, gates: Gates, resets) -> Prepared:
    """`Prepared`, leaves [blocks, ...], of inputs [blocks, tokens, ...]."""
    c = jax.tree.map(lambda leaf: leaf[:, 0], of_chunks(gates, resets))
    size, tokens = rule.chunk_size, keys.shape[1]
    starts = None if resets is None else jnp.repeat(resets[:, ::size], size, axis=1)[..., None]
    open_at = None
    if gates.mask is not None and size > 1:
        slots = jnp.arange(tokens, dtype=jnp.int32)[None]
        last = jnp.max(jnp.where(gates.mask, slots, 0), axis=1, keepdims=True)
        open_at = (slots == last // size * size).astype(c.G.dtype)[..., None]
    return jax.vmap(functools.partial(prepare_block, rule))(queries, keys, c, starts, open_at)


def prepare_block(
    rule: MemoryRule, queries, keys, c: Coefficients, starts, open_at, lanes: int = 1, invert=solve_tril.inverse
) -> Prepared:
    """`Prepared` of one block.

    starts, open_at: columns [tokens, 1], where the token's chunk starts with a document, and 1 at the first token of
    the chunk that stays open. lanes: of rows of equal numbers. invert: as `solve_tril.inverse`.
    """
    slope = rule.bias.slope(None)
    scales = [(c.beta, None)] if c.f is None else [(c.beta, None), (c.f, c.p)]
    if c.restart is not None:
        beta, f, p = c.restart
        scales += [(beta, None)] if f is None else [(beta, None), (f, p)]
    read, in_momentum = (list(columns) for columns in zip(*scales, strict=True))
    start_G, *judged = at_chunk_start(rule, starts, c.G, read)
    overlap = -start_G * inner_products(keys, keys, keys.dtype)
    inverse = invert(slope * overlap) if slope and rule.chunk_size < len(keys) else None

    def row(column, at=None):
        """A column's last number, or that of a token, as a row."""
        if at is not None:
            return jnp.sum(jnp.broadcast_to(column, (len(column), lanes)) * at, axis=0, keepdims=True)
        rows = min(SUBLANES, len(column))
        return jnp.broadcast_to(column[-rows:], (rows, lanes))[-1:]

    opened = None
    if open_at is not None:
        opened = [row(x, open_at) for x in judged], jnp.sum(start_G * open_at, axis=0, keepdims=True), open_at[:1]
    return Prepared(
        judged=judged,
        read=read,
        kept=[row(x) for x in read],
        carried=[x if x is None else row(x) for x in in_momentum],
        opened=opened,
        G=c.G[-1:],
        N=c.N,
        overlap=overlap,
        inverse=inverse,
        scores=inner_products(queries, keys, keys.dtype) * c.G,
    )


def at_chunk_start(rule: MemoryRule, starts, G, scales) -> list[jax.Array]:
    """G and the scales of the sources as they are where each token is judged: after the token before its chunk.

    There, the carried weights (source 0) count fully at the block's first chunk, the initial ones at a reset, nothing
    else. A rule that decays first judges at the token itself, which has not written yet.
    """
    if rule.algorithm.decay_first:
        t, i = (jax.lax.broadcasted_iota(jnp.int32, G.shape, axis) for axis in (0, 1))
        return [jnp.where(t > i, G, 0), *scales]
    # Side by side: a kernel has no gradient of numbers that are repeated along two axes.
    rows, size = jnp.concatenate([G, *scales], axis=1), rule.chunk_size
    column = jax.lax.broadcasted_iota(jnp.int32, (1, rows.shape[1]), 1)
    source = lambda i: (column == len(G) + i).astype(rows.dtype)  # noqa: E731
    last = rows.reshape(-1, size, rows.shape[1])[:, -1:] if size > 1 else rows
    last = jnp.concatenate([source(0).reshape(last[:1].shape), last[:-1]])
    if size > 1:
        last = jnp.broadcast_to(last, (len(last), size, rows.shape[1])).reshape(rows.shape)
    if starts is not None:
        last = jnp.where(starts, source(len(scales) // 2), last)
    return jnp.split(last, list(range(len(G), rows.shape[1])), axis=1)


def memorize(rule: MemoryRule, params, start: MemoryState, initial: MemoryState, inputs):
    """One block: ((weights, momentum, open chunk's start), reads, surprise) from its start state."""
    queries, keys, values, _, _, prepared = inputs
    operand_dtype, slope = keys.dtype, rule.bias.slope(None)
    sources = [*start.weights, *start.momentum]
    if len(prepared.read) > len(sources):
        sources += [*initial.weights, *initial.momentum]

    def from_sources(scales, rows, first=None):
        """rows_t times the weighed sources; `first` is what they have of the first one, if that is known."""
        products = [first] if first is not None else []
        products += [matmul(rows, source, operand_dtype) for source in sources[len(products) :]]
        return sum(scale * product for scale, product in zip(scales, products, strict=True))

    (anchor,) = start.anchor
    at_anchor = None
    if anchor is not sources[0]:  # which is of the first chunk
        parts = keys[: rule.chunk_size], keys[rule.chunk_size :]
        parts = [matmul(x, w, operand_dtype) for x, w in zip(parts, (anchor, sources[0]), strict=True)]
        at_anchor = jnp.concatenate(parts)
    base, values = from_sources(prepared.judged, keys, at_anchor), to_state_dtype(values)
    errors = slope * base - values
    if prepared.inverse is not None:
        errors = solve_tril.solve(False, slope * prepared.overlap, prepared.inverse, errors)
    reads = from_sources(prepared.read, queries) + matmul(prepared.scores, errors, operand_dtype)

    def moved(scales, sources, written):
        parts = zip(scales, sources, strict=True)
        return written + sum(intra_chunk.scaled(scale, source) for scale, source in parts if scale is not None)

    rows = [prepared.G] if prepared.N is None else [prepared.G, prepared.N]
    keys = to_state_dtype(keys)
    ends = zip(
        (prepared.kept, prepared.carried), weighted_outer_products(rows, keys, errors, operand_dtype), strict=False
    )
    weights, *momentum = (moved(scales, sources, written) for scales, written in ends)
    opened = anchor
    if prepared.opened is not None:
        scales, row, at_first = prepared.opened
        (written,) = weighted_outer_products([row], keys, errors, operand_dtype)
        opened = moved(scales, [jnp.where(at_first > 0, anchor, sources[0]), *sources[1:]], written)
    anchor_reads = base - matmul(prepared.overlap, errors, operand_dtype)
    surprise = jax.lax.stop_gradient((rule.bias(anchor_reads, values), jnp.linalg.norm(errors, axis=-1)))
    return ((weights,), tuple(momentum), (opened,)), reads, Surprise(*surprise)
