"""Gradients against differences of values, along one random direction of everything."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def assert_slope_is_the_difference(program: Callable[[Any], tuple], point: Any, generator: np.random.Generator) -> None:
    """program: point -> (value, gradient), as jax.value_and_grad makes it; in float64."""
    gradient = program(point)[1]
    direction = jax.tree.map(lambda leaf: jnp.asarray(generator.normal(size=leaf.shape)), point)
    slope = sum(jnp.vdot(g, d) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
    ahead, behind = (
        program(jax.tree.map(lambda a, d, sign=sign: a + sign * 1e-6 * d, point, direction))[0] for sign in (1, -1)
    )
    np.testing.assert_allclose((ahead - behind) / 2e-6, slope, rtol=1e-6)
