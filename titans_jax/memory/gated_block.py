"""Linear memories whose every token is a chunk of its own, exactly, with scalar or channel-wise retention.

For M(x) = x S, retention a_t (a scalar, or one per input channel), and errors judged at the state before token t, as
it is or after this token's retention ("decay first": r_t = a_t, else 1):

    e_t = s_t (k_t * r_t) S_{t-1} - v_t ,      S_t = Diag(a_t) S_{t-1} - theta_t (eta_t * k_t)^T e_t

The errors of a block solve one unit lower-triangular system (design 3.2). GLA, HGRN2, DFW (s = 0, no system), Gated
DeltaNet and RWKV-7 are cases; with momentum or longer chunks see `linear_block`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from titans_jax.memory import algorithms, architectures, biases, channels, engine
from titans_jax.memory.linear_block import solve_unit_lower
from titans_jax.memory.types import Gates, MemoryRule, MemoryState, Surprise


def runs(rule: MemoryRule, gates: Gates) -> bool:
    """Whether this path is the rule: output channels may only forget or step apart where no error is judged."""
    by_outputs = gates.log_value_retention is not None or gates.value_step_size is not None
    plain = isinstance(rule.architecture, architectures.Linear) and rule.bias.affine and rule.retention.linear
    plain = plain and not rule.algorithm.has_momentum and not isinstance(rule.algorithm, algorithms.LeastSquares)
    return plain and rule.chunk_size == 1 and (not by_outputs or isinstance(rule.bias, biases.DotProduct))


def memorize(rule: MemoryRule, params, start: MemoryState, initial: MemoryState, inputs):
    """One block: ((weights, momentum, anchor), reads, surprise) from its start state."""
    queries, keys, values, gates, resets, _ = inputs
    operand_dtype = queries.dtype
    x, keys, values = engine.widen(queries), engine.widen(keys), engine.widen(values)
    log_retention = gates.log_retention
    if gates.log_key_retention is not None:
        log_retention = log_retention + gates.log_key_retention
    K, V = channels.cumulative(log_retention, gates.mask), None
    if gates.log_value_retention is not None:
        V = channels.cumulative(gates.log_value_retention, gates.mask)
    sources = [start.weights[0]] if resets is None else [start.weights[0], initial.weights[0]]
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

    def from_start(rows, K_rows, V_rows=None):
        """rows_t times what is left of the state that token t's document began with."""
        outputs = [1.0] * len(sources) if V_rows is None else left(V, V_rows)
        parts = zip(sources, left(K, K_rows), outputs, strict=True)
        return sum(engine.matmul(rows * decay, source, operand_dtype) * out for source, decay, out in parts)

    step_size = gates.step_size if gates.mask is None else jnp.where(gates.mask[:, None], gates.step_size, 0)
    written = -step_size * keys
    if gates.key_step_size is not None:
        written *= gates.key_step_size

    judged_at = K if rule.algorithm.decay_first else shifted(K)
    strictly = visible & ~jnp.eye(len(document), dtype=bool)
    overlap = channels.decayed_scores(keys, judged_at, written, K, strictly)
    anchor_reads = from_start(keys, judged_at, None if V is None else shifted(V))
    slope = rule.bias.slope(gates.bias_gate)
    errors = slope * anchor_reads - values
    if not isinstance(rule.bias, biases.DotProduct):
        errors = solve_unit_lower(-slope * overlap, errors)
    stepped = errors if gates.value_step_size is None else errors * gates.value_step_size
    # Read for the surprise only; without an error to judge, nothing above is needed.
    anchor_reads += past(overlap, V, None if V is None else shifted(V), stepped, operand_dtype)
    surprise = (rule.bias(anchor_reads, values, gates.bias_gate), jnp.linalg.norm(errors, axis=-1))

    scores = channels.decayed_scores(x, K, written, K, visible)
    reads = from_start(x, K, V) + past(scores, V, V, stepped, operand_dtype)
    outputs = [jnp.ones((1, 1), K.dtype)] * len(sources) if V is None else left(V, V)
    kept = sum(
        decay[-1][:, None] * source * out[-1][None]
        for decay, source, out in zip(left(K, K), sources, outputs, strict=True)
    )
    written = jnp.where(visible[-1][:, None], written * jnp.exp(K[-1:] - K), 0)
    stepped = stepped if V is None else stepped * jnp.exp(V[-1:] - V)
    weights = (kept + engine.matmul(written.T, stepped, operand_dtype),)
    return (weights, (), weights), reads, Surprise(*jax.lax.stop_gradient(surprise))


def past(scores, V, V_rows, errors, operand_dtype):
    """[t, o] = sum_i scores_ti exp(V_rows_to - V_io) errors_io, with no decay where V is None."""
    if V is None:
        return engine.matmul(scores, errors, operand_dtype)
    return channels.decayed_mix(scores, V, errors, V_rows)


def shifted(K: jax.Array) -> jax.Array:
    """K of the token before, 0 before the first."""
    return jnp.concatenate([jnp.zeros_like(K[:1]), K[:-1]])
