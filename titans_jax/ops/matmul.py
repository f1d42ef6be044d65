"""Matrix products in the right precision: operands in their own dtype, sums in float32 (float64 for float64)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from titans_jax.ops.platform import target_platform

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def matmul(
    x: Float[Array, "*rows n"], y: Float[Array, "*_ n columns"] | Transposed, operand_dtype
) -> Float[Array, "*rows columns"]:
    """x @ y with operands in operand_dtype, accumulated and returned in float32 (float64 for float64)."""
    if isinstance(y, Transposed):
        return inner_products(x, y.array, operand_dtype)
    x, y = x.astype(operand_dtype), y.astype(operand_dtype)
    return jnp.matmul(x, y, precision=precision(operand_dtype), preferred_element_type=wide_dtype(operand_dtype))


def matmul_three_pass(x: jax.Array, y: jax.Array, operand_dtype) -> jax.Array:
    """`matmul`, with twice the digits for bfloat16 operands: for products whose errors all later ones would inherit."""
    if operand_dtype != jnp.bfloat16:
        return matmul(x, y, operand_dtype)
    (x, x_rest), (y, y_rest) = split_bfloat16(x), split_bfloat16(y)
    return sum(matmul(*part, operand_dtype) for part in ((x, y), (x, y_rest), (x_rest, y)))


def split_bfloat16(x):
    """x as the sum of two numbers of bfloat16."""
    most = x.astype(jnp.bfloat16)
    return most, (x - most.astype(x.dtype)).astype(jnp.bfloat16)


def inner_products(x: Float[Array, "t n"], y: Float[Array, "i n"], operand_dtype) -> Float[Array, "t i"]:
    """x @ y.T, every row of x [t, n] with every row of y [i, n], as `matmul`."""
    return contract(x, y, 1, operand_dtype)


def outer_products(
    x: Float[Array, "t inputs"], y: Float[Array, "t outputs"], operand_dtype
) -> Float[Array, "inputs outputs"]:
    """x.T @ y, the sum over tokens of x_t^T y_t: [t, in] and [t, out] -> [in, out], as `matmul`."""
    return contract(x, y, 0, operand_dtype)


def weighted_outer_products(rows, inner, deltas, operand_dtype, transposed=False):
    """Sums over tokens i of row_i inner_i^T deltas_i, [in, out], one per row [1, tokens], by one product.

    The rows scale the narrower of inner and deltas. Its scaled copies, stacked, are one transposed operand, so that the
    wider side is read only once. transposed: return `Transposed` matrices where deltas are the narrower side.
    """
    if inner.shape[1] > deltas.shape[1]:
        totals = weighted_outer_products(rows, deltas, inner, operand_dtype)
        return [Transposed(total) if transposed else total.T for total in totals]
    stacked = concatenate_operands([row * inner.T for row in rows], operand_dtype)
    return jnp.split(matmul(stacked, deltas, operand_dtype), len(rows))


def weighted_outer_products_of_columns(rows, inner, deltas, operand_dtype, transposed=False):
    """`weighted_outer_products` for CPUs, with the scaled copies side by side, not transposed and stacked: the left
    operand of the product that is the gradient of `deltas` then has the layout that XLA's fast products need."""
    if inner.shape[1] > deltas.shape[1]:
        totals = weighted_outer_products_of_columns(rows, deltas, inner, operand_dtype)
        return [Transposed(total) if transposed else total.T for total in totals]
    columns = concatenate_operands([row.T * inner for row in rows], operand_dtype, axis=1)
    return jnp.split(outer_products(columns, deltas, operand_dtype), len(rows))


def concatenate_operands(operands, operand_dtype, axis: int = 0) -> jax.Array:
    """Operands of a product, concatenated. Each is cast before that, so that the cast is shared with other products."""
    return jnp.concatenate([x.astype(operand_dtype) for x in operands], axis=axis)


def contract(x: jax.Array, y: jax.Array, axis: int, operand_dtype) -> jax.Array:
    """The sum of products over `axis` of both operands, as one operation: a separate transpose is slow in a kernel."""
    x, y = (transposed_operand(a.astype(operand_dtype)) for a in (x, y))
    dimensions = (((axis,), (axis,)), ((), ()))
    return jax.lax.dot_general(x, y, dimensions, precision(operand_dtype), wide_dtype(operand_dtype))


def transposed_operand(x: jax.Array) -> jax.Array:
    """An operand of a product that may be computed as transposed: on a CPU bfloat16 as float32, the same numbers, since
    XLA there (jaxlib 0.10.2 and 0.11.2) cannot multiply one transposed bfloat16 matrix by several."""
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 and target_platform() == "cpu" else x


def broadcast_column(column, width: int):
    """A column [n, 1] as [n, width]; numbers, and arrays of that width already, are returned as they are."""
    if jnp.ndim(column) == 0 or column.shape[1] == width:
        return column
    return jnp.broadcast_to(column, (len(column), width))


def broadcast_column_by_product(column, width: int):
    """`broadcast_column` by a matrix product, whose gradient is one too, not a sum of elementwise products, at which
    XLA on a CPU is ten times slower."""
    if jnp.ndim(column) == 0 or column.shape[1] == width:
        return column
    return matmul(column, jnp.ones((1, width), column.dtype), column.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transposed:
    """A fast matrix [in, out] kept as `array` [out, in]: where out is narrow, lanes are full only that way."""

    array: jax.Array

    @property
    def shape(self):
        return self.array.shape[::-1]

    @property
    def dtype(self):
        return self.array.dtype

    def astype(self, dtype):
        return Transposed(self.array.astype(dtype))

    def __mul__(self, scale):
        return Transposed(self.array * scale)

    def __add__(self, other):
        return Transposed(self.array + other.array)

    __rmul__ = __mul__


def precision(operand_dtype) -> jax.lax.Precision:
    """One pass for bfloat16 operands, all digits for wider ones."""
    return jax.lax.Precision.DEFAULT if operand_dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST


def wide_dtype(dtype) -> jnp.dtype:
    """The dtype of memory states, and of sums over arrays of `dtype`: float64 for float64, float32 for all others."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def to_state_dtype(x: jax.Array) -> jax.Array:
    """x in the dtype of memory states, `wide_dtype` of its own."""
    return x.astype(wide_dtype(x.dtype))
