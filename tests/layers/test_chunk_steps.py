"""The layer of a memory that steps by chunks: what its gates are, and that a fresh model is calm."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from titans_jax.config import ConfigError, MemoryConfig, ModelConfig, gate_choices, memory_rule, step_size_bound
from titans_jax.layers import NeuralMemory
from titans_jax.memory import algorithms
from titans_jax.models import LanguageModel

TIME = 64


def config(preset, **memory):
    memory = MemoryConfig(preset=preset, expansion=2, chunk_size=16, **memory)
    return ModelConfig(
        pattern=("lmm",), dim=32, depth=1, num_heads=2, head_dim=16, vocab_size=64, num_persistent=0, dtype="float32",
        remat="none", memory=memory,
    )  # fmt: skip


def test_steps_are_neither_shared_nor_shared_out():
    """One orthogonal step is as large whatever it sums: near keys of a chunk, and a token in all of its window."""
    model = config("atlas")
    layer = jax.jit(lambda: NeuralMemory(model, rngs=nnx.Rngs(0)))()
    assert not layer.shares_steps and "steps" not in layer.start().tails
    x, keys = jax.random.normal(jax.random.key(0), (2, 1, TIME, 32))
    heads = keys.reshape(1, TIME, 2, 16)
    gates = layer.gates(x, heads, heads)[2]
    np.testing.assert_allclose(np.mean(gates.step_size) / step_size_bound(model), 0.12, atol=0.03)
    assert gates.window_weight.shape == (1, TIME, 2, 15)


def test_a_configuration_says_what_it_can():
    rule = memory_rule(MemoryConfig(preset="atlas", chunk_size=8))
    assert rule.algorithm == algorithms.muon(8) and rule.forget_to_start
    assert memory_rule(MemoryConfig(preset="dla", omega_window=4)).algorithm == algorithms.omega(4)
    with pytest.raises(ConfigError, match="momentum is False; the algorithm of atlas, Muon.*, always has momentum"):
        memory_rule(MemoryConfig(preset="atlas", momentum=False))
    with pytest.raises(ConfigError, match=r"use None, as lact weighs whole tokens$"):
        gate_choices(MemoryConfig(preset="lact", channel_retention="key"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", ["atlas", "lact"])
def test_a_fresh_model_is_calm_and_writes(preset):
    """The first loss is that of a uniform guess, and its gradient is small, on any text and on one byte for ever; the
    memory has moved by a share of its start, not by many times it."""
    model = jax.jit(lambda: LanguageModel(config(preset), rngs=nnx.Rngs(0)))()
    tokens = np.random.default_rng(0).integers(0, 64, (1, 4 * TIME))

    @jax.jit
    def first(model, tokens):
        def loss(model):
            logits, report = model(tokens, return_diagnostics=True)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
            return jnp.mean(loss), report

        (found, report), gradient = jax.value_and_grad(loss, has_aux=True)(model)
        return found, optax.tree.norm(gradient), report

    for text, largest in ((tokens, 2), (np.full_like(tokens, 7), 12)):
        found, gradient, report = first(model, jnp.asarray(text, jnp.int32))
        assert found == pytest.approx(np.log(64), abs=0.1) and gradient < largest
        moved = np.mean(report["update_norm"]) / np.mean(report["weight_norm"])
        assert 0.05 < moved < 3
