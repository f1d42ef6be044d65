"""Channel-wise retention: sums over past tokens in which every channel forgets at its own rate (papers 1.12, 3.6).

What is left at token t of token i is exp of the log gates summed from i + 1 to t. Taken apart at the first token, its
two factors overflow (0.5^-64); taken apart at a token between i and t, both are at most 1. So a later half of tokens
reads the earlier one through the border between them, exactly and by a matrix product, at every level of `halvings`.
Sums of gates are matrix products too, with a 0/1 matrix, and subtract nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from titans_jax.memory.coefficients import LOG_CUT
from titans_jax.memory.halvings import Level, levels, on_diagonal, power_of_two


def clipped(log_gate: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Log gates [tokens, channels], 0 at padding, none below exp(LOG_CUT)."""
    log_gate = jnp.maximum(log_gate, LOG_CUT)
    return log_gate if mask is None else jnp.where(mask[:, None], log_gate, 0)


def cumulative(log_gate: jax.Array) -> jax.Array:
    """K [tokens, channels]: the sum of log gates until each token, itself included."""
    until = jnp.tril(jnp.ones((len(log_gate), len(log_gate)), log_gate.dtype))
    return jnp.matmul(until, log_gate, precision="highest")


def decayed_scores(x: jax.Array, y: jax.Array, log_gate: jax.Array, visible: jax.Array, own: bool = True) -> jax.Array:
    """[t, i] = sum_c x_tc y_ic exp(log_gate_{i+1,c} + ... + log_gate_{t,c}) where visible[t, i], else 0.

    x, y: [tokens, channels]; log_gate: [tokens, channels] or [tokens, 1]; visible: bool, lower triangular. Without
    `own`, gates count until t - 1 and visible is strictly lower.
    """
    if log_gate.shape[1] == 1:
        K = cumulative(log_gate)
        decay = jnp.exp(jnp.where(visible, (K if own else K - log_gate) - K.T, -jnp.inf))
        return jnp.matmul(x, y.T, precision="highest") * decay
    tokens = len(x)
    x, y, log_gate = (to_power_of_two(z) for z in (x, y, log_gate))
    scores = None
    for level in levels(len(x)):
        decay = to_border(level, log_gate, own)
        x_parts, y_parts = level.split(x), level.split(y)
        across = level.across(jnp.einsum("ntc,nic->nti", x_parts * decay, y_parts * decay, precision="highest"))
        if scores is None:  # no gate is between a token and itself
            itself = jnp.einsum("ntc,nic->nti", x_parts, y_parts, precision="highest")
            scores = jnp.where(np.eye(level.size, dtype=bool), itself, 0)
        scores = on_diagonal(scores, level.size) + across
    scores = jnp.matmul(x, y.T, precision="highest") if scores is None else scores[0]
    return jnp.where(visible, scores[:tokens, :tokens], 0)


def decayed_mix(scores: jax.Array, deltas: jax.Array, log_gate: jax.Array, own: bool = True) -> jax.Array:
    """[t, o] = sum_i scores_ti deltas_io exp(log_gate_{i+1,o} + ... + log_gate_{t,o}); scores lower triangular.

    Without `own`, gates count until t - 1 and scores are strictly lower.
    """
    tokens = len(deltas)
    deltas, log_gate = to_power_of_two(deltas), to_power_of_two(log_gate)
    scores = jnp.pad(scores, (0, len(deltas) - tokens))
    mixed = jnp.diagonal(scores)[:, None] * deltas
    for level in levels(len(deltas)):
        decay = to_border(level, log_gate, own)
        read = jnp.einsum("nti,nio->nto", level.across(scores), level.split(deltas) * decay, precision="highest")
        mixed += (read * decay).reshape(mixed.shape)
    return mixed[:tokens]


def to_border(level: Level, log_gate: jax.Array, own: bool) -> jax.Array:
    """What the gates between each token and its border leave, [parts, size, channels]; a later token's `own` counts."""
    _, with_own, without, before = level.pairs()
    gates = jnp.asarray((with_own if own else without) | before, log_gate.dtype)
    return jnp.exp(jnp.einsum("ts,nsc->ntc", gates, level.split(log_gate), precision="highest"))


def to_power_of_two(x: jax.Array) -> jax.Array:
    """[tokens, channels] with zeros behind."""
    return jnp.pad(x, ((0, power_of_two(len(x)) - len(x)), (0, 0)))


def at_most_zero(difference: jax.Array) -> jax.Array:
    """Log decays, which are above 0 only where they do not count; at 0 the gradient is whole, unlike minimum's."""
    return jnp.where(difference > 0, 0, difference)
