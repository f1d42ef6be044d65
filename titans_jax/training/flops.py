"""The peak performance of the devices, with which the floating point operations of a training step are compared."""

import jax

from titans_jax.ops.chips import peak_flops


def peak_flops_per_second() -> float | None:
    """Peak of all devices together in bfloat16, or None where it is not known."""
    peak = peak_flops(jax.devices()[0].device_kind)
    return peak * jax.device_count() if peak else None
