"""The scalars of a block of tokens: how the start state and each token's gradient weigh in every later state.

With per-token retention a_t = 1 - alpha_t, momentum eta_t, step theta_t and padding mask m_t (papers 1.6.3, 1.6.6):

    W_t = beta_t W_0 + f_t S_0 + sum_{j<=t} G_tj u_j ,      S_t = p_t S_0 + sum_{j<=t} N_tj u_j

G and N carry the minus sign of descent: it is free on a [tokens, tokens] matrix and is not on the weights.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from titans_jax.memory.gates import Gates
from titans_jax.ops.platform import target_platform
from titans_jax.ops.matmul import inner_products, matmul_three_pass, outer_products

TILE = 16
"""Tokens of a tile. Smaller tiles take fewer exponentials, which is what a CPU's time goes into."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coefficients:
    """beta, f, p: columns [tokens, 1]; G: [tokens, tokens], lower triangular; N: the last row, [1, tokens]. f, p, N are
    None without momentum.

    restart: beta, f, p of the document start's state, for tokens after a reset inside the block; None without resets.
    """

    beta: jax.Array
    f: jax.Array | None
    p: jax.Array | None
    G: jax.Array
    N: jax.Array | None
    restart: tuple[jax.Array, jax.Array | None, jax.Array | None] | None


class Cumulative(NamedTuple):
    """A gate's logs summed until each token, itself included, as row [1, tokens] and column [tokens, 1].

    reach: from each token on, how many tokens, itself included, come before the next cut, [1, tokens]. first: the gate
    of the first token, [1, 1], 0 if it cuts. began: the gate of each document's first token, 0 elsewhere: what a
    document's start state passes on first.
    """

    total: jax.Array
    column: jax.Array
    reach: jax.Array
    first: jax.Array
    began: jax.Array | None


def coefficients(log_retention, log_momentum, step_size, mask=None, resets=None) -> Coefficients:
    """Coefficients of one block and one fast matrix; log gates, step size, mask and resets are rows [1, tokens].

    Tiles of TILE tokens are computed apart and joined: what a tile passes on is two rows, so all other products are of
    rank two.
    """
    inputs = (log_retention, log_momentum, step_size, mask, resets)
    tokens = step_size.shape[1]
    if target_platform() == "tpu" or tokens == TILE or tokens % TILE > 0:  # a TPU's lanes are not filled by a tile
        return tile(*summed(*inputs), mask, step_size.dtype)
    tiles = jax.tree.map(lambda x: x.reshape(-1, 1, TILE), inputs)
    return join(jax.vmap(lambda *rows: tile(*summed(*rows), rows[3], step_size.dtype))(*tiles))


def summed(log_retention, log_momentum, step_size, mask, resets) -> tuple[Cumulative, Cumulative | None, jax.Array]:
    """(retention, momentum, step size), from rows [1, tokens], for `tile`. At padding the retention is 1, the step 0
    and the momentum 1 (papers 1.6.6)."""

    def none_at_padding(x):
        return x if mask is None or x is None else jnp.where(mask, x, 0)

    retention, momentum = (
        None if x is None else cumulative(none_at_padding(x), resets) for x in (log_retention, log_momentum)
    )
    return retention, momentum, none_at_padding(step_size)


def cumulative(log_gate: jax.Array, resets: jax.Array | None) -> Cumulative:
    """Sums of a gate [1, tokens]."""
    cut = log_gate < LOG_CUT
    until = jnp.tril(jnp.ones(2 * log_gate.shape[1:], log_gate.dtype))
    total = inner_products(jnp.where(cut, 0, log_gate), until, log_gate.dtype)
    tokens = jnp.arange(log_gate.shape[1], dtype=jnp.int32)[None, :]
    ends = cut if resets is None else cut | resets
    next_end = jax.lax.cummin(jnp.where(ends, tokens, tokens.size), 1, reverse=True)
    next_end = jnp.concatenate([next_end[:, 1:], jnp.full_like(tokens[:, :1], tokens.size)], axis=1)
    first = jnp.where(ends[:, :1], 0, jnp.exp(log_gate[:, :1]))
    began = None if resets is None else jnp.where(resets, jnp.exp(log_gate), 0)
    # The column is the same numbers: summed anew, their differences would not be small where they are.
    return Cumulative(total, total.T, (next_end - tokens).astype(log_gate.dtype), first, began)


def tile(retention: Cumulative, momentum: Cumulative | None, step_size, mask, operand_dtype) -> Coefficients:
    """Coefficients of a few tokens, by masked differences of cumulative logs; S is not added at padding (1.6.6)."""
    kept = products(retention)
    beta = kept[:, :1] * retention.first
    restart = None if retention.began is None else (began(kept, retention), None, None)
    if momentum is None:
        return Coefficients(beta, None, None, kept * -step_size, None, restart)
    carried = products(momentum)
    pushed = passed_on(kept if mask is None else jnp.where(mask, kept, 0), carried, operand_dtype)
    f, p = (x[:, :1] * momentum.first for x in (pushed, carried))
    restart = restart and (restart[0], began(pushed, momentum), began(carried, momentum))
    return Coefficients(beta, f, p, pushed * -step_size, carried[-1:] * -step_size, restart)


def began(weighed: jax.Array, gate: Cumulative) -> jax.Array:
    """What is left at each token of its document's start, by what is left of each token there."""
    return inner_products(weighed, gate.began, weighed.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def passed_on(kept, carried, operand_dtype):
    """kept @ carried, how momentum that one token leaves weighs in another's weights; its gradient is that of gates."""
    return matmul_three_pass(kept, carried, operand_dtype)


def passed_on_forward(kept, carried, operand_dtype):
    return passed_on(kept, carried, operand_dtype), (kept, carried)


def passed_on_backward(operand_dtype, operands, cotangent):
    kept, carried = operands
    return inner_products(cotangent, carried, operand_dtype), outer_products(kept, cotangent, operand_dtype)


passed_on.defvjp(passed_on_forward, passed_on_backward)


def products(gate: Cumulative) -> jax.Array:
    """The product of gates i+1 .. t at [t, i]: 0 for i > t, 1 for i = t."""
    t, i = (jax.lax.broadcasted_iota(jnp.int32, 2 * gate.total.shape[1:], axis) for axis in (0, 1))
    behind = jnp.where(t >= i, t - i, t.size).astype(gate.total.dtype)
    return jnp.exp(jnp.where(behind < gate.reach, gate.column - gate.total, -jnp.inf))


def join(tiles: Coefficients) -> Coefficients:
    """Tiles, leaves [tiles, ...], as one block: each begins with what the last rows before it pass on."""
    count, size, _ = tiles.beta.shape
    G_row = N_row = jnp.zeros((1, count * size), tiles.G.dtype)
    scales, restart, parts = (1.0, 0.0, 1.0), (0.0, 0.0, 0.0), []
    for i in range(count):
        c = jax.tree.map(lambda x: x[i], tiles)  # noqa: B023
        place = functools.partial(jnp.pad, pad_width=((0, 0), (i * size, (count - 1 - i) * size)))
        G = place(c.G) + c.beta * G_row
        if c.N is not None:
            G += c.f * N_row
            N_row = place(c.N) + c.p[-1:] * N_row
        G_row, now = G[-1:], pass_on(c, scales)
        scales = last(now)
        began = None
        if c.restart is not None:
            began = add(c.restart, pass_on(c, restart))
            restart = last(began)
        parts.append((now, G, began))
    (beta, f, p), G, restart = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    return Coefficients(beta, f, p, G, None if tiles.N is None else N_row, restart)


def pass_on(c: Coefficients, scales):
    """beta, f, p of tokens of the tile c, of a state that has `scales` before it."""
    beta, f, p = scales
    if c.f is None:
        return c.beta * beta, None, None
    return c.beta * beta, c.beta * f + c.f * p, c.p * p


def last(scales):
    return tuple(None if x is None else x[-1:] for x in scales)


def add(ours, theirs):
    return tuple(None if x is None else x + y for x, y in zip(ours, theirs, strict=True))


def of_chunks(gates: Gates, resets: jax.Array | None) -> Coefficients:
    """Coefficients of many blocks and matrices: gates [blocks, tokens, matrices] -> leaves [blocks, matrices, ...]."""
    scalars = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2)[:, :, None], gates.scalars())
    mask, resets = jax.tree.map(lambda x: x[:, None], (gates.mask, resets))
    per_matrix = jax.vmap(coefficients, in_axes=(0, 0, 0, None, None))
    return jax.vmap(per_matrix)(*scalars, mask, resets)
