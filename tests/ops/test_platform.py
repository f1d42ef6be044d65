"""Code that chooses an implementation asks what the program will run on, not what it is compiled on."""

import os

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from titans_jax import sharding
from titans_jax.ops.platform import target_platform

ASKED = os.environ["JAX_PLATFORMS"].split(",")[0]  # "cpu", unless the tests run elsewhere
HERE = {"cuda": "gpu"}.get(ASKED, ASKED)


def test_without_a_mesh_it_is_the_backend():
    assert target_platform() == jax.default_backend() == HERE


def test_a_mesh_of_devices_that_are_here():
    with sharding.use_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
        assert target_platform() == jax.default_backend() == HERE


def test_a_mesh_of_described_devices_also_while_tracing():
    described = AbstractMesh((2,), ("data",), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))

    @jax.jit
    def chosen(x):
        return x[: 2 if target_platform() == "tpu" else 3]

    rows = jax.ShapeDtypeStruct((4,), "float32")
    with jax.sharding.use_abstract_mesh(described):
        assert target_platform() == "tpu"
        assert jax.eval_shape(chosen, rows).shape == (2,)
    # The mesh is part of what jit remembers a trace by.
    assert jax.eval_shape(chosen, rows).shape == (3,)
