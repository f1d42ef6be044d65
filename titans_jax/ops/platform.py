"""The platform that a program will run on, and the sizes of a TPU's registers."""

from __future__ import annotations

import jax

SUBLANES, LANES = 8, 128
"""Rows and columns of a TPU's register, and of a tile of its memory: smaller arrays take a whole one."""

KERNELS = "kernels"
"""Name of the residuals that kernels keep for their gradients, for rematerialisation policies."""


def target_platform() -> str:
    """The platform that the program being traced will run on, "cpu", "gpu" or "tpu": that of the mesh's devices if a
    mesh is set (they need not exist here: `titans compile` describes them), else jax's default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
