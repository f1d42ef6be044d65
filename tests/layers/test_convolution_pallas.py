"""The kernel of a memory's features in interpret mode against plain JAX; on four devices; compiled for TPUs."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import child
from tests.described import names_of_kernels
from titans_jax.layers import convolution_pallas
from titans_jax.layers.convolution import FEATURES, features_pallas, features_xla
from titans_jax.layers.convolution_pallas import FeatureOptions
from titans_jax.layers.document_layout import find_documents
from titans_jax.layers.implementations import dispatch
from titans_jax.ops import backend

BATCH, TIME, TAPS = 2, 192, 4


def operands(channels, dtype=jnp.float32, time=TIME, taps=TAPS):
    """x, the rows before it, those before a document, the kernel, and a cotangent."""
    random = np.random.default_rng(0)
    shapes = [(BATCH, time, channels), (BATCH, taps - 1, channels), (taps - 1, channels), (taps, channels)]
    *rows, kernel = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)
    return [x.astype(dtype) for x in rows] + [kernel], jnp.asarray(random.normal(size=shapes[0]), dtype)


def documents():
    """Documents of few tokens, on both sides of a strip's end; the first row's first one started before the row."""
    ids = np.repeat(np.arange(1, 9), [62, 1, 2, 61, 2, 1, 30, 33])
    return find_documents(jnp.asarray(np.stack([ids, np.roll(ids, 5)]), jnp.int32))


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5, 6))
def value_and_gradients(implementation, operands, cotangent, packed, unit_norm, activation=True, length=1.0):
    """Features, the next tail, and gradients of all operands."""
    options = FeatureOptions(activation, unit_norm, cotangent.dtype, length)

    def features(x, tail, initial_tail, kernel):
        return implementation(options, x, tail, kernel, *((documents(), initial_tail) if packed else ()))

    y, pull, tail = jax.vjp(features, *operands, has_aux=True)
    return y, tail, pull(cotangent)


@pytest.fixture(autouse=True)
def three_steps(monkeypatch):
    """A step of the kernel is one strip, so that a row is three."""
    monkeypatch.setattr(convolution_pallas, "MOST_TOKENS", convolution_pallas.STRIP)


@pytest.mark.slow_but_for("documents")
@pytest.mark.parametrize(
    "channels, packed, unit_norm, activation, length",
    [(256, True, 64, True, 8.0), (384, False, 48, True, 1.0), (128, True, None, False, 1.0)],
    ids=["documents", "head_dim 48, streamed", "convolution alone"],
)
def test_kernel_equals_plain_jax(channels, packed, unit_norm, activation, length):
    arguments = *operands(channels), packed, unit_norm, activation, length
    found = [value_and_gradients(implementation, *arguments) for implementation in (features_pallas, features_xla)]
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


def test_bfloat16_is_rounded_once():
    """The kernel computes in float32: it is as near as its result's last digit to what float32 gives."""
    exact, cotangent = operands(128, jnp.bfloat16)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (exact, cotangent))
    y, _, (d_x, *_) = value_and_gradients(features_pallas, exact, cotangent, False, 64)
    wanted, _, (d_wanted, *_) = value_and_gradients(features_xla, *wide, False, 64)
    np.testing.assert_allclose(y.astype(jnp.float32), wanted, rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(d_x.astype(jnp.float32), d_wanted, rtol=2**-8, atol=1e-5)


@pytest.fixture
def for_tpu(monkeypatch):
    """Implementations are chosen as for a TPU."""
    monkeypatch.setattr(convolution_pallas, "current_backend", lambda: backend.TPU)


@pytest.mark.parametrize("width, channels", [(48, 768), (64, 1024), (96, 1536), (256, 2048)])
def test_the_papers_sizes_run_in_the_kernel(for_tpu, width, channels):
    (x, tail, _, kernel), _ = operands(channels, jnp.bfloat16, time=128)
    options = FeatureOptions(True, width, jnp.bfloat16)
    chosen = next(each for each in FEATURES if each.supports(options, x, tail, kernel))
    assert chosen.name == "pallas"


@pytest.mark.parametrize("time, channels, taps, width", [
    (1, 256, 4, 64), (65, 256, 4, 64), (64, 240, 4, 80), (64, 96, 4, 48), (64, 128, 1, 64), (64, 128, 10, 64),
    (64, 384, 8, 48),
])  # fmt: skip
def test_every_shape_has_an_implementation_that_gives_the_same(for_tpu, time, channels, taps, width):
    """One token as in decoding, no whole strip, heads that fill no registers, nothing or much to convolve."""
    (x, tail, _, kernel), _ = operands(channels, time=time, taps=taps)
    options = FeatureOptions(True, width, jnp.float32)
    y, next_tail = dispatch(FEATURES, options, x, tail, kernel)
    expected, expected_tail = features_xla(options, x, tail, kernel)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_array_equal(next_tail, expected_tail)


MESH = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
import test_convolution_pallas as t
from titans_jax import sharding

with sharding.use_mesh(sharding.make_mesh(fsdp=2, tensor=2)):
    found = t.value_and_gradients(t.features_pallas, *t.operands(256), True, 64)
expected = t.value_and_gradients(t.features_xla, *t.operands(256), True, 64)
for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * float(abs(b).max()))
"""


@pytest.mark.processes
@pytest.mark.slow
def test_four_devices_equal_one():
    """Rows over fsdp and channels over tensor: gradients of taps are summed over the rows of all devices."""
    child.run(MESH, os.path.dirname(__file__))


@pytest.mark.tpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "topology, head_dim, dtype",
    [
        ("v5e:1x1", 64, "bfloat16"),
        ("v5p:2x2x1", 48, "float32"),
        ("v6e:1x1", 256, "bfloat16"),
        ("tpu7x:2x2x1", 128, "bfloat16"),
    ],
)
def test_compiles_for_a_tpu_that_is_not_here(topology, head_dim, dtype):
    run = functools.partial(dispatch, FEATURES)
    inputs = operands(16 * head_dim, jnp.dtype(dtype))
    names = names_of_kernels(topology, lambda *a: value_and_gradients(run, *a, True, head_dim), *inputs)
    assert len(names) == 2 and all("features" in name for name in names)
