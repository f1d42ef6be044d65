"""Products in the right precision, transposed operands, and sums of weighted outer products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax.ops import matmul as ops
from titans_jax.ops.matmul import Transposed


def draw(*shapes, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.normal(size=shape).astype(np.float32) for shape in shapes]


def error(found, exact):
    return np.max(np.abs(np.asarray(found, np.float64) - exact)) / np.max(np.abs(exact))


def double(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


@pytest.mark.parametrize("dtype, sums", [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")])
def test_sums_are_in_the_states_dtype(dtype, sums):
    with jax.enable_x64(dtype == "float64"):
        x, y = (jnp.asarray(leaf, dtype) for leaf in draw((3, 4), (4, 5)))
        assert ops.wide_dtype(x.dtype) == ops.to_state_dtype(x).dtype == jnp.dtype(sums)
        products = ops.matmul(x, y, x.dtype), ops.inner_products(x, y.T, x.dtype), ops.outer_products(x.T, y, x.dtype)
        assert {leaf.dtype for leaf in products} == {jnp.dtype(sums)}


def test_operands_are_cast_and_sums_are_not():
    """In bfloat16 the product is that of the rounded operands, to all digits of float32; so is every variant."""
    x, y = draw((6, 32), (32, 5))
    rounded = double(*(jnp.asarray(leaf, jnp.bfloat16) for leaf in (x, y)))
    exact = rounded[0] @ rounded[1]
    for found in (
        ops.matmul(x, jnp.asarray(y), jnp.bfloat16),
        ops.matmul(x, Transposed(jnp.asarray(y.T)), jnp.bfloat16),
        ops.inner_products(x, y.T, jnp.bfloat16),
        ops.outer_products(x.T, y, jnp.bfloat16),
    ):
        assert error(found, exact) < 1e-6
        assert error(found, np.float64(x) @ y) > 1e-4


def test_one_matrix_by_several_in_half_precision():
    """Small whole numbers, which bfloat16 holds exactly, as the sums of products of tokens with several sets of values.
    XLA for CPUs cannot do that with operands of bfloat16."""
    rng = np.random.default_rng(3)
    keys, values = (rng.integers(-8, 8, shape) for shape in ((5, 3), (4, 5, 7)))
    product = jax.vmap(lambda x, y: ops.outer_products(x, y, jnp.bfloat16), in_axes=(None, 0))
    found = jax.jit(product)(jnp.asarray(keys, jnp.bfloat16), jnp.asarray(values, jnp.bfloat16))
    np.testing.assert_array_equal(found, np.einsum("ti,nto->nio", keys, values))


def test_precision():
    """All digits of float32 also where a machine's own choice is fewer."""
    assert ops.precision(jnp.float32) == ops.precision(jnp.float64) == jax.lax.Precision.HIGHEST
    assert ops.precision(jnp.bfloat16) == jax.lax.Precision.DEFAULT


def test_three_passes_keep_twice_the_digits():
    """bfloat16 has 8 bits: one pass errs by about 2^-9 of an operand, three by that squared."""
    x, y = draw((16, 64), (64, 16))
    exact = np.float64(x) @ y
    one, three = (error(product(x, y, jnp.bfloat16), exact) for product in (ops.matmul, ops.matmul_three_pass))
    assert 1e-4 < one < 2**-7 and three < 2**-14
    assert error(ops.matmul_three_pass(x, y, jnp.float32), exact) < 1e-6


def test_two_numbers_of_bfloat16():
    (x,) = draw((200,))
    most, rest = ops.split_bfloat16(jnp.asarray(x))
    assert most.dtype == rest.dtype == jnp.bfloat16
    assert np.all(np.abs(np.float64(most) + np.float64(rest) - x) <= 2.0**-16 * np.abs(x))


def test_transposed():
    """A matrix [in, out] kept the other way round: sums, multiples and products are its own."""
    x, y = draw((3, 4), (4, 5))
    kept = Transposed(jnp.asarray(y.T))
    assert kept.shape == (4, 5)
    for found, wanted in ((kept * 2.0, 2 * y), (2.0 * kept, 2 * y), (kept + kept, 2 * y)):
        assert isinstance(found, Transposed)
        np.testing.assert_array_equal(found.array.T, wanted)
    np.testing.assert_allclose(ops.matmul(x, kept, jnp.float32), x @ y, rtol=1e-5, atol=1e-6)
    assert jax.tree.map(lambda leaf: leaf.shape, kept).array == (5, 4)


@pytest.mark.parametrize("sums", [1, 2])
@pytest.mark.parametrize("inputs, outputs", [(3, 5), (5, 3), (4, 4)])
@pytest.mark.parametrize("way", [ops.weighted_outer_products, ops.weighted_outer_products_of_columns])
def test_weighted_outer_products(way, inputs, outputs, sums):
    """One sum over tokens per row of weights, also as `Transposed` where the outputs are the narrower side."""
    inner, deltas, *rows = draw((7, inputs), (7, outputs), *[(1, 7)] * sums)
    wanted = [sum(row[0, i] * np.outer(inner[i], deltas[i]) for i in range(7)) for row in rows]
    for transposed in (False, True):
        found = way(
            [jnp.asarray(row) for row in rows], jnp.asarray(inner), jnp.asarray(deltas), jnp.float32, transposed
        )
        assert len(found) == sums
        for got, total in zip(found, wanted, strict=True):
            assert isinstance(got, Transposed) == (transposed and outputs < inputs)
            assert got.shape == (inputs, outputs)
            got = got.array.T if isinstance(got, Transposed) else got
            np.testing.assert_allclose(got, total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_concatenated_operands_are_cast(axis):
    x, y = draw((2, 3), (2, 3))
    found = ops.concatenate_operands([jnp.asarray(x), jnp.asarray(y, jnp.bfloat16)], jnp.bfloat16, axis)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, jnp.concatenate([x, y], axis).astype(jnp.bfloat16))


@pytest.mark.parametrize("way", [ops.broadcast_column, ops.broadcast_column_by_product])
def test_broadcast_column(way):
    """Columns are widened; numbers and what is wide already stay; the gradient is the sum over the width."""
    (column,) = draw((4, 1))
    np.testing.assert_array_equal(way(jnp.asarray(column), 3), np.repeat(column, 3, axis=1))
    assert way(2.0, 3) == 2.0 and way(jnp.asarray(column), 1).shape == (4, 1)
    (cotangent,) = draw((4, 3), seed=1)
    found = jax.grad(lambda x: jnp.sum(way(x, 3) * cotangent))(jnp.asarray(column))
    np.testing.assert_allclose(found, cotangent.sum(axis=1, keepdims=True), rtol=1e-6)
