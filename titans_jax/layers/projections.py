"""Linear projections, and the two dtypes of a model."""

import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jax.typing import DTypeLike

from titans_jax.config import ModelConfig
from titans_jax.ops.matmul import wide_dtype
from titans_jax.sharding import logical

INIT_STDDEV = 0.02


def compute_dtype(config: ModelConfig) -> DTypeLike:
    """The dtype of activations and matmul operands: `config.dtype`."""
    return jnp.dtype(config.dtype)


def param_dtype(config: ModelConfig) -> DTypeLike:
    """The dtype of parameters, memory state, norms, softmax and logits: float32, or float64 when activations are."""
    return wide_dtype(compute_dtype(config))


def projection(
    config: ModelConfig,
    in_features: int,
    out_features: int,
    axes: tuple[str | None, str | None],
    *,
    writes_residual: bool = False,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """[..., in_features] -> [..., out_features], no bias, weights from a normal cut at two deviations.

    Args:
      axes: logical sharding axes of the [in, out] kernel.
      writes_residual: the output is added to the residual stream; its deviation 0.02 is divided by sqrt(2 depth), so
        that the stream's variance does not grow with the depth (GPT-2).
    """
    stddev = INIT_STDDEV / (2 * config.depth) ** 0.5 if writes_residual else INIT_STDDEV
    return nnx.Linear(
        in_features,
        out_features,
        use_bias=False,
        dtype=compute_dtype(config),
        param_dtype=param_dtype(config),
        kernel_init=logical(initializers.truncated_normal(stddev), *axes),
        rngs=rngs,
    )
