"""The devices' peak, which a training step's floating point operations are compared with."""

import jax

from titans_jax.models import forward_flops_per_token, training_flops_per_token
from titans_jax.models.flops import memory_flops
from titans_jax.ops.chips import peak_flops

__all__ = ["forward_flops_per_token", "memory_flops", "peak_flops_per_second", "training_flops_per_token"]


def peak_flops_per_second() -> float | None:
    """Peak of all devices together in bfloat16, or None where it is not known."""
    peak = peak_flops(jax.devices()[0].device_kind)
    return peak * jax.device_count() if peak else None
