"""Roots by bisection, in a fixed number of steps: one program whatever the function's values are."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

STEPS = 60
"""Halvings, after which a bracket of width 100 is 1e-16 wide, the resolution of float64."""


def bisect(function: Callable, low: jax.Array, high: jax.Array) -> jax.Array:
    """The root of a decreasing function between low and high, for every entry of these arrays."""

    def halve(_: int, bracket: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        above = function(middle) > 0
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    low, high = jax.lax.fori_loop(0, STEPS, halve, (low, high))
    return 0.5 * (low + high)
