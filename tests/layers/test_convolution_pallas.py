"""The kernel of a memory's inputs in interpret mode against the plain form; on four devices; compiled for TPUs."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import child
from titans_jax import sharding
from titans_jax.config import ModelConfig
from titans_jax.layers import CausalConvolution, convolution_pallas
from titans_jax.layers.document_layout import find_documents

BATCH, TIME, TAPS = 2, 192, 4
CONFIG = ModelConfig(dim=8, num_heads=2, head_dim=4, depth=1, dtype="float32", conv_size=TAPS)


def operands(channels, dtype=jnp.float32):
    """x, the rows before it, those before a document, the kernel, and a cotangent."""
    random = np.random.default_rng(0)
    shapes = [(BATCH, TIME, channels), (BATCH, TAPS - 1, channels), (TAPS - 1, channels), (TAPS, channels)]
    *rows, kernel = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)
    return [x.astype(dtype) for x in rows] + [kernel], jnp.asarray(random.normal(size=shapes[0]), dtype)


def documents():
    """Of few tokens, on both sides of a strip's border; the first row's first began before."""
    ids = np.repeat(np.arange(1, 9), [62, 1, 2, 61, 2, 1, 30, 33])
    return find_documents(jnp.asarray(np.stack([ids, np.roll(ids, 5)]), jnp.int32))


@functools.cache
def convolution(dtype):
    return nnx.split(CausalConvolution(dataclasses.replace(CONFIG, dtype=dtype), 1, rngs=nnx.Rngs(0)))


def answers(operands, cotangent, packed, unit_norm, activation=True):
    """Features, the next tail, and gradients of all operands."""
    graph, params = convolution(cotangent.dtype.name)

    @jax.jit
    def run(operands):
        def features(x, tail, initial_tail, kernel):
            layer = nnx.merge(graph, jax.tree.map(lambda _: kernel, params))
            history = (documents(), initial_tail) if packed else ()
            return layer.features(x, tail, *history, activation=activation, unit_norm=unit_norm)

        y, pull, tail = jax.vjp(features, *operands, has_aux=True)
        return y, tail, pull(cotangent)

    return run(operands)


@pytest.fixture
def in_kernel(monkeypatch):
    """Take the kernel, three steps of it."""
    monkeypatch.setattr(convolution_pallas, "MOST_TOKENS", convolution_pallas.STRIP)

    def switch(on):
        monkeypatch.setattr(convolution_pallas, "runs", lambda *_: on)

    return switch


@pytest.mark.parametrize(
    "channels, packed, unit_norm, activation",
    [(256, True, 64, True), (384, False, 48, True), (128, True, None, False)],
    ids=["documents", "head_dim 48, streamed", "convolution alone"],
)
def test_kernel_equals_the_plain_form(channels, packed, unit_norm, activation, in_kernel):
    found = []
    for kernel in (True, False):
        in_kernel(kernel)
        found.append(answers(*operands(channels), packed, unit_norm, activation))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


def test_bfloat16_is_rounded_once(in_kernel):
    """The kernel computes in float32: it is as near as its result's last digit to what float32 gives."""
    exact, cotangent = operands(128, jnp.bfloat16)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (exact, cotangent))
    in_kernel(True)
    y, _, (d_x, *_) = answers(exact, cotangent, False, 64)
    in_kernel(False)
    wanted, _, (d_wanted, *_) = answers(*wide, False, 64)
    np.testing.assert_allclose(y.astype(jnp.float32), wanted, rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(d_x.astype(jnp.float32), d_wanted, rtol=2**-8, atol=1e-5)


def test_which_shapes_it_takes(monkeypatch):
    monkeypatch.setattr(convolution_pallas, "target_platform", lambda: "tpu")
    assert convolution_pallas.runs(64, 768, 4, 48) and convolution_pallas.runs(2048, 1024, 8, None)
    assert not convolution_pallas.runs(1, 1024, 4, 64)  # one token
    assert not convolution_pallas.runs(64, 384, 4, 80)  # 640 channels would hold whole heads of 80
    assert not convolution_pallas.runs(64, 1024, 1, 64)  # nothing to convolve
    assert not convolution_pallas.runs(64, 1024, 10, 64)


MESH = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
import test_fused_convolution as t
from titans_jax import sharding

found = []
t.convolution("float32")
for kernel in (True, False):
    t.fused_convolution.runs = lambda *_: kernel
    if kernel:
        with sharding.use_mesh(sharding.make_mesh(fsdp=2, tensor=2)):
            found.append(t.answers(*t.operands(256), True, 64))
    else:
        found.append(t.answers(*t.operands(256), True, 64))
for a, b in zip(*map(jax.tree.leaves, found), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * float(abs(b).max()))
"""


def test_four_devices_equal_one():
    """Rows over fsdp and channels over tensor: gradients of taps are summed over the rows of all devices."""
    child.run(MESH, os.path.dirname(__file__))


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
    pytest.importorskip("libtpu", reason="libtpu, which holds the TPU compiler, is not installed")
    from titans_jax.tpu.hlo import Program
    from titans_jax.tpu.topology import describe, find_topology

    convolution(dtype)
    mesh = sharding.make_mesh(devices=describe(find_topology(topology))[:1])
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    held = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)  # noqa: E731
    inputs = jax.tree.map(held, operands(16 * head_dim, jnp.dtype(dtype)))
    with sharding.use_mesh(mesh):
        program = jax.jit(lambda *a: answers(*a, True, head_dim)).lower(*inputs).compile()
    names = {call.name.split(".")[0] for call, _ in Program(program.as_text()).kernels()}
    assert len(names) == 2 and all("features" in name for name in names)
