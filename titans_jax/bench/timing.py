"""Timing functions of the benchmarks."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from titans_jax.config import ConfigError


def matmul_peak(dtype: str = "float32", size: int = 2048) -> float:
    """Operations per second of the fastest of several square matrix products, times the number of accelerators; the
    devices of a CPU share its cores, all of which one product uses."""
    matrix = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    machines = 1 if jax.default_backend() == "cpu" else jax.device_count()
    return machines * 2 * size**3 / min(seconds(lambda: product(matrix, matrix)) for _ in range(6))


def check_rows(field: str, rows: int) -> None:
    """Refuse a number of rows that the devices cannot share evenly.

    Raises:
      ConfigError: names the field.
    """
    if rows % (devices := jax.device_count()):
        raise ConfigError(f"{field} is {rows}; use a multiple of {devices}, the devices that share the rows")


def median_seconds(run: Callable[[], jax.Array], repeats: int) -> float:
    """Median seconds of a call, after one that is not counted."""
    seconds(run)
    return statistics.median(seconds(run) for _ in range(repeats))


def seconds(run: Callable[[], jax.Array]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start
