"""Titans and Miras in JAX: sequence models whose memory keeps learning while they read."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("titans-jax")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "unknown"
