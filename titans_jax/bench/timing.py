"""Timing functions of the benchmarks."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp


def matmul_peak(dtype: str = "float32", size: int = 2048) -> float:
    """Operations per second of the fastest of several square matrix products."""
    matrix = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / min(seconds(lambda: product(matrix, matrix)) for _ in range(6))


def median_seconds(run: Callable[[], jax.Array], repeats: int) -> float:
    """Median seconds of a call, after one that is not counted."""
    seconds(run)
    return statistics.median(seconds(run) for _ in range(repeats))


def seconds(run: Callable[[], jax.Array]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start
