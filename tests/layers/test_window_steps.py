"""The steps of a layer whose memory has a window: all that a token writes together is one step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from titans_jax.config import MemoryConfig, ModelConfig, step_size_bound
from titans_jax.layers import NeuralMemory
from titans_jax.models import LanguageModel

TIME, WINDOW = 64, 8


def config(**memory):
    memory = MemoryConfig(expansion=2, chunk_size=16, **memory)
    return ModelConfig(
        pattern=("lmm",), dim=32, depth=1, num_heads=2, head_dim=16, vocab_size=64, num_persistent=0, dtype="float32",
        remat="none", memory=memory,
    )  # fmt: skip


def test_what_a_token_writes_in_its_whole_window_is_one_step():
    """With the weights that later tokens really give it; and the shares that near keys are told are of all of it."""
    model = config(preset="omeganet", omega_window=WINDOW)
    layer = jax.jit(lambda: NeuralMemory(model, rngs=nnx.Rngs(0)))()
    x, keys = jax.random.normal(jax.random.key(0), (2, 1, TIME, 32))
    heads = keys.reshape(1, TIME, 2, 16)
    gates = layer.gates(x, heads, heads)[2]
    step, weights = np.asarray(gates.step_size), np.asarray(gates.window_weight)
    assert weights.shape == (1, TIME, 2, WINDOW - 1) and np.all((weights >= 0) & (weights <= 1))
    whole = np.asarray(layer.gates.step_size(layer.gates.logits(x), heads.shape[:3]))
    assert np.all(np.abs(whole / step_size_bound(model) - 0.5) < 0.25)
    written = step.copy()
    for j in range(1, WINDOW):
        written[:, :-j] += weights[:, j:, :, j - 1, None] * step[:, :-j]
    found = written[:, : 1 - WINDOW] / whole[:, : 1 - WINDOW]
    assert found.mean() == pytest.approx(1, abs=0.02) and np.abs(found - 1).max() < 0.25
    assert step.max() < 0.7 * whole.max()  # what it writes at once is about half
    shares = whole.mean(axis=-1) / step_size_bound(model) * model.memory.max_step_size
    np.testing.assert_allclose(layer.gates.error_shares(gates), shares, rtol=1e-5)


POLYNOMIAL = pytest.param("polynomial_mlp(degree=2)", marks=[pytest.mark.slow, pytest.mark.exhaustive])


@pytest.mark.parametrize("architecture", [None, POLYNOMIAL])
def test_a_fresh_model_is_calm(architecture):
    """The first loss is that of a uniform guess, and its gradient is small, on any text and on one byte for ever."""
    memory = {"preset": "omeganet", "architecture": architecture}
    model = jax.jit(lambda: LanguageModel(config(**memory), rngs=nnx.Rngs(0)))()
    tokens = np.random.default_rng(0).integers(0, 64, (1, 4 * TIME))

    @jax.jit
    def first(model, tokens):
        def loss(model):
            logits = model(tokens)
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]))

        found, gradient = jax.value_and_grad(loss)(model)
        return found, optax.tree.norm(gradient)

    for text, largest in ((tokens, 1), (np.full_like(tokens, 7), 12)):
        found, gradient = first(model, jnp.asarray(text, jnp.int32))
        assert found == pytest.approx(np.log(64), abs=0.1) and gradient < largest
