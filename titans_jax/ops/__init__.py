"""Numerics that know no memory: matrix products, triangular systems, channel-wise decay, blocks of a TPU kernel."""
