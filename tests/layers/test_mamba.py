"""The Mamba layer: against a loop, what it starts with, documents, pieces, and precision."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from slopes import assert_slope_is_the_difference

from titans_jax.config import ModelConfig
from titans_jax.layers import Mamba
from titans_jax.layers import mamba as module
from titans_jax.layers.document_layout import find_documents
from titans_jax.ops import backend, selective_scan

CONFIG = ModelConfig(pattern=("mamba",), dim=12, depth=1, num_heads=2, head_dim=6, conv_size=3, dtype="float64")
TIME = 23


@functools.cache
def drawn_layer(config=CONFIG):
    """A layer with random parameters."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Mamba(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(1)
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), params))


@functools.cache
def fresh_layer(config):
    return jax.jit(lambda: Mamba(config, rngs=nnx.Rngs(0)))()


def inputs(batch=2, time=TIME, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(0).normal(size=(batch, time, CONFIG.dim)), dtype)


row = jax.jit(lambda layer, x: layer(x)[0])
read_on = jax.jit(lambda layer, x, state: layer(x, state))
packed = jax.jit(lambda layer, x, ids: layer(x, documents=find_documents(ids))[0])


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def chunks_of_four(monkeypatch):
    """Rows of TIME tokens are six chunks."""
    monkeypatch.setattr(selective_scan, "CHUNK", 4)
    jax.clear_caches()
    yield
    jax.clear_caches()


def silu(x):
    return x / (1 + np.exp(-x))


def loop(layer, x):
    """One row [time, dim], token by token, with the public code's names: in_proj, conv1d, x_proj, dt_proj, A, D."""
    p = {"/".join(map(str, path)): np.array(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(layer))}
    inner, rank = 2 * x.shape[1], p["step/kernel"].shape[0]
    ssm, window, outputs = np.zeros((inner, 16)), [np.zeros(inner)] * len(p["convolution/kernel"]), []
    a = -np.exp(p["log_rate"].T)
    for token in x:
        window = [token @ p["input/kernel"], *window[:-1]]
        u = silu(
            sum(tap * past for tap, past in zip(p["convolution/kernel"], window, strict=True)) + p["convolution/bias"]
        )
        found = u @ p["selection/kernel"]
        dt, b, c = found[:rank], found[rank : rank + 16], found[rank + 16 :]
        dt = np.log1p(np.exp(dt @ p["step/kernel"] + p["step_bias"]))
        ssm = np.exp(dt[:, None] * a) * ssm + (dt * u)[:, None] * b[None]
        y = ssm @ c + p["skip"] * u
        outputs.append((y * silu(token @ p["output_gate/kernel"])) @ p["output/kernel"])
    return np.stack(outputs)


def assert_close(found, expected, tolerance=1e-10):
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def test_equals_the_loop():
    layer, x = drawn_layer(), inputs()
    assert_close(row(layer, x), np.stack([loop(layer, np.array(one)) for one in x]))


def test_equals_the_loop_over_chunks_of_any_backend(chunks_of_four, monkeypatch):
    layer, x = drawn_layer(), inputs()
    expected = np.stack([loop(layer, np.array(one)) for one in x])
    for one in (backend.CPU, backend.TPU):
        monkeypatch.setattr(module, "current_backend", lambda one=one: one)
        assert_close(jax.jit(lambda layer, x: layer(x)[0])(layer, x), expected)


def test_pieces_equal_the_whole(chunks_of_four):
    layer, x = drawn_layer(), inputs()
    state, found, begin = layer.init_state(2), [], 0
    kinds = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    for size in (1, 2, 9, 1, 10):
        y, state = read_on(layer, x[:, begin : begin + size], state)
        found.append(y)
        begin += size
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == kinds
    assert begin == TIME
    assert_close(jnp.concatenate(found, axis=1), row(layer, x))


def test_documents_keep_to_themselves(chunks_of_four):
    """Wherever they begin, one of them of one token, with padding between and behind."""
    layer, x = drawn_layer(), inputs(batch=1)
    ids = jnp.asarray([1] * 6 + [0] * 3 + [2] + [3] * 9 + [0] * 4, jnp.int32)[None]
    found = packed(layer, x, ids)
    for begin, end in ((0, 6), (9, 10), (10, 19)):
        assert_close(found[0, begin:end], loop(layer, np.array(x[0, begin:end])))
    changed = packed(layer, x.at[:, 6:9].add(1.0), ids)
    np.testing.assert_array_equal(changed[ids > 0], found[ids > 0])


def test_the_gradient_is_the_difference_of_losses(chunks_of_four):
    """By all parameters and the inputs, each of which has one."""
    graphdef, params = nnx.split(drawn_layer())
    loss = jax.jit(jax.value_and_grad(lambda point: jnp.sum(jnp.sin(nnx.merge(graphdef, point[0])(point[1])[0]))))
    point = (params, inputs(batch=1))
    assert_slope_is_the_difference(loss, point, np.random.default_rng(5))
    for path, leaf in jax.tree.leaves_with_path(loss(point)[1]):
        assert np.isfinite(leaf).all() and np.any(leaf != 0), jax.tree_util.keystr(path)


def test_sizes_and_starts_are_those_of_the_public_code():
    """Twice the width; 16 entries that decay at rates of 1 to 16; steps between 0.001 and 0.1, made of a 16th of the
    width, rounded up."""
    layer = fresh_layer(dataclasses.replace(CONFIG, dim=200, num_heads=2, head_dim=100, dtype="float32"))
    assert layer.step.kernel[...].shape == (13, 400) and layer.selection.kernel[...].shape == (400, 13 + 32)
    np.testing.assert_allclose(jnp.exp(layer.log_rate[...]), np.arange(1, 17)[:, None] * np.ones((1, 400)), rtol=1e-6)
    steps = np.log(jax.nn.softplus(layer.step_bias[...]))
    assert np.log(0.001) - 1e-3 <= steps.min() < np.log(0.0012) and np.log(0.08) < steps.max() <= np.log(0.1) + 1e-3
    assert abs(np.mean(steps) - np.log(0.01)) < 0.15  # evenly by the logarithm
    most = np.abs(layer.step.kernel[...]).max()
    assert 0.98 * 13**-0.5 < most <= 13**-0.5
    np.testing.assert_allclose(np.std(layer.step.kernel[...]), (3 * 13) ** -0.5, rtol=0.03)
    assert (layer.skip[...] == 1).all() and (layer.convolution.bias[...] == 0).all()


def test_half_precision_keeps_the_state_and_the_steps_wide():
    layer = fresh_layer(dataclasses.replace(CONFIG, dtype="bfloat16"))
    y, state = jax.jit(lambda layer, x: layer(x))(layer, inputs(dtype=jnp.bfloat16))
    assert (y.dtype, state.hidden.dtype, state.tail.dtype) == (jnp.bfloat16, jnp.float32, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(layer)} == {jnp.dtype("float32")}
    # Where a token says nothing, a step of 0.001 is not rounded to bfloat16's next number.
    still = jax.tree.map(lambda leaf: leaf, layer)
    still.step.kernel[...] = jnp.zeros_like(still.step.kernel[...])
    still.log_rate[...] = jnp.zeros_like(still.log_rate[...])
    before = state._replace(hidden=jnp.ones_like(state.hidden), tail=jnp.zeros_like(state.tail))
    _, after = read_on(still, jnp.zeros((2, 1, CONFIG.dim), jnp.bfloat16), before)
    step = -np.log(np.array(after.hidden[0, 0], np.float64))
    np.testing.assert_allclose(step, np.log1p(np.exp(np.array(layer.step_bias[...], np.float64))), rtol=1e-3)
