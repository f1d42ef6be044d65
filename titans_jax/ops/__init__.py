"""Numerics that the memory is built on: matrix products, triangular systems, channel-wise decay, TPU kernel blocks."""
