"""The scalars of a block of tokens: how the start state and each token's gradient weigh in every later state.

With per-token retention a_t = 1 - alpha_t, momentum eta_t, step theta_t and padding mask m_t (papers 1.6.3, 1.6.6):

    W_t = beta_t W_0 + f_t S_0 - sum_{j<=t} G_tj u_j ,      S_t = p_t S_0 - sum_{j<=t} N_tj u_j
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

# A gate below exp(-30) ~ 1e-13 cuts: nothing from before it survives it. Products across a cut are exactly 0, and the
# products beside it keep full precision because the cut never enters a cumulative sum (a -inf or a -87 would).
LOG_CUT = -30.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coefficients:
    """beta, f, p: [tokens]; G, N: [tokens, tokens], lower triangular. f, p are None without momentum, and N is G's theta.

    restart: beta, f, p of the document start's state, for tokens after a reset inside the block; None without resets.
    """

    beta: jax.Array
    f: jax.Array | None
    p: jax.Array | None
    G: jax.Array
    N: jax.Array | None
    restart: tuple[jax.Array, jax.Array | None, jax.Array | None] | None


def coefficients(log_retention, log_momentum, step_size, mask=None, resets=None) -> Coefficients:
    """Coefficients of one block and one fast matrix; log gates, step size, mask and resets are [tokens].

    At padding the retention is 1, the step 0 and the momentum 1, and S is not added (papers 1.6.6).
    """
    if mask is not None:
        log_retention = jnp.where(mask, log_retention, 0)
        step_size = jnp.where(mask, step_size, 0)
    kept, kept_from_start = products(log_retention, resets)
    restart = None
    if log_momentum is None:
        G = kept * step_size[None, :]
        if resets is not None:
            restart = (kept @ restarted(log_retention, resets), None, None)
        return Coefficients(kept_from_start, None, None, G, None, restart)
    if mask is not None:
        log_momentum = jnp.where(mask, log_momentum, 0)
    carried, p = products(log_momentum, resets)
    N = carried * step_size[None, :]
    added = kept if mask is None else kept * mask.astype(kept.dtype)[None, :]
    if resets is not None:
        p_restart = carried @ restarted(log_momentum, resets)
        restart = (kept @ restarted(log_retention, resets), added @ p_restart, p_restart)
    return Coefficients(kept_from_start, added @ p, p, added @ N, N, restart)


def products(log_gate: jax.Array, resets: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """L[t, i] = product of gates i+1 .. t (0 for i > t, 1 for i = t), and the products of gates 0 .. t."""
    cut = log_gate < LOG_CUT
    total = jnp.cumsum(jnp.where(cut, 0, log_gate))
    cuts = jnp.cumsum(cut if resets is None else cut | resets, dtype=jnp.int32)
    visible = jnp.tril(cuts[:, None] == cuts[None, :])
    pairs = jnp.exp(jnp.where(visible, total[:, None] - total[None, :], -jnp.inf))
    from_start = jnp.exp(jnp.where(cuts == 0, total, -jnp.inf))
    return pairs, from_start


def restarted(log_gate: jax.Array, resets: jax.Array) -> jax.Array:
    """The gate of each document's first token, 0 elsewhere: what a document's start state passes on first."""
    return jnp.where(resets, jnp.exp(log_gate), 0)
