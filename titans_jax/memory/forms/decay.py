"""Products of gates: how the start state and each token's gradient weigh in every later state.

With per-token retention a_t = 1 - alpha_t, momentum eta_t, step theta_t and padding mask (memory/README.md,
Coefficients):

    W_t = beta_t W_0 + f_t S_0 + sum_{j<=t} G_tj u_j ,      S_t = p_t S_0 + sum_{j<=t} N_tj u_j

G and N carry the minus sign of descent: it is free on a [tokens, tokens] matrix and is not on the weights.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from titans_jax.memory.gates import Gates
from titans_jax.ops.channel_decay import LOG_CUT
from titans_jax.ops.matmul import inner_products, matmul_three_pass, outer_products

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coefficients:
    """beta, f, p: columns [tokens, 1]; G: [tokens, tokens], lower triangular; N: the last row, [1, tokens]. f, p, N are
    None without momentum.

    restart: beta, f, p of the state that documents start with, for tokens after a reset inside the block; None without
    resets.
    """

    beta: Float[Array, "*blocks tokens 1"]
    f: Float[Array, "*blocks tokens 1"] | None
    p: Float[Array, "*blocks tokens 1"] | None
    G: Float[Array, "*blocks tokens tokens"]
    N: Float[Array, "*blocks 1 tokens"] | None
    restart: tuple[jax.Array, jax.Array | None, jax.Array | None] | None


class CumulativeGate(NamedTuple):
    """A gate's logs summed up to and including each token, as row [1, tokens] and column [tokens, 1].

    reach: from each token on, how many tokens, itself included, come before the next cut or reset, [1, tokens]. first:
    the gate of the first token, [1, 1], 0 at a cut or reset. document_start: the gate of each document's first token, 0
    elsewhere: the first factor of a document's start state.
    """

    total: jax.Array
    column: jax.Array
    reach: jax.Array
    first: jax.Array
    document_start: jax.Array | None


def coefficients(
    log_retention: Float[Array, "1 tokens"],
    log_momentum: Float[Array, "1 tokens"] | None,
    step_size: Float[Array, "1 tokens"],
    mask: Bool[Array, "1 tokens"] | None = None,
    resets: Bool[Array, "1 tokens"] | None = None,
    *,
    tile: int | None,
) -> Coefficients:
    """Coefficients of one block and one fast matrix; log gates, step size, mask and resets are rows [1, tokens].

    tile: tokens of a tile; tiles are computed apart and joined (None: all at once). A tile passes on two rows, so the
    products that join tiles are of rank two.
    """
    inputs = (log_retention, log_momentum, step_size, mask, resets)
    tokens = step_size.shape[1]
    if tile is None or tokens == tile or tokens % tile > 0:
        return tile_coefficients(*cumulative_gates(*inputs), mask, step_size.dtype)
    tiles = jax.tree.map(lambda x: x.reshape(-1, 1, tile), inputs)
    one = lambda *rows: tile_coefficients(*cumulative_gates(*rows), rows[3], step_size.dtype)  # noqa: E731
    return join_tiles(jax.vmap(one)(*tiles))


def block_coefficients(gates: Gates, resets: Bool[Array, "blocks tokens"] | None, tile: int | None) -> Coefficients:
    """Coefficients of many blocks and matrices: gates [blocks, tokens, matrices] -> leaves [blocks, matrices, ...]."""
    scalars = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2)[:, :, None], gates.scalars())
    mask, resets = jax.tree.map(lambda x: x[:, None], (gates.mask, resets))
    per_matrix = jax.vmap(functools.partial(coefficients, tile=tile), in_axes=(0, 0, 0, None, None))
    return jax.vmap(per_matrix)(*scalars, mask, resets)


def cumulative_gates(
    log_retention, log_momentum, step_size, mask, resets
) -> tuple[CumulativeGate, CumulativeGate | None, jax.Array]:
    """(retention, momentum, step size), from rows [1, tokens], for `tile_coefficients`. At padding the retention is 1,
    the step 0 and the momentum 1."""

    def none_at_padding(x):
        return x if mask is None or x is None else jnp.where(mask, x, 0)

    retention, momentum = (
        None if x is None else cumulative_gate(none_at_padding(x), resets) for x in (log_retention, log_momentum)
    )
    return retention, momentum, none_at_padding(step_size)


def cumulative_gate(log_gate: Float[Array, "1 tokens"], resets: Bool[Array, "1 tokens"] | None) -> CumulativeGate:
    """`CumulativeGate` from log gates [1, tokens]."""
    cut = log_gate < LOG_CUT
    until = jnp.tril(jnp.ones(2 * log_gate.shape[1:], log_gate.dtype))
    total = inner_products(jnp.where(cut, 0, log_gate), until, log_gate.dtype)
    tokens = jnp.arange(log_gate.shape[1], dtype=jnp.int32)[None, :]
    ends = cut if resets is None else cut | resets
    next_end = jax.lax.cummin(jnp.where(ends, tokens, tokens.size), 1, reverse=True)
    next_end = jnp.concatenate([next_end[:, 1:], jnp.full_like(tokens[:, :1], tokens.size)], axis=1)
    first = jnp.where(ends[:, :1], 0, jnp.exp(log_gate[:, :1]))
    document_start = None if resets is None else jnp.where(resets, jnp.exp(log_gate), 0)
    # The column is the row transposed: rounding of a second sum would spoil differences of nearly equal numbers.
    return CumulativeGate(total, total.T, (next_end - tokens).astype(log_gate.dtype), first, document_start)


def tile_coefficients(
    retention: CumulativeGate, momentum: CumulativeGate | None, step_size, mask, operand_dtype
) -> Coefficients:
    """Coefficients of a few tokens, by masked differences of cumulative logs; S is not added at padding."""
    kept = gate_products(retention)
    beta = kept[:, :1] * retention.first
    restart = None if retention.document_start is None else (since_document_start(kept, retention), None, None)
    if momentum is None:
        return Coefficients(beta, None, None, kept * -step_size, None, restart)
    carried = gate_products(momentum)
    pushed = product_of_coefficients(kept if mask is None else jnp.where(mask, kept, 0), carried, operand_dtype)
    f, p = (x[:, :1] * momentum.first for x in (pushed, carried))
    restart = restart and (
        restart[0], since_document_start(pushed, momentum), since_document_start(carried, momentum)
    )  # fmt: skip
    return Coefficients(beta, f, p, pushed * -step_size, carried[-1:] * -step_size, restart)


def gate_products(gate: CumulativeGate) -> Float[Array, "tokens tokens"]:
    """The product of gates i+1 .. t at [t, i]: 0 for i > t, 1 for i = t."""
    t, i = (jax.lax.broadcasted_iota(jnp.int32, 2 * gate.total.shape[1:], axis) for axis in (0, 1))
    behind = jnp.where(t >= i, t - i, t.size).astype(gate.total.dtype)
    return jnp.exp(jnp.where(behind < gate.reach, gate.column - gate.total, -jnp.inf))


def since_document_start(products: Float[Array, "tokens tokens"], gate: CumulativeGate) -> Float[Array, "tokens 1"]:
    """What is left at each token of its document's start state, from the products of gates between tokens."""
    return inner_products(products, gate.document_start, products.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product_of_coefficients(kept, carried, operand_dtype):
    """kept @ carried: how one token's momentum, or its sum over a window, weighs in another's weights. Plain products
    suffice for its gradient."""
    return matmul_three_pass(kept, carried, operand_dtype)


def product_of_coefficients_forward(kept, carried, operand_dtype):
    return product_of_coefficients(kept, carried, operand_dtype), (kept, carried)


def product_of_coefficients_backward(operand_dtype, operands, cotangent):
    kept, carried = operands
    return inner_products(cotangent, carried, operand_dtype), outer_products(kept, cotangent, operand_dtype)


product_of_coefficients.defvjp(product_of_coefficients_forward, product_of_coefficients_backward)


def join_tiles(tiles: Coefficients) -> Coefficients:
    """Tiles, leaves [tiles, ...], as one block: each continues from the last rows of those before it."""
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
        G_row, now = G[-1:], through_tile(c, scales)
        scales = last_rows(now)
        in_document = None
        if c.restart is not None:
            in_document = add(c.restart, through_tile(c, restart))
            restart = last_rows(in_document)
        parts.append((now, G, in_document))
    (beta, f, p), G, restart = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    return Coefficients(beta, f, p, G, None if tiles.N is None else N_row, restart)


def through_tile(c: Coefficients, scales):
    """beta, f, p at the tokens of the tile c, for a state that weighs `scales` before the tile."""
    beta, f, p = scales
    if c.f is None:
        return c.beta * beta, None, None
    return c.beta * beta, c.beta * f + c.f * p, c.p * p


def last_rows(scales):
    """The last token's row of each array that is there, [1, ...]."""
    return tuple(None if x is None else x[-1:] for x in scales)


def add(ours, theirs):
    """The sums of arrays in two tuples; None where there is none."""
    return tuple(None if x is None else x + y for x, y in zip(ours, theirs, strict=True))
