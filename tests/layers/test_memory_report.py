"""The report of a memory layer: known shares of known memories, norms of the weights that are read, no cost unasked."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from titans_jax import memory
from titans_jax.config import MemoryConfig, ModelConfig, memory_rule
from titans_jax.layers import NeuralMemory, neural_memory
from titans_jax.layers.memory_report import constant_loss, explained_share, has_least_loss, memory_report

BATCH, TIME, HEADS, WIDTH = 2, 6, 3, 4
LINEAR = memory_rule(MemoryConfig(preset="deltanet"))
DEEP = memory_rule(MemoryConfig(depth=2, expansion=2, chunk_size=4))
CONFIG = ModelConfig(dim=8, num_heads=2, head_dim=4, depth=1, dtype="float32", memory=MemoryConfig(chunk_size=4))


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def params_of(rule, heads=HEADS):
    keys = jax.random.split(jax.random.key(0), heads)
    return jax.vmap(lambda key: memory.init_params(rule, key, WIDTH))(keys)


def gates_of(rule, mask=None):
    one = jnp.zeros((BATCH, TIME, HEADS, 1))
    return memory.Gates(one, one if rule.algorithm.has_momentum else None, one + 0.5, mask)


def report_of(rule, values, loss, weights=None, mask=None):
    params = params_of(rule)
    carried = jax.vmap(lambda params: memory.init_state(rule, params).weights)(params)
    carried = [jnp.broadcast_to(matrix, (BATCH, *matrix.shape)) for matrix in carried]
    weights = tuple(carried) if weights is None else weights(carried)
    surprise = memory.Surprise(loss, loss)
    return memory_report(rule, params, gates_of(rule, mask), values, surprise, weights)


def share(report, where=None):
    return float(explained_share(*(jnp.mean(report[name], where=where) for name in ("inner_loss", "constant_loss"))))


def test_a_constant_read_explains_nothing_and_knowing_the_values_everything():
    values = normal(0, BATCH, TIME, HEADS, WIDTH)
    mean = jnp.broadcast_to(values.mean(axis=1, keepdims=True), values.shape)
    assert share(report_of(LINEAR, values, LINEAR.bias(mean, values))) == pytest.approx(0, abs=1e-6)
    assert share(report_of(LINEAR, values, LINEAR.bias(values, values))) == 1
    halfway = LINEAR.bias((mean + values) / 2, values)  # half the error is a quarter of the squared error
    assert share(report_of(LINEAR, values, halfway)) == pytest.approx(0.75)
    assert share(report_of(LINEAR, values, LINEAR.bias(3 * mean - 2 * values, values))) < 0


def test_padding_changes_nothing():
    values, shorter = normal(0, BATCH, TIME, HEADS, WIDTH), 4
    mask = jnp.broadcast_to((jnp.arange(TIME) < shorter)[None], (BATCH, TIME))
    junk = jnp.where(mask[:, :, None, None], values, 100.0)
    padded = constant_loss(LINEAR, gates_of(LINEAR, mask), junk)
    cut = dataclasses.replace(gates_of(LINEAR), step_size=jnp.zeros((BATCH, shorter, HEADS, 1)))
    np.testing.assert_allclose(padded[:, :shorter], constant_loss(LINEAR, cut, values[:, :shorter]), rtol=1e-5)


def test_only_losses_with_a_least_value_have_a_share():
    without = {"retnet", "linear_attention", "dfw", "lightning_attention", "gla", "mamba2", "hgrn2", "rwkv7", "mesa"}
    presets = {"deltanet", "titans", "moneta", "yaad", "memora", "ttt_mlp", "gated_deltanet", "longhorn", *without}
    rules = {name: memory_rule(MemoryConfig(preset=name)) for name in presets & memory.presets.PRESETS.keys()}
    assert {name for name, rule in rules.items() if not has_least_loss(rule)} == without & rules.keys()
    report = report_of(memory_rule(MemoryConfig(preset="retnet")), normal(0, BATCH, TIME, HEADS, WIDTH),
                       jnp.zeros((BATCH, TIME, HEADS)))  # fmt: skip
    assert "constant_loss" not in report


@pytest.mark.parametrize("forget_to", ["zero", "start"])
def test_norms_are_of_the_weights_that_are_read_and_of_what_moved(forget_to):
    rule = memory_rule(MemoryConfig(depth=2, expansion=2, chunk_size=4, forget_to=forget_to))
    values, loss = normal(0, BATCH, TIME, HEADS, WIDTH), jnp.ones((BATCH, TIME, HEADS))
    start = params_of(rule)["weights"]
    norm = lambda matrices: np.sqrt(sum(np.square(w).sum((-2, -1)) for w in matrices)).mean()  # noqa: E731
    still = report_of(rule, values, loss)
    np.testing.assert_array_equal(still["update_norm"], 0)
    np.testing.assert_allclose(still["weight_norm"], norm(start), rtol=1e-5)
    moved = report_of(rule, values, loss, weights=lambda carried: tuple(w + 0.1 for w in carried))
    np.testing.assert_allclose(moved["update_norm"], norm([0.1 * np.ones_like(w) for w in start]), rtol=1e-4)
    np.testing.assert_allclose(moved["weight_norm"], norm([w + 0.1 for w in start]), rtol=1e-5)
    assert moved["update_norm"].shape == (BATCH, TIME) and moved["weight_norm"].shape == (BATCH,)


@functools.cache
def layer_of(preset):
    config = dataclasses.replace(CONFIG, memory=MemoryConfig(preset=preset, chunk_size=4, gate_rank=2))
    return jax.jit(lambda: NeuralMemory(config, rngs=nnx.Rngs(0)))()


@pytest.mark.slow_but_for("yaad")
@pytest.mark.parametrize("preset", ["yaad", "delta_product", "memora", "rwkv7", "titans"])
def test_a_layer_reports_finite_numbers(preset):
    """With a number of the bias per channel, and with two steps a token."""
    *_, report = jax.jit(lambda layer, x: layer(x))(layer_of(preset), normal(1, 2, 9, 8))
    assert all(np.isfinite(value).all() for value in report.values())
    assert ("constant_loss" in report) is (preset != "rwkv7")
    assert (report["update_norm"] > 0).all()


def test_a_report_that_nobody_asks_for_costs_nothing(monkeypatch):
    """Operations of a compiled gradient with the report, without one and unable to make one: the compiler drops it."""
    layer, x = layer_of("ttt_linear"), normal(1, 2, 9, 8)

    def operations(measure):
        def loss(layer, x):
            y, _, report = layer(x)
            return jnp.sum(y), report if measure else ()

        compiled = jax.jit(jax.grad(loss, has_aux=True)).lower(layer, x).compile()
        return compiled.cost_analysis()["flops"]

    asked, unasked = operations(True), operations(False)
    monkeypatch.setattr(neural_memory, "memory_report", lambda *_: {})
    assert operations(False) == unasked < asked
