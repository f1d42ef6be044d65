"""The arguments that cuDNN's attention is given, with JAX's own attention in its place, against our plain attention; on
an NVIDIA GPU, cuDNN itself."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import pytest
import test_segment_attention
import test_splash

from titans_jax.layers.attention import api, cudnn
from titans_jax.layers.attention.xla import KeyValues, blocked_attention, segment_attention
from titans_jax.ops import backend
from titans_jax.ops.backend import CPU, GPU

BATCH, HEADS, HEAD_DIM = 2, 2, 16
on_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU")


def documents(time):
    """Two documents in the first row, one in the second."""
    return jnp.stack([(jnp.arange(time) >= time // 3).astype(jnp.int32), jnp.zeros(time, jnp.int32)])


def exact(*shape):
    """Operands that bfloat16 holds exactly."""
    return [x.astype(jnp.bfloat16).astype(jnp.float32) for x in test_splash.operands(*shape)]


def assert_close(actual, expected, tolerance):
    for a, b in zip(actual, expected, strict=True):
        error = jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.maximum(jnp.linalg.norm(b), 1e-30)
        assert error < tolerance, float(error)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("num_prefix", [0, 4])
def test_equals_plain_attention(num_prefix, window, separate):
    given = exact(24, HEAD_DIM, num_prefix)
    options = {"window": window, "documents": documents(24) if separate else None}
    form = functools.partial(cudnn.flash_attention, implementation="xla")
    actual, expected = (
        test_splash.value_and_gradients(one, jnp.float32, given, **options) for one in (form, blocked_attention)
    )
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("num_prefix", [0, 4])
def test_equals_plain_segment_attention(num_prefix):
    given = test_segment_attention.operands(24, HEADS, HEAD_DIM, num_prefix)
    form = functools.partial(cudnn.flash_segment_attention, implementation="xla")
    actual, expected = (test_segment_attention.value_and_gradients(one, given) for one in (form, segment_attention))
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("num_prefix, head_dim", [(0, 64), (16, 48)])
@on_gpu
def test_cudnn_equals_plain_attention(num_prefix, head_dim, window):
    """To the roundings of bfloat16, as for splash (`test_splash`)."""
    given, options = exact(256, head_dim, num_prefix), {"window": window, "documents": documents(256)}
    actual = test_splash.value_and_gradients(api.causal_attention, jnp.bfloat16, given, **options)
    with jax.default_matmul_precision("highest"):
        expected = test_splash.value_and_gradients(blocked_attention, jnp.float32, given, **options)
    assert_close(actual, expected, 6e-3)


@on_gpu
def test_cudnn_equals_plain_segment_attention():
    given = test_segment_attention.operands(128, 2, 48, 16)
    rounded = [x.astype(jnp.bfloat16) for x in given]
    actual = test_segment_attention.value_and_gradients(api.segment_attention, rounded)
    with jax.default_matmul_precision("highest"):
        expected = test_segment_attention.value_and_gradients(segment_attention, given)
    assert_close(actual, expected, 6e-3)


def test_what_cudnn_takes(monkeypatch):
    """Sequences of 16-bit rows on a GPU; a cache, single tokens, float32 and wide heads go to plain attention."""

    def supported(dtype="bfloat16", time=8, history=0, prefix=0, head_dim=16):
        rows = lambda *shape: jax.ShapeDtypeStruct((*shape, HEADS, head_dim), dtype)  # noqa: E731
        past = KeyValues(rows(BATCH, history + time), rows(BATCH, history + time))
        return cudnn.supports_causal(rows(BATCH, time), past, KeyValues(rows(prefix), rows(prefix)))

    monkeypatch.setattr(cudnn, "current_backend", lambda: GPU)
    assert supported() and supported("float16") and supported(head_dim=128)
    assert not any(
        (supported("float32"), supported(time=1), supported(history=2), supported(head_dim=256), supported(head_dim=12))
    )
    assert not supported(prefix=3)  # an odd number of keys
    assert supported(time=7, prefix=3)
    for other in (CPU, backend.TPU, dataclasses.replace(GPU, cudnn=False)):
        monkeypatch.setattr(cudnn, "current_backend", lambda other=other: other)
        assert not supported()


@pytest.mark.parametrize(
    "capability, has", [("9.0", True), ("8.9", True), ("10.3", True), ("7.5", False), ("gfx942", False)]
)
def test_only_newer_gpus_of_nvidia_have_the_kernels(monkeypatch, capability, has):
    monkeypatch.setattr(cudnn, "current_backend", lambda: GPU)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(compute_capability=capability)])
    rows = jax.ShapeDtypeStruct((BATCH, 8, HEADS, HEAD_DIM), jnp.bfloat16)
    prefix = jax.ShapeDtypeStruct((0, HEADS, HEAD_DIM), jnp.bfloat16)
    assert cudnn.supports_causal(rows, KeyValues(rows, rows), KeyValues(prefix, prefix)) == has


def test_a_segment_that_cudnn_takes(monkeypatch):
    monkeypatch.setattr(cudnn, "current_backend", lambda: GPU)
    rows = lambda time: jax.ShapeDtypeStruct((BATCH, time, HEADS, HEAD_DIM), jnp.bfloat16)  # noqa: E731
    both = lambda time: KeyValues(rows(time), rows(time))  # noqa: E731
    assert cudnn.supports_segment(rows(8), (both(8), both(8)), both(4))
    assert not cudnn.supports_segment(rows(1), (both(8), both(8)), both(4))
    assert not cudnn.supports_segment(rows(8), (both(8), both(8)), both(3))
