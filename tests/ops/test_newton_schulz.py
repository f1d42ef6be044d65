"""Newton-Schulz against singular value decompositions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax.ops.newton_schulz import COEFFICIENTS, newton_schulz

RANGES = {"muon": (0.68, 1.14), "lact": (0.97, 1.04)}


def matrices(shape, smallest=0.02):
    """Three random matrices whose singular values lie between `smallest` of their norm and most of it."""
    draw = np.random.default_rng(0)
    found = []
    for _ in range(3):
        left, _, right = np.linalg.svd(draw.normal(size=shape), full_matrices=False)
        values = np.geomspace(smallest, 0.9, min(shape))
        found.append(left @ np.diag(values) @ right * draw.uniform(0.01, 100))
    return np.stack(found)


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_keeps_singular_vectors_and_evens_singular_values(shape, coefficients):
    """Batched; what is left of each matrix in its own singular vectors is a diagonal within the published range."""
    given = matrices(shape)
    with jax.enable_x64(True):
        found = np.asarray(jax.jit(newton_schulz, static_argnums=(1, 2))(jnp.asarray(given), jnp.float64, coefficients))
    low, high = RANGES[coefficients]
    for before, after in zip(given, found, strict=True):
        left, values, right = np.linalg.svd(before, full_matrices=False)
        inside = left.T @ after @ right.T
        np.testing.assert_allclose(inside, np.diag(np.diag(inside)), atol=1e-10)
        assert np.all((np.diag(inside) > low) & (np.diag(inside) < high))
        expected = values / np.linalg.norm(values)
        for a, b, c in COEFFICIENTS[coefficients]:
            expected = a * expected + b * expected**3 + c * expected**5
        np.testing.assert_allclose(np.diag(inside), expected, atol=1e-10)


def test_five_steps_of_the_published_numbers():
    assert {name: len(steps) for name, steps in COEFFICIENTS.items()} == {"muon": 5, "lact": 5}
    assert set(COEFFICIENTS["muon"]) == {(3.4445, -4.7750, 2.0315)}
    assert COEFFICIENTS["lact"][0] == (4.0848, -6.8946, 2.9270)


def test_zeros_stay_and_have_a_finite_gradient():
    zeros = jnp.zeros((4, 6), jnp.float32)
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(newton_schulz(x, jnp.float32)))(zeros)
    assert value == 0 and np.all(np.isfinite(gradient))


def test_products_have_the_precision_of_their_operands():
    given = matrices((6, 10))[0]
    exact = np.asarray(newton_schulz(jnp.asarray(given, jnp.float32), jnp.float32))
    rough = newton_schulz(jnp.asarray(given, jnp.float32), jnp.bfloat16)
    assert rough.dtype == jnp.float32
    error = np.linalg.norm(rough - exact) / np.linalg.norm(exact)
    assert 1e-3 < error < 5e-2
