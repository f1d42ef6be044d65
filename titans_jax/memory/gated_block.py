"""Linear memories whose every token is a chunk of its own, exactly, with scalar or channel-wise retention.

For M(x) = x S, retention a_t (a scalar, or one per input channel), and errors judged at the state before token t, as
it is or after this token's retention ("decay first": r_t = a_t, else 1):

    e_t = s_t (k_t * r_t) S_{t-1} - v_t ,      S_t = Diag(a_t) S_{t-1} - theta_t (eta_t * k_t)^T e_t

The errors of a block solve one unit lower-triangular system (design 3.2). GLA, HGRN2, DFW (s = 0, no system), Kimi
Delta Attention and RWKV-7 are cases; with scalar gates, momentum or longer chunks see `linear_block`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from titans_jax.memory import algorithms, architectures, biases, channels, engine, triangular
from titans_jax.memory.types import Gates, MemoryRule, MemoryState, Surprise


def runs(rule: MemoryRule, gates: Gates) -> bool:
    """Whether this path is the rule: output channels may only forget or step apart where no error is judged."""
    by_outputs = gates.log_value_retention is not None or gates.value_step_size is not None
    plain = isinstance(rule.architecture, architectures.Linear) and rule.bias.affine and rule.retention.linear
    plain = plain and not rule.algorithm.has_momentum and not isinstance(rule.algorithm, algorithms.LeastSquares)
    return plain and rule.chunk_size == 1 and (not by_outputs or isinstance(rule.bias, biases.DotProduct))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """What of a block does not depend on its start state.

    judged, read: keys and queries for each source (the carried state and, with resets, the initial one), scaled by what
    is left of its rows; kept: what is left of them after the last token. judged_out, out, to_end: what is left of its
    columns, and at the end of each token's, None where all is. by_value: log retention of value channels. written:
    minus step times keys, as they enter the weights at the block's end. overlap, scores: how errors weigh in what is
    judged and in reads. inverse: of the system that the errors solve, None where they depend on no other.
    """

    by_value: jax.Array | None
    judged: list[jax.Array]
    read: list[jax.Array]
    kept: list[jax.Array]
    judged_out: jax.Array | None
    out: jax.Array | None
    to_end: jax.Array | None
    written: jax.Array
    overlap: jax.Array
    scores: jax.Array
    inverse: jax.Array | None


def prepare(rule: MemoryRule, queries, keys, values, gates: Gates, resets) -> Prepared:
    """`Prepared`, leaves [blocks, ...], of inputs [blocks, tokens, ...]."""
    return jax.vmap(lambda *block: prepare_block(rule, *block))(queries, keys, gates, resets)


def prepare_block(rule: MemoryRule, queries, keys, gates: Gates, resets) -> Prepared:
    """`Prepared` of one block."""
    x, keys = engine.widen(queries), engine.widen(keys)
    log_retention = gates.log_retention
    if gates.log_key_retention is not None:
        log_retention = log_retention + gates.log_key_retention
    by_key = channels.clipped(log_retention, gates.mask)
    document = jnp.zeros(keys.shape[:1], jnp.int32) if resets is None else jnp.cumsum(resets, dtype=jnp.int32)
    visible = jnp.tril(document[:, None] == document[None, :])
    strictly = visible & ~jnp.eye(len(document), dtype=bool)
    decays_first = rule.algorithm.decay_first
    judged_at = visible if decays_first else strictly

    def left(gates, log_gate):
        """What these gates of every token leave, [tokens, channels]."""
        return engine.widened(jnp.exp(channels.cumulative(log_gate, gates)), keys.shape[1])

    def of_sources(x):
        """x [tokens, channels] in the documents that began with the carried and with the initial state."""
        if resets is None:
            return [x]
        carried = (document == 0)[:, None]
        return [jnp.where(carried, x, 0), jnp.where(carried, 0, x)]

    by_value = judged_out = out = to_end = None
    if gates.log_value_retention is not None:
        by_value = channels.clipped(gates.log_value_retention, gates.mask)
        judged_out, out, to_end = (left(of, by_value) for of in (judged_at, visible, strictly.T))
    step_size = gates.step_size if gates.mask is None else jnp.where(gates.mask[:, None], gates.step_size, 0)
    written = -engine.widened(step_size, keys.shape[1]) * keys
    written = written if gates.key_step_size is None else written * gates.key_step_size
    # Before it forgets, a token reads what the one before it would.
    judging = keys if decays_first else after(keys)
    scores, overlap = channels.decayed_scores((x, judging), written, by_key, visible, rule.algorithm.steps)
    overlap = jnp.where(strictly, overlap if decays_first else before(overlap), 0)
    inverse = None
    if not isinstance(rule.bias, biases.DotProduct):
        slope = engine.widened(rule.bias.slope(gates.bias_gate), len(keys))
        inverse = triangular.inverse(-slope * overlap)
    remaining = left(visible, by_key)
    return Prepared(
        by_value=by_value,
        judged=of_sources(keys * left(judged_at, by_key)),
        read=of_sources(x * remaining),
        kept=[decay[-1][:, None] for decay in of_sources(remaining)],
        judged_out=judged_out,
        out=out,
        to_end=to_end,
        written=jnp.where(visible[-1][:, None], written * left(strictly.T, by_key), 0),
        overlap=overlap,
        scores=scores,
        inverse=inverse,
    )


def memorize(rule: MemoryRule, params, start: MemoryState, initial: MemoryState, inputs):
    """One block: ((weights, momentum, anchor), reads, surprise) from its start state."""
    queries, _, values, gates, resets, prepared = inputs
    operand_dtype, by_value, values = queries.dtype, prepared.by_value, engine.widen(values)
    sources = [start.weights[0]] if resets is None else [start.weights[0], initial.weights[0]]

    def from_start(rows, out):
        """rows_t times what is left of the state that token t's document began with."""
        total = sum(engine.matmul(row, source, operand_dtype) for row, source in zip(rows, sources, strict=True))
        return total if out is None else total * out

    slope = engine.widened(rule.bias.slope(gates.bias_gate), values.shape[1])
    anchor_reads = from_start(prepared.judged, prepared.judged_out)
    errors = slope * anchor_reads - values
    if prepared.inverse is not None:
        system = -engine.widened(rule.bias.slope(gates.bias_gate), len(values)) * prepared.overlap
        errors = triangular.solve(False, system, prepared.inverse, errors)
    stepped = errors if gates.value_step_size is None else errors * gates.value_step_size
    # Read for the surprise only; without an error to judge, nothing above is needed.
    if by_value is None:
        anchor_reads += engine.matmul(prepared.overlap, stepped, operand_dtype)
    else:  # by the token before
        anchor_reads += before(channels.decayed_mix(after(prepared.overlap), stepped, by_value))
    surprise = (rule.bias(anchor_reads, values, gates.bias_gate), jnp.linalg.norm(errors, axis=-1))

    reads = from_start(prepared.read, prepared.out)
    if by_value is None:
        reads += engine.matmul(prepared.scores, stepped, operand_dtype)
    else:
        reads += channels.decayed_mix(prepared.scores, stepped, by_value)
    of_columns = jnp.ones_like(values[-1:]) if by_value is None else prepared.out[-1:]
    kept = zip(prepared.kept, sources, strict=True)
    kept = sum(engine.matmul(of_rows, of_columns, of_rows.dtype) * source for of_rows, source in kept)
    stepped = stepped if by_value is None else stepped * prepared.to_end
    weights = (kept + engine.outer(prepared.written, stepped, operand_dtype),)
    return (weights, (), weights), reads, Surprise(*jax.lax.stop_gradient(surprise))


def before(x: jax.Array) -> jax.Array:
    """Rows of the token before, 0 before the first."""
    return jnp.pad(x[:-1], ((1, 0), (0, 0)))


def after(x: jax.Array) -> jax.Array:
    """Rows of the token after, 0 after the last."""
    return jnp.pad(x[1:], ((0, 1), (0, 0)))
