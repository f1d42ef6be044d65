"""Sums over the channels of heads, and back: every implementation against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax.layers import head_channels


def drawn(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("implementation", head_channels.SUMS, ids=lambda implementation: implementation.name)
def test_sums_over_heads(implementation):
    x = drawn(3, 2, 5, 12)
    expected = np.asarray(x, np.float64).reshape(2, 5, 3, 4).sum(axis=-1)
    np.testing.assert_allclose(implementation.run(x, 3), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", head_channels.SPREADS, ids=lambda implementation: implementation.name)
def test_numbers_of_heads_spread_over_their_channels(implementation):
    x, kernel = drawn(3, 2, 5, 4, 3), drawn(4, 4, 3, 6)
    wide, channels = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    expected = [sum(wide[..., n, h, None] * channels[n, h] for n in range(4)) for h in range(3)]
    np.testing.assert_allclose(implementation.run(x, kernel), np.concatenate(expected, axis=-1), rtol=1e-5, atol=1e-6)
