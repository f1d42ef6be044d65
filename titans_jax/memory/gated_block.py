"""Linear memories whose every token is a chunk of its own, exactly, with scalar or channel-wise retention.

For M(x) = x S, retention a_t (a scalar, or one per input channel), and errors judged at the state before token t, as
it is or after this token's retention ("decay first": r_t = a_t, else 1):

    e_t = s_t (k_t * r_t) S_{t-1} - v_t ,      S_t = Diag(a_t) S_{t-1} - theta_t (eta_t * k_t)^T e_t

The errors of a block solve one unit lower-triangular system (design 3.2). GLA, HGRN2, DFW (s = 0, no system), Gated
DeltaNet and RWKV-7 are cases; with momentum or longer chunks see `linear_block`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from titans_jax.memory import algorithms, architectures, biases, channels, engine
from titans_jax.memory.linear_block import invert_unit_lower
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
    columns, and at the end of each token's, None where all is. by_value: log retention of value channels. written: keys
    [head_dim, tokens] as they enter the weights at the block's end. overlap, scores: how errors weigh in what is judged
    and in reads. inverse: of the system that the errors solve, None where they depend on no other.
    """

    by_value: jax.Array | None
    judged: list[jax.Array]
    read: list[jax.Array]
    kept: list[jax.Array]
    judged_out: list[jax.Array] | None
    out: list[jax.Array] | None
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
    by_key, by_value = channels.clipped(log_retention, gates.mask), None
    K, V = channels.cumulative(by_key), None
    if gates.log_value_retention is not None:
        by_value = channels.clipped(gates.log_value_retention, gates.mask)
        V = channels.cumulative(by_value)
    document = jnp.zeros(keys.shape[:1], jnp.int32) if resets is None else jnp.cumsum(resets, dtype=jnp.int32)
    visible = jnp.tril(document[:, None] == document[None, :])

    def left(K, K_rows):
        """What is left at K_rows of the carried and of the initial state: decays [tokens, channels]."""
        carried = (document == 0)[:, None]
        decays = [jnp.where(carried, jnp.exp(K_rows), 0)]
        if resets is not None:  # K before the first token of each token's document
            began = jnp.where(visible & resets[None, :], 1.0, 0.0).astype(K.dtype)
            began = jnp.matmul(began, shifted(K), precision="highest")
            decays.append(jnp.where(carried, 0, jnp.exp(channels.at_most_zero(K_rows - began))))
        return decays

    step_size = gates.step_size if gates.mask is None else jnp.where(gates.mask[:, None], gates.step_size, 0)
    written = keys if gates.key_step_size is None else keys * gates.key_step_size
    descent = -step_size.T  # on [tokens, tokens], where it costs least
    judged_at = K if rule.algorithm.decay_first else shifted(K)
    strictly = visible & ~jnp.eye(len(document), dtype=bool)
    overlap = channels.decayed_scores(keys, written, by_key, strictly, own=rule.algorithm.decay_first) * descent
    inverse = None
    if not isinstance(rule.bias, biases.DotProduct):
        inverse = invert_unit_lower(-rule.bias.slope(gates.bias_gate) * overlap)
    remaining = left(K, K)
    return Prepared(
        by_value=by_value,
        judged=[keys * decay for decay in left(K, judged_at)],
        read=[x * decay for decay in remaining],
        kept=[decay[-1][:, None] for decay in remaining],
        judged_out=None if V is None else left(V, shifted(V)),
        out=None if V is None else left(V, V),
        to_end=None if V is None else jnp.exp(V[-1:] - V),
        written=jnp.where(visible[-1], (written * jnp.exp(K[-1:] - K)).T, 0) * descent,
        overlap=overlap,
        scores=channels.decayed_scores(x, written, by_key, visible) * descent,
        inverse=inverse,
    )


def memorize(rule: MemoryRule, params, start: MemoryState, initial: MemoryState, inputs):
    """One block: ((weights, momentum, anchor), reads, surprise) from its start state."""
    queries, _, values, gates, resets, prepared = inputs
    operand_dtype, by_value, values = queries.dtype, prepared.by_value, engine.widen(values)
    sources = [start.weights[0]] if resets is None else [start.weights[0], initial.weights[0]]

    def from_start(rows, outputs):
        """rows_t times what is left of the state that token t's document began with."""
        parts = zip(rows, sources, outputs or [1.0] * len(sources), strict=True)
        return sum(engine.matmul(row, source, operand_dtype) * out for row, source, out in parts)

    slope = rule.bias.slope(gates.bias_gate)
    anchor_reads = from_start(prepared.judged, prepared.judged_out)
    errors = slope * anchor_reads - values
    if prepared.inverse is not None:
        errors = engine.matmul(prepared.inverse, errors, errors.dtype)
    stepped = errors if gates.value_step_size is None else errors * gates.value_step_size
    # Read for the surprise only; without an error to judge, nothing above is needed.
    anchor_reads += past(prepared.overlap, stepped, by_value, False, operand_dtype)
    surprise = (rule.bias(anchor_reads, values, gates.bias_gate), jnp.linalg.norm(errors, axis=-1))

    reads = from_start(prepared.read, prepared.out) + past(prepared.scores, stepped, by_value, True, operand_dtype)
    columns = [1.0] * len(sources) if by_value is None else [out[-1][None] for out in prepared.out]
    kept = sum(rows * source * column for rows, source, column in zip(prepared.kept, sources, columns, strict=True))
    stepped = stepped if by_value is None else stepped * prepared.to_end
    weights = (kept + engine.matmul(prepared.written, stepped, operand_dtype),)
    return (weights, (), weights), reads, Surprise(*jax.lax.stop_gradient(surprise))


def past(scores, errors, log_gate, own: bool, operand_dtype):
    """scores @ errors, in which every column of errors fades by its log gates (see `channels.decayed_mix`)."""
    if log_gate is None:
        return engine.matmul(scores, errors, operand_dtype)
    return channels.decayed_mix(scores, errors, log_gate, own)


def shifted(K: jax.Array) -> jax.Array:
    """K of the token before, 0 before the first."""
    return jnp.concatenate([jnp.zeros_like(K[:1]), K[:-1]])
