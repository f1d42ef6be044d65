"""The causal convolution against numpy's, over splits and documents, and the features behind it."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from titans_jax.config import ModelConfig
from titans_jax.layers import CausalConvolution
from titans_jax.layers.document_layout import find_documents

CONFIG = ModelConfig(dim=8, num_heads=2, head_dim=4, depth=1, dtype="float32")


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_is_causal_and_per_channel():
    layer, x = CausalConvolution(CONFIG, 3, rngs=nnx.Rngs(0)), normal(0, 2, 7, 3)
    y, tail = layer(x, jnp.zeros((2, 3, 3)))
    kernel = np.array(layer.kernel[...])
    for channel in range(3):
        expected = [np.convolve(np.array(row), kernel[:, channel])[:7] for row in x[..., channel]]
        np.testing.assert_allclose(y[..., channel], expected, atol=1e-6)
    np.testing.assert_array_equal(tail, x[:, -3:])


@pytest.mark.parametrize("split", [1, 2, 6])
def test_continues_from_its_tail(split):
    layer, x, tail = CausalConvolution(CONFIG, 3, rngs=nnx.Rngs(0)), normal(0, 2, 7, 3), normal(1, 2, 3, 3)
    whole, last = layer(x, tail)
    first, middle = layer(x[:, :split], tail)
    second, end = layer(x[:, split:], middle)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, atol=1e-6)
    np.testing.assert_array_equal(last, end)


def test_every_document_starts_with_the_initial_tail():
    layer, x, initial = CausalConvolution(CONFIG, 3, rngs=nnx.Rngs(0)), normal(0, 1, 9, 3), normal(1, 3, 3)
    documents = find_documents(jnp.array([[1, 1, 2, 2, 2, 2, 2, 3, 4]], jnp.int32))
    y, _ = layer(x, initial[None], documents, initial)
    for start, end in [(0, 2), (2, 7), (7, 8), (8, 9)]:
        alone, _ = layer(x[:, start:end], initial[None])
        np.testing.assert_allclose(y[:, start:end], alone, atol=1e-6)


def test_a_bias_is_added_before_the_activation():
    plain, layer = (CausalConvolution(CONFIG, 3, bias=bias, rngs=nnx.Rngs(0)) for bias in (False, True))
    x, tail, bias = normal(0, 2, 7, 3), normal(1, 2, 3, 3), normal(2, 3)
    assert plain.bias is None and not layer.bias[...].any()
    layer.bias[...] = bias
    expected = plain(x, tail)[0] + bias[None, None]
    np.testing.assert_allclose(layer(x, tail)[0], expected, atol=1e-6)
    y, _ = layer.features(x, tail, activation=True, unit_norm=None)
    np.testing.assert_allclose(y, expected / (1 + np.exp(-expected)), atol=1e-6)


@pytest.mark.parametrize("time, length", [(1, 1.0), (7, 3.0)])
def test_features_have_their_norm_by_head_and_the_tail_of_a_call(time, length):
    layer, x, tail = CausalConvolution(CONFIG, 8, rngs=nnx.Rngs(0)), normal(0, 2, time, 8), normal(1, 2, 3, 8)
    plain, end = layer(x, tail)
    alone, _ = layer.features(x, tail, activation=False, unit_norm=None)
    np.testing.assert_array_equal(alone, plain)
    y, next_tail = layer.features(x, tail, activation=True, unit_norm=4, length=length)
    np.testing.assert_array_equal(next_tail, end)
    np.testing.assert_allclose(np.linalg.norm(y.reshape(2, time, 2, 4), axis=-1), length, rtol=1e-4)
    # SiLU keeps signs, and the norm of a head scales all of it alike.
    np.testing.assert_array_equal(np.sign(y), np.sign(plain))
    by_head = np.asarray(plain / (1 + np.exp(-plain)) / y).reshape(2, time, 2, 4)
    np.testing.assert_allclose(by_head, np.broadcast_to(by_head[..., :1], by_head.shape), rtol=1e-4)
