"""The scalars of a block of tokens: how the start state and each token's gradient weigh in every later state.

With per-token retention a_t = 1 - alpha_t, momentum eta_t, step theta_t and padding mask m_t (papers 1.6.3, 1.6.6):

    W_t = beta_t W_0 + f_t S_0 + sum_{j<=t} G_tj u_j ,      S_t = p_t S_0 + sum_{j<=t} N_tj u_j

G and N carry the minus sign of descent: it is free on a [tokens, tokens] matrix and is not on the weights.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from titans_jax.memory.platform import LANES, target_platform
from titans_jax.memory.types import Gates

# A gate below exp(-30) ~ 1e-13 cuts: nothing from before it survives it. Products across a cut are exactly 0, and the
# products beside it keep full precision because the cut never enters a cumulative sum (a -inf or a -87 would).
LOG_CUT = -30.0

TILE = 16
"""Tokens of a tile. Smaller tiles take fewer exponentials, which is what a CPU's time goes into."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coefficients:
    """beta, f, p: [tokens]; G: [tokens, tokens], lower triangular; N: [tokens], the last row. f, p, N are None without
    momentum.

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

    At padding the retention is 1, the step 0 and the momentum 1, and S is not added (papers 1.6.6). Tiles of TILE
    tokens are computed apart and joined: what a tile passes on is two rows, so all other products are of rank two.
    """
    if mask is not None:
        log_retention, step_size = jnp.where(mask, log_retention, 0), jnp.where(mask, step_size, 0)
        log_momentum = None if log_momentum is None else jnp.where(mask, log_momentum, 0)
    inputs = (log_retention, log_momentum, step_size, mask, resets)
    # On a TPU a narrower tile costs as much as one that fills the lanes.
    tokens, size = step_size.shape[0], LANES if target_platform() == "tpu" else TILE
    size = size if tokens % size == 0 else tokens
    return join(jax.vmap(tile)(*jax.tree.map(lambda x: x.reshape(-1, size), inputs)))


def tile(log_retention, log_momentum, step_size, mask, resets) -> Coefficients:
    """Coefficients of a few tokens, by masked differences of cumulative logs (papers 1.6.6)."""
    kept, beta = products(log_retention, resets)
    if log_momentum is None:
        restart = None if resets is None else (matmul(kept, restarted(log_retention, resets)), None, None)
        return Coefficients(beta, None, None, kept * -step_size[None, :], None, restart)
    carried, p = products(log_momentum, resets)
    N = carried * -step_size[None, :]
    added = kept if mask is None else kept * mask.astype(kept.dtype)[None, :]
    restart = None
    if resets is not None:
        p_restart = matmul(carried, restarted(log_momentum, resets))
        restart = (matmul(kept, restarted(log_retention, resets)), matmul(added, p_restart), p_restart)
    return Coefficients(beta, matmul(added, p), p, matmul(added, N), N, restart)


matmul = functools.partial(jnp.matmul, precision="highest")  # a TPU's default has three digits


def join(tiles: Coefficients) -> Coefficients:
    """Tiles, leaves [tiles, tokens, ...], as one block: each begins with what the last rows before it pass on."""
    count, size = tiles.beta.shape
    G_row = N_row = jnp.zeros((count * size,), tiles.G.dtype)
    scales, restart, parts = (1.0, 0.0, 1.0), (0.0, 0.0, 0.0), []
    for i in range(count):
        c = jax.tree.map(lambda x: x[i], tiles)  # noqa: B023
        place = functools.partial(jnp.pad, pad_width=((0, 0), (i * size, (count - 1 - i) * size)))
        G, N = place(c.G) + c.beta[:, None] * G_row[None, :], None
        if c.N is not None:
            G += c.f[:, None] * N_row[None, :]
            N = place(c.N) + c.p[:, None] * N_row[None, :]
            N_row = N[-1]
        G_row, now = G[-1], pass_on(c, scales)
        scales = last(now)
        began = None
        if c.restart is not None:
            began = add(c.restart, pass_on(c, restart))
            restart = last(began)
        parts.append((now, G, began))
    (beta, f, p), G, restart = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    return Coefficients(beta, f, p, G, None if tiles.N is None else N_row, restart)


def pass_on(c: Coefficients, scales):
    """beta, f, p of tokens of the tile c, of a state that has `scales` (scalars) before it."""
    beta, f, p = scales
    if c.f is None:
        return c.beta * beta, None, None
    return c.beta * beta, c.beta * f + c.f * p, c.p * p


def last(scales):
    return tuple(None if x is None else x[-1] for x in scales)


def add(ours, theirs):
    return tuple(None if x is None else x + y for x, y in zip(ours, theirs, strict=True))


def of_chunks(gates: Gates, resets: jax.Array | None) -> Coefficients:
    """Coefficients of many blocks and matrices: gates [blocks, tokens, matrices] -> leaves [blocks, matrices, ...]."""
    per_matrix = jax.vmap(coefficients, in_axes=(1, 1, 1, None, None))
    return jax.vmap(per_matrix)(*gates.scalars(), gates.mask, resets)


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
