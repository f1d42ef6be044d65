"""Scalar gates packed in the rows that a kernel reads, and the coefficients made from them in the kernel.

Cumulative logs are made outside, where all blocks are one product; their differences and products inside.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.decay import (
    Coefficients,
    CumulativeGate,
    cumulative_gates,
    product_of_coefficients,
    tile_coefficients,
)
from titans_jax.memory.forms.omega_window import of_sums, window_matrix
from titans_jax.memory.gates import Gates


class RowLayout(NamedTuple):
    """What the rows hold. matrices: how many matrices have gates. has_momentum: whether these include momentum.
    restarts: whether documents may start inside a block. flags: how many further rows come last. step_totals: whether
    there are sums of step sizes."""

    matrices: int
    has_momentum: bool
    restarts: bool
    flags: int
    step_totals: bool = False


class UnpackedRows(NamedTuple):
    """The coefficients of one block for every matrix; mask: [1, tokens], False at padding, or None; flags: the further
    rows, [1, tokens] each; step_totals: sums of step sizes, a column of equal numbers [tokens, 1] for each matrix, or
    none."""

    coefficients: list[Coefficients]
    mask: jax.Array | None
    flags: list[jax.Array]
    step_totals: list[jax.Array]


def pack_rows(
    gates: Gates,
    flags: list[jax.Array],
    resets: jax.Array | None = None,
    step_totals: jax.Array | None = None,
) -> jax.Array:
    """Gates [blocks, tokens, matrices], their padding, and flags of blocks or of their tokens, as rows [blocks, n,
    tokens]. resets: [blocks, tokens], if documents may start inside a block. step_totals: [blocks, matrices], if any.
    """
    by_matrix = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2)[:, :, None], gates.scalars())
    mask, resets = jax.tree.map(lambda x: x[:, None], (gates.mask, resets))
    of_matrices = jax.vmap(cumulative_gates, in_axes=(0, 0, 0, None, None))
    *both, step_size = jax.vmap(of_matrices)(*by_matrix, mask, resets)
    sums = [x for gate in both if gate is not None for x in (gate.total, gate.reach, gate.first, gate.document_start)]
    rows = [x for x in sums if x is not None] + [step_size]
    rows += [] if step_totals is None else [step_totals[:, :, None, None]]
    rows = [jnp.broadcast_to(x, step_size.shape)[:, :, 0] for x in rows]
    flags = ([] if mask is None else [mask]) + [jnp.reshape(x, (len(x), 1, -1)) for x in flags]
    shape = len(step_size), 1, step_size.shape[-1]
    return jnp.concatenate(rows + [jnp.broadcast_to(x, shape).astype(step_size.dtype) for x in flags], axis=1)


def unpack_rows(rows: jax.Array, layout: RowLayout, operand_dtype) -> UnpackedRows:
    """The inverse of `pack_rows`, for the rows [n, tokens] of one block, inside a kernel."""
    matrices = layout.matrices
    sums = 4 if layout.restarts else 3
    kinds = sums * (1 + layout.has_momentum) + 1
    numbers = kinds + layout.step_totals
    columns = rows[: numbers * matrices].T
    flags = [jax.lax.stop_gradient(rows[i : i + 1]) for i in range(numbers * matrices, len(rows))]
    mask = flags.pop(0) > 0 if len(flags) > layout.flags else None
    row = lambda k: rows[k : k + 1]  # noqa: E731

    def gate(total, reach, first, document_start=None):
        document_start = None if document_start is None else row(document_start)
        return CumulativeGate(row(total), columns[:, total : total + 1], row(reach), row(first)[:, :1], document_start)

    found = []
    for i in range(matrices):
        at = range(i, kinds * matrices, matrices)
        momentum = gate(*at[sums : 2 * sums]) if layout.has_momentum else None
        found.append(tile_coefficients(gate(*at[:sums]), momentum, row(at[-1]), mask, operand_dtype))
    totals = [columns[:, i : i + 1] for i in range(kinds * matrices, numbers * matrices)]
    return UnpackedRows(found, mask, flags, totals)


def pack_window(rows: jax.Array, gates: Gates, written: int) -> jax.Array:
    """Rows of a chunk's own tokens, [blocks, n, c], with those of its window below, [blocks, n + m + c, written]: the
    step sizes of all tokens that it writes, and what each token's step sums of them.

    gates: of `add_window`. written: tokens that a chunk writes, those before it and places without a token first.
    """
    step_size = jnp.swapaxes(gates.step_size, 1, 2)
    sums = jax.vmap(window_matrix)(gates.window_weight)
    before = ((0, 0), (0, 0), (written - sums.shape[-1], 0))
    behind = ((0, 0), (0, 0), (0, written - rows.shape[-1]))
    return jnp.concatenate([jnp.pad(rows, behind), jnp.pad(step_size, before), jnp.pad(sums, before)], axis=1)


def unpack_window(rows: jax.Array, layout: RowLayout, tokens: int, operand_dtype) -> UnpackedRows:
    """The inverse of `pack_window`, for the rows [n + m + c, written] of one block of c `tokens`, inside a kernel."""
    own = len(rows) - layout.matrices - tokens
    found = unpack_rows(rows[:own, :tokens], layout, operand_dtype)
    step_size, sums = rows[own:-tokens], rows[-tokens:]

    def summed(c: Coefficients, i: int) -> Coefficients:
        times = sums * step_size[i : i + 1]
        return of_sums(c, lambda x: product_of_coefficients(x, times, operand_dtype))

    return found._replace(coefficients=[summed(c, i) for i, c in enumerate(found.coefficients)])
