"""Roots by bisection, in a fixed number of steps: one program whatever the function's values are."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def bisect(function: Callable, low: jax.Array, high: jax.Array, steps: int = 60) -> jax.Array:
    """The root of a decreasing function between low and high."""

    def halve(_: int, bracket: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        above = function(middle) > 0
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    low, high = jax.lax.fori_loop(0, steps, halve, (low, high))
    return 0.5 * (low + high)
