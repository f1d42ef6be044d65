"""Steps that near keys of a chunk share: by their definition, cut anywhere, and as the token-by-token rule has them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from titans_jax import memory
from titans_jax.config import MemoryConfig, ModelConfig
from titans_jax.layers.neural_memory import NeuralMemory
from titans_jax.layers.shared_steps import MOST_SHARED, init_tail, shared_steps
from titans_jax.memory.rule import algorithms, architectures, biases, retentions
from titans_jax.memory.rule.gate_choices import GateChoices
from titans_jax.memory.rule.presets import PRESETS, Preset

CHUNK, TIME, HEADS, DIM = 4, 11, 2, 6


def inputs(rows=2):
    draw = np.random.default_rng(0)
    keys = draw.normal(size=(rows, TIME, HEADS, DIM))
    keys[:, 6] = keys[:, 5] + 0.3 * keys[:, 6]  # near, in one chunk
    keys[:, 8] = keys[:, 7]  # equal, on two sides of a border
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    tail = init_tail(HEADS, DIM, CHUNK, jnp.float32, jnp.float32)
    tail = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), tail)
    return jnp.float32(draw.uniform(0, 1.5, (rows, TIME, HEADS))), jnp.float32(keys), tail


def test_is_its_definition():
    shares, keys, tail = inputs()
    expected = np.ones(shares.shape)
    for token in range(TIME):
        for earlier in range(token - token % CHUNK, token):
            cosine = np.einsum("bhd,bhd->bh", keys[:, token], keys[:, earlier])
            taken = np.minimum(shares[:, earlier], 1) * np.maximum(cosine, 0) ** 4
            expected[:, token] *= 1 - np.minimum(taken, MOST_SHARED)
    assert expected.min() < 0.3
    np.testing.assert_array_equal(expected[:, 8], 1)  # the first token of a chunk keeps its step
    np.testing.assert_allclose(shared_steps(shares, keys, tail, 0, CHUNK)[0], expected, atol=1e-6)


@pytest.mark.parametrize("pieces", [[1] * TIME, [3, 5, 1, 2], [7, 4]])
@pytest.mark.parametrize("traced", [True, False])
def test_a_sequence_may_be_read_in_pieces(pieces, traced):
    shares, keys, tail = inputs()
    whole, end = shared_steps(shares, keys, tail, 0, CHUNK)
    found, start = [], 0
    for size in pieces:
        part = slice(start, start + size)
        position = jnp.int32(start % CHUNK) if traced else start % CHUNK
        left, tail = shared_steps(shares[:, part], keys[:, part], tail, position, CHUNK)
        found.append(left)
        start += size
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), whole, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, tail, end)


def test_equal_keys_in_one_chunk_are_the_token_by_token_rule():
    time, dim, step = 5, 8, jnp.full((5,), 0.4)
    key = jnp.zeros((dim,)).at[2].set(1.0)
    keys, values = (jnp.broadcast_to(x, (time, dim)) for x in (key, jnp.arange(dim, dtype=jnp.float32)))

    @functools.partial(jax.jit, static_argnums=0)
    def written(chunk_size, step):
        rule = memory.MemoryRule(
            architectures.linear(), biases.l2(), retentions.decay(), algorithms.gradient_descent(), chunk_size
        )
        params = memory.init_params(rule, jax.random.key(0), dim)
        gates = memory.Gates.from_values(jnp.zeros(time), None, step)
        _, state = memory.memorize(rule, params, memory.init_state(rule, params), keys, keys, values, gates)
        return state.weights[0]

    tail = jax.tree.map(lambda x: x[None], init_tail(1, dim, time, jnp.float32, jnp.float32))
    left, _ = shared_steps(step[None, :, None], keys[None, :, None], tail, 0, time)
    one_by_one, together, alone = written(1, step), written(time, step * left[0, :, 0]), written(time, step)
    np.testing.assert_allclose(together, one_by_one, rtol=1e-5, atol=1e-6)
    assert np.abs(alone - one_by_one).max() > 1  # five steps of 0.4 overshoot


def test_the_gradient_at_equal_keys_is_finite():
    shares, keys, tail = inputs()
    equal = jnp.broadcast_to(keys[:, :1], keys.shape)

    def total(shares, keys):
        return jnp.sum(shared_steps(shares, keys, tail, 0, CHUNK)[0])

    for gradient in jax.jit(jax.grad(total, argnums=(0, 1)))(jnp.ones_like(shares), equal):
        assert np.all(np.isfinite(gradient))


def test_several_steps_a_token_are_not_shared(monkeypatch):
    monkeypatch.setattr(PRESETS, "_parts", dict(PRESETS._parts))  # forgets it after the test
    algorithm = algorithms.gradient_descent(steps=2)
    twice = Preset(
        "two_bounded_steps",
        lambda: memory.MemoryRule(architectures.linear(), biases.l2(), retentions.decay(), algorithm, 4),
        GateChoices("forget", "bounded"),
    )
    model = ModelConfig(pattern=("lmm",), dim=8, num_heads=2, head_dim=4, memory=MemoryConfig(preset=twice))
    layer = jax.eval_shape(lambda: NeuralMemory(model, rngs=nnx.Rngs(0)))
    reads, state, _ = jax.eval_shape(lambda layer: layer(jnp.zeros((1, 6, 8), jnp.bfloat16)), layer)
    assert reads.shape == (1, 6, 8) and "steps" not in state.tails
