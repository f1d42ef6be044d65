"""Flags of XLA that must be set before it starts.

XLA reads its flags once, when a process first compiles, so these come with the import of the package. A choice that is
already in XLA_FLAGS stays.
"""

import os
from importlib.metadata import PackageNotFoundError, version

FUSIONS = "--xla_cpu_experimental_ynn_fusion_type"
FAULTY = ("0.10.2", "0.11.")
"""Beginnings of the jaxlib versions whose XLA may end a process in a segmentation fault on x86 processors."""
TRITON = "--xla_gpu_enable_triton_gemm"
TUNING = ("0.10.", "0.11.")
"""Beginnings of the jaxlib versions that are known to take the flag TRITON: XLA ends a process at an unknown flag."""
CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def avoid_faulty_reductions() -> None:
    """Keep XLA for CPUs from using YNNPACK's reductions, if jaxlib is one of `FAULTY` (jax issues 39257 and 40412).

    On some processors they end the process: a train step of the quickstart does.
    """
    if _installed("jaxlib").startswith(FAULTY):
        _add(FUSIONS, "-reduce")


def avoid_tuning_products() -> None:
    """Where JAX has a CUDA plugin, have XLA take cuBLAS for matrix products.

    Else it tunes a Triton kernel for each of them, 156 in a memory's training step, and the first step takes minutes
    (bench/README.md, On a GPU).
    """
    if _installed("jaxlib").startswith(TUNING) and any(map(_installed, CUDA_PLUGINS)):
        _add(TRITON, "false")


def _installed(package: str) -> str:
    """The version of a package; "" if it is not installed, or built from source."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _add(flag: str, value: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={value}".strip()
