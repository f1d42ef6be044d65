"""Backends choose how, never what: every one gives the numbers of every other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from titans_jax import sharding
from titans_jax.ops.backend import CPU, GPU, PALLAS, TPU, BlockSize, current_backend

BACKENDS = (CPU, GPU, TPU, PALLAS)
each = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
TOKENS = 16  # a kernel inverts powers of two


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_names_differ():
    assert len({backend.name for backend in BACKENDS}) == len(BACKENDS)


@each
def test_inverse(backend):
    lower = 0.3 * jnp.tril(draw(TOKENS, TOKENS), -1)
    wanted = np.linalg.inv(np.eye(TOKENS) + np.asarray(lower, np.float64))
    np.testing.assert_allclose(backend.inverse(lower, lower.dtype), wanted, rtol=0, atol=1e-5)


@each
def test_broadcast_column(backend):
    column = draw(TOKENS, 1)
    np.testing.assert_array_equal(backend.broadcast_column(column, 3), np.repeat(column, 3, axis=1))


@each
@pytest.mark.parametrize("inputs, outputs", [(3, 5), (5, 3)])
def test_weighted_outer_products(backend, inputs, outputs):
    row, inner, deltas = draw(1, TOKENS), draw(TOKENS, inputs, seed=1), draw(TOKENS, outputs, seed=2)
    (found,) = backend.weighted_outer_products([row], inner, deltas, jnp.float32)
    np.testing.assert_allclose(found, np.float64(inner).T @ (np.asarray(row).T * deltas), rtol=1e-5, atol=1e-5)


@each
def test_channel_decay(backend):
    """tests/ops/test_channel_decay.py has the sums; here all that a form asks for is there, and alike."""
    log_gate, x, y = -jnp.abs(draw(TOKENS, 3)), draw(TOKENS, 3, seed=1), draw(TOKENS, 3, seed=2)
    lower = jnp.tril(draw(TOKENS, TOKENS, seed=3))

    def answers(backend):
        decay = backend.channel_decay(log_gate)
        (scores,) = decay.scores((x,), y, x.dtype)
        return decay.since_start(), decay.to_end(), decay.whole(), scores, decay.mix(lower, y, y.dtype)

    for found, wanted in zip(jax.jit(lambda: answers(backend))(), jax.jit(lambda: answers(TPU))(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@each
def test_sizes(backend):
    """Powers of two and whole groups, of which chunks are filled."""
    sizes = (
        *backend.delta_rule,
        *backend.gated_delta_rule,
        backend.decay_tile,
        backend.read_tile,
        backend.number_lanes,
    )
    assert all(size is None or (size > 0 and size & (size - 1) == 0) for size in sizes)


def test_a_new_backend_is_one_object():
    other = dataclasses.replace(CPU, name="other", delta_rule=BlockSize(8, 1))
    assert other.inverse is CPU.inverse and other != CPU and hash(other) != hash(CPU)


def test_the_mesh_decides():
    """Also a mesh of devices that are described only, and while tracing; without one, the devices that are here."""
    described = AbstractMesh((2,), ("data",), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))
    here = {"cpu": CPU, "gpu": GPU, "tpu": TPU}[jax.default_backend()]
    assert current_backend() is here
    with sharding.use_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
        assert current_backend() is here
    with jax.sharding.use_abstract_mesh(described):
        assert current_backend() is TPU
        jax.eval_shape(lambda x: (x, current_backend() is TPU or pytest.fail("traced for what is here"))[0], 1.0)
    assert current_backend() is here
