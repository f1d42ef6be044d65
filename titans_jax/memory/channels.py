"""Channel-wise retention: sums over past tokens in which every channel forgets at its own rate (papers 1.12, 3.6).

What is left at token t of token i is exp of the log gates summed from i + 1 to t. Taken apart at the first token, its
two factors overflow (0.5^-64); taken apart at a token between i and t, both are at most 1. So a later half of tokens
reads the earlier one through the border between them, exactly and by a matrix product, at every level of `halvings`.
Sums of gates are matrix products too, with a 0/1 matrix, and subtract nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from titans_jax.memory import engine, halvings
from titans_jax.memory.coefficients import LOG_CUT


def clipped(log_gate: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Log gates [tokens, channels], 0 at padding, none below exp(LOG_CUT)."""
    log_gate = jnp.maximum(log_gate, LOG_CUT)
    return log_gate if mask is None else jnp.where(mask[:, None], log_gate, 0)


def cumulative(log_gate: jax.Array, visible: jax.Array | None = None) -> jax.Array:
    """K [tokens, channels]: the sum of log gates until each token, itself included, of all or of the visible tokens."""
    until = jnp.tril(jnp.ones((len(log_gate), len(log_gate)), bool)) if visible is None else visible
    return jnp.matmul(until.astype(log_gate.dtype), log_gate, precision="highest")


def decayed_scores(x: jax.Array, y: jax.Array, log_gate: jax.Array, visible: jax.Array) -> jax.Array:
    """[t, i] = sum_c x_tc y_ic exp(log_gate_{i+1,c} + ... + log_gate_{t,c}) where visible[t, i], else 0.

    x, y: [tokens, channels]; log_gate: [tokens, channels] or [tokens, 1]; visible: bool, lower triangular.
    """
    if log_gate.shape[1] == 1:
        K = engine.widened(cumulative(log_gate), len(log_gate))
        return jnp.matmul(x, y.T, precision="highest") * jnp.exp(jnp.where(visible, K - K.T, -jnp.inf))
    tokens = len(x)
    x, y, log_gate = (to_power_of_two(z) for z in (x, y, log_gate))
    scores = engine.row_sums(x * y)[:, None]  # no gate is between a token and itself
    for until, after in to_borders(log_gate):
        later, earlier = later_half(x, until), earlier_half(y, after)
        scores = halvings.join(scores, jnp.einsum("ntc,nic->nti", later, earlier, precision="highest"))
    return jnp.where(visible, scores[0, :tokens, :tokens], 0)


def decayed_mix(scores: jax.Array, deltas: jax.Array, log_gate: jax.Array) -> jax.Array:
    """[t, o] = sum_i scores_ti deltas_io exp(log_gate_{i+1,o} + ... + log_gate_{t,o}); scores lower triangular."""
    tokens = len(deltas)
    deltas, log_gate = to_power_of_two(deltas), to_power_of_two(log_gate)
    diagonal, squares = halvings.squares(jnp.pad(scores, (0, len(deltas) - tokens)))
    mixed = (diagonal[:, None] * deltas)[:, None]
    for (until, after), across in zip(to_borders(log_gate), squares, strict=True):
        read = jnp.einsum("nti,nio->nto", across, earlier_half(deltas, after), precision="highest")
        earlier, later = halvings.halves(mixed)
        mixed = jnp.concatenate([earlier, later + read * jnp.exp(until)], axis=1)
    return mixed[0, :tokens]


def to_borders(log_gate: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Per level, the sums of log gates between tokens and the border between the halves of their part, [parts, half,
    channels]: of the later half's tokens, from the border until the token; of the earlier's, behind it."""
    until, sums = log_gate[:, None], []
    after = jnp.zeros_like(until)
    while len(until) > 1:
        (early_until, until), (after, late_after) = halvings.halves(until), halvings.halves(after)
        sums.append((until, after))
        after = jnp.concatenate([after + until[:, -1:], late_after], axis=1)
        until = jnp.concatenate([early_until, until + early_until[:, -1:]], axis=1)
    return sums


def later_half(x: jax.Array, until: jax.Array) -> jax.Array:
    """Later halves of x [tokens, channels], faded by the gates `until` their tokens, [parts, half, channels]."""
    return halvings.halves(x.reshape(-1, *until.shape[1:]))[1] * jnp.exp(until)


def earlier_half(y: jax.Array, after: jax.Array) -> jax.Array:
    """Earlier halves of y [tokens, channels], faded by the gates `after` their tokens, [parts, half, channels]."""
    return halvings.halves(y.reshape(-1, *after.shape[1:]))[0] * jnp.exp(after)


def to_power_of_two(x: jax.Array) -> jax.Array:
    """[tokens, channels] with zeros behind."""
    return jnp.pad(x, ((0, halvings.power_of_two(len(x)) - len(x)), (0, 0)))
