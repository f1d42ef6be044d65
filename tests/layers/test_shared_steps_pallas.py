"""The kernel of shared steps in interpret mode against plain JAX; on four devices; compiled for TPUs."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import child
from tests.described import names_of_kernels
from titans_jax.layers import shared_steps_pallas
from titans_jax.layers.implementations import dispatch
from titans_jax.layers.shared_steps import FACTORS, factors_pallas, factors_xla, init_tail
from titans_jax.ops import backend

ROWS, TIME = 2, 192


def operands(heads, width, dtype=jnp.float32, rows=ROWS, time=TIME):
    """Shares of which some are above 1, keys of which many are near each other and some equal, and a cotangent."""
    draw = np.random.default_rng(0)
    keys = draw.normal(size=(rows, time, heads, width)) + 1.5 * draw.normal(size=(rows, 1, heads, width))
    keys[:, 5:70:3] = keys[:, 4:69:3]
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    shares, cotangent = draw.uniform(0, 1.5, (rows, time, heads)), draw.normal(size=(rows, time, heads))
    return jnp.float32(shares), jnp.asarray(keys, dtype), jnp.float32(cotangent)


@functools.partial(jax.jit, static_argnums=(0, 2))
def value_and_gradients(implementation, operands, chunk_size):
    """Factors, and gradients of shares and keys."""
    shares, keys, cotangent = operands
    rows, _, *of_token = keys.shape
    tail = init_tail(*of_token, chunk_size, keys.dtype, shares.dtype)
    tail = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), tail)
    factors, pull = jax.vjp(lambda *a: implementation(*a, tail, 0, chunk_size), shares, keys)
    return factors, *pull(cotangent)


@pytest.mark.parametrize("heads, width, chunk_size", [(4, 64, 64), (8, 32, 16), (2, 128, 4)])
def test_kernel_equals_plain_jax(heads, width, chunk_size):
    found, expected = (
        value_and_gradients(run, operands(heads, width), chunk_size) for run in (factors_pallas, factors_xla)
    )
    assert float(expected[0].min()) < 0.1
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


def test_bfloat16_keys_give_the_same_factors():
    """Products of bfloat16 are exact in float32, so that only what they are summed to is rounded."""
    arguments = operands(2, 64, jnp.bfloat16)
    found, expected = (value_and_gradients(run, arguments, 64) for run in (factors_pallas, factors_xla))
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-4)
    # The gradient of a key is a sum of two products, each with the digits of bfloat16.
    a, b = (np.asarray(x[2], np.float32) for x in (found, expected))
    np.testing.assert_allclose(a, b, atol=2**-7 * np.abs(b).max())


@pytest.fixture
def for_tpu(monkeypatch):
    """Implementations are chosen as for a TPU."""
    monkeypatch.setattr(shared_steps_pallas, "current_backend", lambda: backend.TPU)


@pytest.mark.parametrize("heads, width, time, chunk_size, position, kernel", [
    (2, 64, 128, 64, 0, True), (4, 64, 64, 16, 0, True), (1, 128, 64, 64, 0, True),
    (2, 64, 128, 16, 3, False), (2, 64, 1, 16, 0, False), (2, 64, 96, 16, 0, False), (3, 64, 64, 16, 0, False),
    (4, 48, 64, 16, 0, False), (2, 64, 256, 128, 0, False), (2, 256, 64, 16, 0, False),
])  # fmt: skip
def test_runs_whole_blocks_of_heads_that_fill_registers(for_tpu, heads, width, time, chunk_size, position, kernel):
    """Not in the midst of a chunk, one token as in decoding, no whole block, an odd head, heads across registers."""
    shares, keys, _ = operands(heads, width, time=time, rows=1)
    tail = jax.tree.map(lambda x: x[None], init_tail(heads, width, chunk_size, keys.dtype, shares.dtype))
    arguments = shares, keys, tail, position, chunk_size
    assert FACTORS[0].supports(*arguments) == kernel
    np.testing.assert_allclose(dispatch(FACTORS, *arguments), factors_xla(*arguments), atol=1e-5)


def test_a_position_that_is_not_known_is_not_the_kernels(for_tpu):
    shares, keys, _ = operands(2, 64)
    assert not shared_steps_pallas.supports(shares, keys, jnp.int32(0), 16)


MESH = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
import test_shared_steps_pallas as t
from titans_jax import sharding

with sharding.use_mesh(sharding.make_mesh(fsdp=2, tensor=2)):
    found = t.value_and_gradients(t.factors_pallas, t.operands(4, 64), 16)
expected = t.value_and_gradients(t.factors_xla, t.operands(4, 64), 16)
for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * float(abs(b).max()))
"""


@pytest.mark.processes
@pytest.mark.slow
def test_four_devices_equal_one():
    """Rows over fsdp and heads over tensor."""
    child.run(MESH, os.path.dirname(__file__))


@pytest.mark.tpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "topology, heads, width, dtype",
    [
        ("v5e:1x1", 16, 64, "bfloat16"),
        ("v5p:2x2x1", 8, 32, "float32"),
        ("v6e:1x1", 16, 64, "bfloat16"),
        ("tpu7x:2x2x1", 8, 128, "bfloat16"),
    ],
)
def test_compiles_for_a_tpu_that_is_not_here(topology, heads, width, dtype):
    run = functools.partial(dispatch, FACTORS)
    inputs = operands(heads, width, jnp.dtype(dtype))
    names = names_of_kernels(topology, lambda *a: value_and_gradients(run, a, 16), *inputs)
    assert names == {"shared_steps", "shared_steps_backward"}
