"""Random orthogonal matrices: orthonormal, and spread evenly over all directions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax.ops.orthogonal import random_orthogonal

DRAWS = 4000


def draw(shape):
    return np.asarray(
        jax.jit(jax.vmap(lambda key: random_orthogonal(key, shape)))(jax.random.split(jax.random.key(0), DRAWS))
    )


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (3, 8), (8, 3), (16, 64)])
def test_the_fewer_of_rows_and_columns_are_orthonormal(shape):
    for x64 in (False, True):
        with jax.enable_x64(x64):
            matrix = random_orthogonal(jax.random.key(1), shape)
        assert matrix.shape == shape and matrix.dtype == jnp.float32
        wide = np.asarray(matrix, np.float64) if shape[0] <= shape[1] else np.asarray(matrix, np.float64).T
        np.testing.assert_allclose(wide @ wide.T, np.eye(len(wide)), atol=3e-6)


@pytest.mark.parametrize("shape", [(3, 3), (2, 4), (4, 2)])
def test_entries_are_spread_as_those_of_random_directions(shape):
    """Every entry has mean 0 and the mean square and fourth power of a coordinate of a random unit vector of the longer
    side, 1/n and 3/(n (n+2)); different entries are not correlated."""
    entries, n = draw(shape).reshape(DRAWS, -1).astype(np.float64), max(shape)
    error = 4.5 * DRAWS**-0.5
    assert np.abs(entries.mean(0)).max() < error * n**-0.5
    np.testing.assert_allclose((entries**2).mean(0), 1 / n, atol=error * (3 / (n * (n + 2)) - 1 / n**2) ** 0.5)
    np.testing.assert_allclose((entries**4).mean(0), 3 / (n * (n + 2)), atol=error * entries.var() * 0.5)
    products = entries.T @ entries / DRAWS - np.diag((entries**2).mean(0))
    assert np.abs(products).max() < error * n**-1.0


def test_determinants_have_both_signs_equally_often():
    """Of square matrices: reflections and rotations, as among all orthogonal matrices."""
    assert abs(np.mean(np.linalg.det(draw((3, 3))) > 0) - 0.5) < 4.5 * 0.5 * DRAWS**-0.5


def test_another_key_gives_another_matrix_and_the_same_key_the_same():
    one, same, other = (np.asarray(random_orthogonal(jax.random.key(seed), (4, 6))) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 0.1
