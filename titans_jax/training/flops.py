"""The devices' peak, which a training step's floating point operations are compared with."""

import jax

from titans_jax.ops.chips import peak_flops


def peak_flops_per_second() -> float | None:
    """Peak of all devices together in bfloat16, or None where it is not known."""
    peak = peak_flops(jax.devices()[0].device_kind)
    return peak * jax.device_count() if peak else None
