"""The gate of a memory's output that sees how well the last reads predicted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from titans_jax.config import ConfigError, MemoryConfig, ModelConfig, gates_predictions
from titans_jax.layers import NeuralMemory
from titans_jax.layers.document_layout import find_documents
from titans_jax.layers.prediction_gate import LAGS, PredictionGate

CONFIG = ModelConfig(dim=16, num_heads=2, head_dim=8, memory=MemoryConfig(expansion=2, chunk_size=4), dtype="float32")
ROWS, TIME = 2, 13


@pytest.fixture(scope="module")
def gate():
    return PredictionGate(CONFIG, rngs=nnx.Rngs(0))


def drawn(seed=0):
    return np.random.default_rng(seed).normal(size=(2, ROWS, TIME, 2, 8)).astype(np.float32)


def tail(gate, rows=ROWS):
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (rows, *leaf.shape)), gate.start())


def cosines(reads, values):
    """[b, t, lags, h] in numpy: of the read of one token before with the value, and of those before it."""
    before = np.concatenate([np.zeros_like(reads[:, :1]), reads[:, :-1]], axis=1)
    sizes = np.linalg.norm(before, axis=-1) * np.linalg.norm(values, axis=-1)
    hits = np.sum(before * values, axis=-1) / np.where(sizes == 0, 1, sizes)
    late = [np.pad(hits, ((0, 0), (lag, 0), (0, 0)))[:, : hits.shape[1]] for lag in range(LAGS)]
    return np.stack(late, axis=-2)


def test_hits_are_cosines_of_the_read_before_with_the_value(gate):
    reads, values = drawn()
    found, _ = gate.hits(reads, values, tail(gate))
    np.testing.assert_allclose(found, cosines(reads, values), rtol=1e-4, atol=1e-6)
    scaled, _ = gate.hits(3 * reads, 5 * values, tail(gate))
    np.testing.assert_allclose(scaled, found, rtol=1e-4, atol=1e-6)
    same, _ = gate.hits(reads, np.roll(reads, 1, axis=1), tail(gate))
    np.testing.assert_allclose(same[:, 1:, 0], 1, rtol=1e-5)


@pytest.mark.parametrize("cut", [1, 3, 12])
def test_they_go_on_from_a_tail(gate, cut):
    reads, values = drawn()
    whole, last = gate.hits(reads, values, tail(gate))
    first, middle = gate.hits(reads[:, :cut], values[:, :cut], tail(gate))
    second, end = gate.hits(reads[:, cut:], values[:, cut:], middle)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, rtol=1e-6, atol=1e-7)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), end, last)


def test_documents_see_none_of_each_other(gate):
    reads, values = drawn()
    documents = find_documents(jnp.asarray([[1] * 5 + [2] * 8, [1] * 5 + [2] * 3 + [3] * 5], jnp.int32))
    found, _ = gate.hits(reads, values, tail(gate), documents, gate.start())
    for row, borders in enumerate([(0, 5, TIME), (0, 5, 8, TIME)]):
        for begin, end in zip(borders[:-1], borders[1:], strict=True):
            part = slice(row, row + 1), slice(begin, end)
            np.testing.assert_allclose(found[part], cosines(reads[part], values[part]), rtol=1e-4, atol=1e-6)


def test_a_kernel_of_zeros_is_no_gate(gate):
    """How training begins."""
    reads, values = drawn()
    hits, _ = gate.hits(reads, values, tail(gate))
    assert gate.kernel.shape == (LAGS, 2, 8) and not np.any(gate(hits))


def test_a_text_that_was_read_before_is_predicted():
    """By a fresh layer, whose hits are on average above 0 in the second reading of a text and 0 in the first."""
    config = ModelConfig(
        dim=64, num_heads=2, head_dim=32, memory=MemoryConfig(expansion=2, chunk_size=4, forget_bias=-9.0)
    )
    layer = NeuralMemory(config, rngs=nnx.Rngs(0))
    text = np.random.default_rng(1).normal(size=(4, 24, 64)).astype(np.float32)
    x = jnp.asarray(np.concatenate([text, text], axis=1))
    (_, hits), _, _ = jax.jit(lambda layer, x: layer.memorize(x, layer.init_state(len(x))))(layer, x)
    first, second = np.asarray(hits[:, 4:24, 0, 0], np.float32), np.asarray(hits[:, 28:, 0, 0], np.float32)
    assert second.mean() > 0.2 and abs(first.mean()) < 0.1


def test_which_memories_have_it():
    """Those whose keys are the queries of one token before."""
    assert gates_predictions(MemoryConfig()) and gates_predictions(MemoryConfig(preset="yaad"))
    assert not gates_predictions(MemoryConfig(prediction_gate=False))
    assert not gates_predictions(MemoryConfig(tie_keys=False)) and not gates_predictions(MemoryConfig(preset="gla"))
    assert gates_predictions(MemoryConfig(preset="gated_deltanet", tie_keys=True, value_skip=True))
    for memory in (
        MemoryConfig(tie_keys=False, prediction_gate=True),
        MemoryConfig(preset="mamba3", prediction_gate=True),
    ):
        with pytest.raises(ConfigError, match="model.memory.prediction_gate is True, and without tied keys reads"):
            gates_predictions(memory)
    turned = MemoryConfig(preset="mamba3", tie_keys=True)
    assert not gates_predictions(turned)
    with pytest.raises(ConfigError, match="with keys that turn, as those of mamba3, reads predict nothing; use False"):
        gates_predictions(dataclasses.replace(turned, prediction_gate=True))
