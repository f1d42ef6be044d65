"""Titans and Miras in JAX: sequence models whose memory keeps learning while they read."""
