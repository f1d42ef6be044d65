"""What every test runs under: the CPU, strict dtype and rank promotion."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402

# A test that mixes dtypes or ranks by accident fails: so would a TPU program that silently widens to float32.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
