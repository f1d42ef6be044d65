"""Mamba-3's rotated keys and its trapezoid against a loop in numpy: values, pieces, documents, causality, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.slopes import assert_slope_is_the_difference
from titans_jax import memory
from titans_jax.config import Config, ConfigError, MemoryConfig, ModelConfig, memory_rule
from titans_jax.config.validate import validate
from titans_jax.layers import NeuralMemory
from titans_jax.layers.document_layout import find_documents
from titans_jax.layers.rotation import RotatedInputs, Rotation, RotationTail

HEADS, WIDTH, TIME, BATCH, DIM = 2, 6, 10, 2, 12
CONFIG = ModelConfig(
    dim=DIM, num_heads=HEADS, head_dim=WIDTH, depth=1, dtype="float64", memory=MemoryConfig(preset="mamba3")
)
RULE = memory_rule(CONFIG.memory)


@functools.cache
def drawn():
    """(parameters by path, x [b, t, dim], queries, keys, values [b, t, h, d])."""
    generator = np.random.default_rng(0)
    with jax.enable_x64(True):
        shapes = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(Rotation(CONFIG, 1, rngs=nnx.Rngs(0)))))
    parameters = jax.tree.map(lambda leaf: generator.normal(size=leaf.shape), shapes)
    tokens = generator.normal(size=(3, BATCH, TIME, HEADS, WIDTH))
    return parameters, generator.normal(size=(BATCH, TIME, DIM)), *tokens


def module(parameters):
    graphdef, state = nnx.split(Rotation(CONFIG, 1, rngs=nnx.Rngs(0)))
    nnx.replace_by_pure_dict(state, parameters)
    return nnx.merge(graphdef, state)


def start():
    """The tail before any token."""
    zeros = np.zeros((BATCH, HEADS, WIDTH))
    return RotationTail(np.zeros((BATCH, HEADS, 1)), zeros, zeros)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.log1p(np.exp(x))


def expected(x, queries, keys, values, tail):
    """One row of the published recurrence, every head with its own state: y [t, h, d] from W_0 = 0."""
    p, reads = drawn()[0], []
    phases, last_key, last_value = tail
    state = np.zeros((HEADS, WIDTH, WIDTH))

    def normed(x, scale, bias):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + CONFIG.norm_eps) * scale + bias

    def turned(x):  # one pair of channels of six
        cos, sin = np.cos(phases[:, 0]), np.sin(phases[:, 0])
        pair = np.stack([x[:, 0] * cos - x[:, 1] * sin, x[:, 0] * sin + x[:, 1] * cos], axis=1)
        return np.concatenate([pair, x[:, 2:]], axis=1)

    for row, q, k, v in zip(x, queries, keys, values, strict=True):
        logits = np.einsum("d,dhk->hk", row / np.sqrt(DIM), p["kernel"]) + p["bias"]
        step = softplus(logits[:, 0] + p["step_bias"])
        a = np.exp(-step * np.maximum(softplus(logits[:, 1]), 1e-4))
        share = sigmoid(logits[:, 2])
        phases = phases + step[:, None] * np.pi * np.tanh(row / np.sqrt(DIM) @ p["turn"])
        q = turned(normed(q, p["query_norm"]["scale"], p["query_bias"]))
        k = turned(normed(k, p["key_norm"]["scale"], p["key_bias"]))
        before = np.einsum("hk,hv->hkv", last_key, last_value)
        state = a[:, None, None] * state + ((1 - share) * step * a)[:, None, None] * before
        state = state + (share * step)[:, None, None] * np.einsum("hk,hv->hkv", k, v)
        reads.append(np.einsum("hkv,hk->hv", state, q) + p["skip"][:, None] * v)
        last_key, last_value = k, v
    return np.array(reads)


def answer(parameters, x, queries, keys, values, tail, segment_ids=None, initial=None):
    """(y [b, t, h, d], the next tail): the rotation, the memory from zero, the skip."""
    rotation = module(parameters)
    ones = jnp.ones((*x.shape[:2], HEADS, 2))
    inputs = RotatedInputs(queries, keys, values, memory.Gates(jnp.zeros((*x.shape[:2], HEADS, 1)), None, ones))
    documents = None if segment_ids is None else find_documents(segment_ids)
    rotated, tail = rotation(x, inputs, tail, documents, initial)
    params = memory.init_params(RULE, jax.random.key(0), WIDTH)

    def one(queries, keys, values, gates, resets):
        state = memory.init_state(RULE, params)
        return memory.memorize(RULE, params, state, queries, keys, values, gates, "chunked", resets=resets)[0]

    rows = jax.vmap(jax.vmap(one, (1, 1, 1, 1, None), 1), (0, 0, 0, 0, None if documents is None else 0))
    reads = rows(*rotated, None if documents is None else documents.starts)
    return reads + rotation.skip[...][None, None, :, None] * values, tail


def run(*inputs):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(answer)(drawn()[0], *inputs))


def test_reads_are_those_of_the_published_recurrence():
    """From any phases and any token before; phases and the token go on, and phases are kept small."""
    _, *tokens = drawn()
    generator = np.random.default_rng(1)
    tail = RotationTail(*(generator.normal(size=leaf.shape) for leaf in start()))
    reads, after = run(*tokens, tail)
    for row in range(BATCH):
        wanted = expected(*(leaf[row] for leaf in tokens), tuple(leaf[row] for leaf in tail))
        np.testing.assert_allclose(reads[row], wanted, rtol=1e-10, atol=1e-10)
    np.testing.assert_array_equal(after.value, tokens[3][:, -1])
    assert (after.phases >= 0).all() and (after.phases < 2 * np.pi).all()


def test_documents_are_read_as_if_alone():
    _, *tokens = drawn()
    generator = np.random.default_rng(2)
    initial = RotationTail(*(generator.normal(size=leaf.shape[1:]) for leaf in start()))
    ids = np.array([[1] * 4 + [2] * 6, [1] * 2 + [2] * 5 + [3] * 3], np.int32)
    reads, _ = run(*tokens, start(), ids, initial)
    for row, borders in enumerate(([0, 4, 10], [0, 2, 7, 10])):
        for begin, end in zip(borders[:-1], borders[1:], strict=True):
            wanted = expected(*(leaf[row, begin:end] for leaf in tokens), initial)
            np.testing.assert_allclose(reads[row, begin:end], wanted, rtol=1e-10, atol=1e-10)


def test_a_later_token_changes_no_earlier_read():
    _, x, *tokens = drawn()
    before = run(x, *tokens, start())[0]
    changed = [leaf.copy() for leaf in (x, *tokens)]
    for leaf in changed:
        leaf[:, 6] *= -2.0
    after = run(*changed, start())[0]
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).all()


def test_the_gradient_is_the_finite_difference():
    """Of everything: parameters, the token's input, queries, keys, values."""
    generator = np.random.default_rng(3)
    weigh = generator.normal(size=(BATCH, TIME, HEADS, WIDTH))
    with jax.enable_x64(True):
        program = jax.jit(jax.value_and_grad(lambda point: jnp.sum(answer(*point, start())[0] * weigh)))
        point = jax.tree.map(jnp.asarray, drawn())
        assert_slope_is_the_difference(program, point, generator)


def test_a_memory_that_is_not_written_leaves_the_skip():
    with jax.enable_x64(True):
        layer = jax.jit(lambda: NeuralMemory(CONFIG, rngs=nnx.Rngs(0)))()
        layer.writes = False
        x = jnp.asarray(drawn()[1])
        layer.rotation.skip[...] = jnp.asarray([0.5, -2.0])

        def read(layer, x):
            state = layer.init_state(BATCH)
            return layer.memorize(x, state)[0].reads, layer.value(x, state.tails["value"])[0]

        reads, values = jax.jit(read)(layer, x)
        np.testing.assert_allclose(reads, np.array([0.5, -2.0])[:, None] * np.asarray(values), rtol=1e-12)


def test_heads_without_a_pair_to_turn_are_refused():
    model = ModelConfig(dim=4, num_heads=2, head_dim=2, memory=MemoryConfig(preset="mamba3"))
    with pytest.raises(ConfigError, match=r"^model\.head_dim is 2; use 4 or more, as mamba3 turns pairs"):
        validate(Config(model=model))
