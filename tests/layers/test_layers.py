"""Convolution, norms and the memory layer's pieces against numbers written out by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from titans_jax.config import MemoryConfig, ModelConfig, memory_rule
from titans_jax.layers import CausalConvolution, FeedForward, NeuralMemory, RMSNorm, norms
from titans_jax.layers.document_layout import find_documents
from titans_jax.layers.feed_forward import hidden_width
from titans_jax.layers.memory_gates import MemoryGates
from titans_jax.layers.norms import l2_normalize

CONFIG = ModelConfig(dim=8, num_heads=2, head_dim=4, depth=1, dtype="float32", memory=MemoryConfig(chunk_size=4))


@functools.cache
def memory_layer():
    return jax.jit(lambda: NeuralMemory(CONFIG, rngs=nnx.Rngs(0)))()


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_convolution_is_causal_and_per_channel():
    layer, x = CausalConvolution(CONFIG, 3, rngs=nnx.Rngs(0)), normal(0, 2, 7, 3)
    y, tail = layer(x, jnp.zeros((2, 3, 3)))
    kernel = np.array(layer.kernel[...])
    for channel in range(3):
        expected = [np.convolve(np.array(row), kernel[:, channel])[:7] for row in x[..., channel]]
        np.testing.assert_allclose(y[..., channel], expected, atol=1e-6)
    np.testing.assert_array_equal(tail, x[:, -3:])


@pytest.mark.parametrize("split", [1, 2, 6])
def test_convolution_continues_from_its_tail(split):
    layer, x, tail = CausalConvolution(CONFIG, 3, rngs=nnx.Rngs(0)), normal(0, 2, 7, 3), normal(1, 2, 3, 3)
    whole, last = layer(x, tail)
    first, middle = layer(x[:, :split], tail)
    second, end = layer(x[:, split:], middle)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, atol=1e-6)
    np.testing.assert_array_equal(last, end)


def test_convolution_begins_each_document_with_the_initial_tail():
    layer, x, initial = CausalConvolution(CONFIG, 3, rngs=nnx.Rngs(0)), normal(0, 1, 9, 3), normal(1, 3, 3)
    documents = find_documents(jnp.array([[1, 1, 2, 2, 2, 2, 2, 3, 4]], jnp.int32))
    y, _ = layer(x, initial[None], documents, initial)
    for begin, end in [(0, 2), (2, 7), (7, 8), (8, 9)]:
        alone, _ = layer(x[:, begin:end], initial[None])
        np.testing.assert_allclose(y[:, begin:end], alone, atol=1e-6)


def test_rms_norm_keeps_dtype_and_normalises_in_float32():
    layer = RMSNorm(CONFIG, 2, 4, rngs=nnx.Rngs(0))
    layer.scale[...] = 1.0 + jnp.arange(8, dtype=jnp.float32).reshape(2, 4)
    x = normal(0, 3, 2, 4)
    expected = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6) * layer.scale[...][None]
    np.testing.assert_allclose(layer(x), expected, rtol=1e-6)
    assert layer(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_l2_norm_of_zero_is_zero_with_a_finite_gradient():
    np.testing.assert_allclose(jnp.linalg.norm(l2_normalize(normal(0, 5, 4)), axis=-1), 1, atol=1e-5)
    zero = jnp.zeros((4,))
    assert not l2_normalize(zero).any()
    assert jnp.isfinite(jax.jacobian(l2_normalize)(zero)).all()


@pytest.mark.parametrize("width, count", [(48, 1), (64, 64)])
def test_norms_of_heads_side_by_side(width, count):
    """As a TPU takes them, in value and gradient; a head of zeros has neither NaN nor neighbours' numbers."""
    x = normal(0, 2, 7, 3, width).at[1, 2, 1].set(0)

    def beside(x):
        flat = norms.side_by_side(x)
        return (flat * norms.by_products(3, jnp.square(flat), count, 1e-6)).reshape(x.shape)

    def alone(x):
        return x * norms.by_sums(jnp.square(x), count, 1e-6)

    np.testing.assert_allclose(beside(x), alone(x), rtol=1e-5, atol=1e-7)
    cotangent = normal(1, 2, 7, 3, width)
    got, wanted = (jax.vjp(norm, x)[1](cotangent)[0] for norm in (beside, alone))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_feed_forward_width():
    assert hidden_width(ModelConfig(dim=768)) == 2048
    assert hidden_width(ModelConfig(dim=256)) == 704
    assert hidden_width(ModelConfig(hidden_dim=100)) == 100
    layer, x = FeedForward(CONFIG, rngs=nnx.Rngs(0)), normal(0, 2, 8)
    gate, up, down = (module.kernel[...] for module in (layer.gate, layer.up, layer.down))
    np.testing.assert_allclose(layer(x), (jax.nn.silu(x @ gate) * (x @ up)) @ down, rtol=1e-5)


def test_gates_start_where_the_docstring_says():
    layer = memory_layer()
    _, _, gates = layer.gates(jnp.zeros((1, 1, 8)), None, jnp.zeros((1, 1, 2, 4)))
    np.testing.assert_allclose(np.exp(gates.log_retention), 1 - 1 / (1 + np.exp(8)), rtol=1e-6)
    np.testing.assert_allclose(np.exp(gates.log_momentum), 0.5, rtol=1e-6)
    np.testing.assert_allclose(gates.step_size, 0.05 / 4, rtol=1e-6)
    assert gates.step_size.shape == (1, 1, 2, 2)  # one set per head and fast matrix


def test_gates_stay_in_range_whatever_the_input():
    layer = memory_layer()
    _, _, gates = layer.gates(1e6 * normal(0, 2, 5, 8), None, jnp.zeros((2, 5, 2, 4)))
    assert (gates.log_retention <= 0).all() and (gates.log_momentum <= 0).all()
    assert (gates.step_size >= 0).all() and (gates.step_size <= CONFIG.memory.max_step_size / 4).all()


def test_documents_begin_after_the_persistent_tokens():
    """Reading [P | x] as one sequence, with the chunk grid meeting the border, is what `persistent` does."""
    layer, persistent, x = memory_layer(), normal(0, 4, 8), normal(1, 2, 6, 8)
    both = jnp.concatenate([jnp.broadcast_to(persistent[None], (2, 4, 8)), x], axis=1)
    expected, _, _ = jax.jit(lambda x: layer(x))(both)
    actual, _, _ = jax.jit(lambda x: layer(x, persistent=persistent))(x)
    np.testing.assert_allclose(actual, expected[:, 4:], atol=1e-6)


def test_hgrn2_keeps_at_least_its_lower_bound():
    """bound + (1 - bound) gate of every channel in numpy float64, and the key is what it forgets."""
    config = dataclasses.replace(CONFIG, dtype="float64", memory=MemoryConfig(preset="hgrn2"))
    with jax.enable_x64(True):
        gates = MemoryGates(config, memory_rule(config.memory), rngs=nnx.Rngs(0))
        generator = np.random.default_rng(0)
        bound, projected = generator.normal(size=(2, 4)), 5 * generator.normal(size=(1, 5, 2, 4))
        gates.lower_bound[...] = jnp.asarray(bound)
        keys, _, found = gates(jnp.zeros((1, 5, 8)), jnp.asarray(projected), jnp.zeros((1, 5, 2, 4)))

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    logits = projected - 5
    retention = sigmoid(bound) + (1 - sigmoid(bound)) * sigmoid(-logits)
    assert np.ptp(sigmoid(logits)) > 0.9
    np.testing.assert_allclose(np.exp(found.log_key_retention), retention, rtol=1e-12)
    np.testing.assert_allclose(keys, 1 - retention, rtol=0, atol=1e-12)
    assert np.all(np.exp(found.log_key_retention) >= sigmoid(bound) - 1e-12)
