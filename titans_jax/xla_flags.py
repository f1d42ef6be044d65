"""Flags of XLA that must be set before it starts."""

import os
from importlib.metadata import PackageNotFoundError, version

FUSIONS = "--xla_cpu_experimental_ynn_fusion_type"
FAULTY = ("0.10.2", "0.11.")
"""Beginnings of the jaxlib versions whose XLA may end a process in a segmentation fault on x86 processors."""


def avoid_faulty_reductions() -> None:
    """Keep XLA for CPUs from using YNNPACK's reductions, if jaxlib is one of `FAULTY` (jax issues 39257 and 40412).

    On some processors they end the process: a train step of the quickstart does. XLA reads its flags once, when a
    process first compiles, so this comes with the import of the package. A choice that is already in XLA_FLAGS stays.
    """
    try:
        faulty = version("jaxlib").startswith(FAULTY)
    except PackageNotFoundError:  # built from source
        faulty = False
    flags = os.environ.get("XLA_FLAGS", "")
    if faulty and FUSIONS not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {FUSIONS}=-reduce".strip()
