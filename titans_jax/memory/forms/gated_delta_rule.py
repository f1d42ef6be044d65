"""Linear memories whose every token is a chunk of its own, exactly, with scalar or channel-wise retention.

For M(x) = x S, retention a_t (a scalar, or one per input channel), and errors judged at the state before token t, as
it is or after this token's retention ("decay first": r_t = a_t, else 1):

    e_t = s_t (k_t * r_t) S_{t-1} - v_t ,      S_t = Diag(a_t) S_{t-1} - theta_t (eta_t * k_t)^T e_t

The errors of a block solve one unit lower-triangular system (design 3.2). GLA, HGRN2, DFW (s = 0, no system), Kimi
Delta Attention and RWKV-7 are cases; with scalar gates, momentum or longer chunks see `linear_block`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from titans_jax.memory.gates import Gates
from titans_jax.memory.rule import algorithms, architectures, biases
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, Surprise
from titans_jax.ops import channel_decay, channel_decay_pallas, solve_tril
from titans_jax.ops.matmul import broadcast_column, matmul, outer_products, to_state_dtype


def runs(rule: MemoryRule, gates: Gates) -> bool:
    """Whether this path is the rule: output channels may only forget or step apart where no error is judged, and are
    judged by one slope."""
    by_outputs = gates.log_value_retention is not None or gates.value_step_size is not None
    plain = isinstance(rule.architecture, architectures.Linear) and rule.bias.affine and rule.retention.linear
    plain = plain and not rule.algorithm.has_momentum and not isinstance(rule.algorithm, algorithms.LeastSquares)
    plain = plain and (gates.bias_gate is None or gates.bias_gate.shape[-1] == 1)
    return plain and rule.chunk_size == 1 and (not by_outputs or isinstance(rule.bias, biases.DotProduct))


def folded(gates: Gates) -> Gates:
    """Gates [tokens, ...] as a block takes them: the scalar retention in that of the keys' channels, [tokens, channels
    or 1], and padding, which keeps all and writes nothing, in both retentions and in the step size."""
    by_key = gates.log_retention
    if gates.log_key_retention is not None:
        by_key = by_key + gates.log_key_retention
    by_value = gates.log_value_retention
    return dataclasses.replace(
        gates,
        step_size=gates.step_size if gates.mask is None else jnp.where(gates.mask[:, None], gates.step_size, 0),
        log_key_retention=channel_decay.clipped(by_key, gates.mask),
        log_value_retention=by_value if by_value is None else channel_decay.clipped(by_value, gates.mask),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """What of a block does not depend on its start state.

    judged, read: keys and queries for each source (the carried state and, with resets, the initial one), scaled by what
    is left of its rows; kept: what is left of them after the last token, [channels, 1]. judged_out, out, to_end: what
    is left of its columns, and at the end of each token's, None where all is. by_value: retention of value channels.
    written: minus step times keys, as they enter the weights at the block's end. overlap, scores: how errors weigh in
    what is judged, None where nothing is, and in reads. inverse: of the system that the errors solve, None where they
    depend on no other.
    """

    by_value: channel_decay.ChannelDecay | channel_decay_pallas.ChannelDecay | None
    judged: list[jax.Array]
    read: list[jax.Array]
    kept: list[jax.Array]
    judged_out: jax.Array | None
    out: jax.Array | None
    to_end: jax.Array | None
    written: jax.Array
    overlap: jax.Array | None
    scores: jax.Array
    inverse: jax.Array | None


def prepare(rule: MemoryRule, queries, keys, values, gates: Gates, resets) -> Prepared:
    """`Prepared`, leaves [blocks, ...], of inputs [blocks, tokens, ...]."""
    documents = None if resets is None else count(resets)[:, None]
    block = functools.partial(prepare_block, rule)
    return jax.vmap(block)(queries, keys, jax.vmap(folded)(gates), documents)


def count(resets: jax.Array) -> jax.Array:
    """How many documents began in a block until each of its tokens, [blocks, tokens]."""
    return jnp.cumsum(resets, axis=1, dtype=jnp.int32)


def prepare_block(
    rule: MemoryRule,
    queries,
    keys,
    gates: Gates,
    document,
    decay: type = channel_decay.ChannelDecay,
    invert: Callable[[jax.Array], jax.Array] = solve_tril.inverse,
    watch: bool = True,
) -> Prepared:
    """`Prepared` of one block.

    gates: `folded`. document: `count` as a row [1, tokens], None without resets. decay: the class that makes sums over
    past tokens of log gates. invert: as `solve_tril.inverse`. watch: whether anyone asks for the surprise.
    """
    operand_dtype, x, keys = keys.dtype, to_state_dtype(queries), to_state_dtype(keys)
    tokens, width = keys.shape
    visible = begun = None
    if document is not None:
        begun = document.T
        # NaN, of a layout that broke the rules, hides nothing.
        visible = jnp.tri(tokens, dtype=bool) & ~(begun > document)
    by_key, by_value = (
        None if x is None else decay(x, visible) for x in (gates.log_key_retention, gates.log_value_retention)
    )
    decays_first = rule.algorithm.decay_first

    def left(of):
        """What is left at each token of its document's start: read, and judged, [tokens, channels]."""
        remaining = broadcast_column(of.since_start(), width)
        if decays_first:
            return remaining, remaining
        # Before it forgets, a token has what the one before it had.
        starts = rows(remaining) == 0
        if document is not None:
            starts |= begun > before(begun)
        return remaining, jnp.where(starts, 1, before(remaining))

    def of_sources(x):
        """x [tokens, channels] in the documents that began with the carried and with the initial state."""
        return [x] if document is None else [jnp.where(begun > 0, 0, x), jnp.where(begun > 0, x, 0)]

    remaining, judged = left(by_key)
    judged_out = out = to_end = None
    if by_value is not None:
        (out, judged_out), to_end = left(by_value), broadcast_column(by_value.to_end(), width)
    written = -broadcast_column(gates.step_size, width) * keys
    written = written if gates.key_step_size is None else written * gates.key_step_size
    solves = not isinstance(rule.bias, biases.DotProduct)
    judging = [keys if decays_first else after(keys)] if solves or watch else []
    scores, *overlap = by_key.scores((x, *judging), written, operand_dtype, rule.algorithm.steps)
    overlap, inverse = overlap[0] if overlap else None, None
    if overlap is not None and decays_first:
        overlap = jnp.tril(overlap, -1)
    elif overlap is not None:
        overlap = before(overlap) if visible is None else jnp.where(visible, before(overlap), 0)
    if solves:
        inverse = invert(-broadcast_column(rule.bias.slope(gates.bias_gate), tokens) * overlap)
    lasting = written * broadcast_column(by_key.to_end(), width)
    return Prepared(
        by_value=by_value,
        judged=of_sources(keys * judged),
        read=of_sources(x * remaining),
        kept=[x[-1:].T for x in of_sources(remaining)],
        judged_out=judged_out,
        out=out,
        to_end=to_end,
        written=lasting if document is None else jnp.where(begun < begun[-1:], 0, lasting),
        overlap=overlap,
        scores=scores,
        inverse=inverse,
    )


def memorize(rule: MemoryRule, params, start: MemoryState, initial: MemoryState, inputs):
    """One block: ((weights, momentum, anchor), reads, surprise) from its start state; no surprise if nothing is
    judged."""
    queries, _, values, gates, _, prepared = inputs
    operand_dtype, by_value, values = queries.dtype, prepared.by_value, to_state_dtype(values)
    sources = [start.weights[0]] if len(prepared.read) == 1 else [start.weights[0], initial.weights[0]]

    def from_start(rows, out):
        """rows_t times what is left of the state that token t's document began with."""
        total = sum(matmul(row, source, operand_dtype) for row, source in zip(rows, sources, strict=True))
        return total if out is None else total * out

    def past(weights, stepped):
        """The sum over past tokens i of weights_ti stepped_i times what is left of it."""
        if by_value is None:
            return matmul(weights, stepped, operand_dtype)
        return by_value.mix(weights, stepped, operand_dtype)

    anchor_reads, errors = from_start(prepared.judged, prepared.judged_out), -values
    if prepared.inverse is not None:
        slopes = rule.bias.slope(gates.bias_gate)
        errors = broadcast_column(slopes, values.shape[1]) * anchor_reads - values
        system = -broadcast_column(slopes, len(values)) * prepared.overlap
        errors = solve_tril.solve(False, system, prepared.inverse, errors)
    stepped = errors if gates.value_step_size is None else errors * gates.value_step_size
    surprise = None
    if prepared.overlap is not None:  # of value channels, by the token before
        own = past(prepared.overlap, stepped) if by_value is None else before(past(after(prepared.overlap), stepped))
        loss = rule.bias(anchor_reads + own, values, gates.bias_gate)
        surprise = Surprise(*jax.lax.stop_gradient((loss, jnp.linalg.norm(errors, axis=-1))))

    reads = from_start(prepared.read, prepared.out) + past(prepared.scores, stepped)
    kept = zip(prepared.kept, sources, strict=True)
    kept = sum(broadcast_column(of_rows, values.shape[1]) * source for of_rows, source in kept)
    kept = kept if by_value is None else kept * prepared.out[-1:]
    stepped = stepped if by_value is None else stepped * prepared.to_end
    weights = (kept + outer_products(prepared.written, stepped, operand_dtype),)
    return (weights, (), weights), reads, surprise


def before(x: jax.Array) -> jax.Array:
    """Rows of the token before, 0 before the first."""
    return jnp.where(rows(x) == 0, 0, jnp.roll(x, 1, axis=0))


def after(x: jax.Array) -> jax.Array:
    """Rows of the token after, 0 after the last."""
    return jnp.where(rows(x) == len(x) - 1, 0, jnp.roll(x, -1, axis=0))


def rows(x: jax.Array) -> jax.Array:
    """The row of every number."""
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
