"""The memory layer: its gates against numbers written out by hand, and where documents start."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from titans_jax import layers
from titans_jax.config import ConfigError, MemoryConfig, ModelConfig, memory_rule, step_size_bound
from titans_jax.layers import NeuralMemory
from titans_jax.layers.memory_gates import MemoryGates

CONFIG = ModelConfig(dim=8, num_heads=2, head_dim=4, depth=1, dtype="float32", memory=MemoryConfig(chunk_size=4))


@functools.cache
def memory_layer():
    return jax.jit(lambda: NeuralMemory(CONFIG, rngs=nnx.Rngs(0)))()


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_gates_start_where_the_docstring_says():
    layer = memory_layer()
    _, _, gates = layer.gates(jnp.zeros((1, 1, 8)), None, jnp.zeros((1, 1, 2, 4)))
    kept = np.array([1 - 1 / (1 + np.exp(7)), 1 - 1 / (1 + np.exp(2))])  # of the first head, and the last
    np.testing.assert_allclose(np.exp(gates.log_retention[0, 0]), np.stack([kept, kept], axis=1), rtol=1e-6)
    np.testing.assert_allclose(np.exp(gates.log_momentum), 0.5, rtol=1e-6)
    np.testing.assert_allclose(gates.step_size, step_size_bound(CONFIG) / 6, rtol=1e-6)
    assert gates.step_size.shape == (1, 1, 2, 2)  # one set per head and fast matrix


def test_gates_stay_in_range_whatever_the_input():
    layer = memory_layer()
    _, _, gates = layer.gates(1e6 * normal(0, 2, 5, 8), None, jnp.zeros((2, 5, 2, 4)))
    assert (gates.log_retention <= 0).all() and (gates.log_momentum <= 0).all()
    assert (gates.step_size >= 0).all() and (gates.step_size <= step_size_bound(CONFIG)).all()


def test_sequences_start_after_the_persistent_tokens():
    """`persistent` is reading [P | x] as one sequence, here with P a whole chunk."""
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


@pytest.mark.parametrize(
    "field, value, kind",
    [
        ("caching", "gated", layers.CachedMemory),
        ("local_chunks", (2,), layers.HierarchicalMemory),
        ("log_linear_levels", 3, layers.LogLinearMemory),
    ],
)
def test_what_needs_a_layer_of_its_own_gets_it_and_another_refuses(field, value, kind):
    others = {"preset": "gated_deltanet"} if kind is layers.LogLinearMemory else {"shard": 4}
    config = dataclasses.replace(CONFIG, memory=dataclasses.replace(CONFIG.memory, **others, **{field: value}))
    assert type(jax.eval_shape(lambda: layers.memory_layer(config, rngs=nnx.Rngs(0)))) is kind
    with pytest.raises(ConfigError) as error:
        NeuralMemory(config, rngs=nnx.Rngs(0))
    assert str(error.value).startswith(f"model.memory.{field} is {value!r}, which a NeuralMemory does not do; use ")
