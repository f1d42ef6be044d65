"""Programs compiled for a TPU that is not here."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from titans_jax import sharding


def names_of_kernels(topology: str, function: Callable[..., Any], *inputs: Any) -> set[str]:
    """The Pallas kernels of function(*inputs), compiled for the first device of a topology; skips without libtpu."""
    pytest.importorskip("libtpu", reason="libtpu, which holds the TPU compiler, is not installed")
    from titans_jax.tpu.hlo import Program
    from titans_jax.tpu.topology import describe, find_topology

    mesh = sharding.make_mesh(devices=describe(find_topology(topology))[:1])
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), inputs)
    with sharding.use_mesh(mesh):
        program = jax.jit(function).lower(*inputs).compile()
    return {call.name.split(".")[0] for call, _ in Program(program.as_text()).kernels()}
