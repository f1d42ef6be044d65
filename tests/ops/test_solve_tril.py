"""Unit lower-triangular systems against numpy's inverse, in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax.ops import solve_tril


def system(size, dtype=np.float32):
    """Strictly lower, as decayed products of keys are: none near 0, none that grows."""
    lower = np.tril(np.random.default_rng(size).uniform(-0.5, 0.5, (size, size)), -1)
    return lower, jnp.asarray(lower, dtype)


def inverted(lower):
    return np.linalg.inv(np.eye(len(lower)) + lower)


@pytest.mark.parametrize("way", [lambda lower: solve_tril.by_rows(lower, jnp.float32), solve_tril.by_halvings])
@pytest.mark.parametrize("size", [1, 4, 8, 64])
def test_ways(way, size):
    """To float32's rounding: what bfloat16 products, or powers of `lower`, would not reach."""
    exact, lower = system(size)
    exact = inverted(exact)
    assert np.max(np.abs(np.asarray(jax.jit(way)(lower)) - exact)) <= 1e-6 * np.max(np.abs(exact))


def test_operands_in_bfloat16():
    """Twice their digits, and no more."""
    exact, lower = system(64)
    exact = inverted(exact)
    found = jax.jit(lambda lower: solve_tril.by_rows(lower, jnp.bfloat16))(lower)
    error = np.max(np.abs(np.asarray(found) - exact)) / np.max(np.abs(exact))
    assert 1e-7 < error <= 5e-5


def test_any_size():
    exact, lower = system(21)
    found, wanted = jax.jit(lambda lower: solve_tril.inverse(lower, lower.dtype))(lower), inverted(exact)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.max(wanted))


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients(transposed):
    """First and second, against those of a general solver."""
    generator = np.random.default_rng(0)
    with jax.enable_x64(True):
        _, lower = system(6, np.float64)
        right, direction = (jnp.asarray(generator.normal(size=(6, 3))) for _ in range(2))
        turn = jnp.asarray(np.tril(generator.normal(size=(6, 6)), -1))

        def ours(lower, right):
            return solve_tril.solve(transposed, lower, solve_tril.inverse(lower, lower.dtype), right)

        def general(lower, right):
            matrix = jnp.eye(6) + lower
            return jnp.linalg.solve(matrix.T if transposed else matrix, right)

        def second(solve):
            """Gradients of a gradient's component, of whose first argument only what is below the diagonal counts."""

            def first(lower, right):
                of = jax.grad(lambda *x: jnp.sum(jnp.sin(solve(*x))), (0, 1))(jnp.tril(lower, -1), right)
                return jnp.sum(of[0] * turn) + jnp.sum(of[1] * direction)

            return jax.jit(lambda *x: (first(*x), *jax.grad(first, (0, 1))(*x)))(lower, right)

        for got, wanted in zip(second(ours), second(general), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-10)
