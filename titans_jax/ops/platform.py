"""What a program will run on, and how a TPU holds numbers."""

from __future__ import annotations

import jax

SUBLANES, LANES = 8, 128
"""Rows and columns of a TPU's register, and of a tile of its memory: smaller arrays take a whole one."""

KERNELS = "kernels"
"""Name of what kernels leave for their gradients, for policies of rematerialisation."""


def target_platform() -> str:
    """What the program that is being traced will run on, "cpu", "gpu" or "tpu": the mesh's devices if one is set (they
    need not exist here: `titans compile` describes them), else jax's default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
