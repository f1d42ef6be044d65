"""Titans and Miras in JAX: sequence models whose memory keeps learning while they read."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from titans_jax.xla_flags import avoid_faulty_reductions, avoid_tuning_products

if TYPE_CHECKING:
    from pathlib import Path

    from titans_jax.training import Run

try:
    __version__ = version("titans-jax")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "unknown"

avoid_faulty_reductions()
avoid_tuning_products()


def load(folder: "str | Path") -> "Run":
    """A trained model with its tokenizer, from a run folder or one that `titans export` wrote: `load(..).generate(..)`.

    Raises:
      training.CheckpointError: the folder holds none, or none that can be read.
    """
    from titans_jax.training import load_run

    return load_run(folder)
