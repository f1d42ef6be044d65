"""What blocks write into their memories: keys that tell tokens apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from titans_jax.config import MemoryConfig, ModelConfig
from titans_jax.layers.neural_memory import NeuralMemory
from titans_jax.models import LanguageModel

BLOCKS = ("lmm", "mac", "mag", "mal", "retrofit")


def model(block, preset="titans", **fields):
    shape = {"dim": 64, "depth": 1, "num_heads": 2, "head_dim": 32, "segment": 32, "window": 32, "num_persistent": 4}
    memory = MemoryConfig(preset=preset, expansion=2, chunk_size=16)
    return ModelConfig(pattern=(block,), dtype="float32", remat="none", memory=memory, **shape | fields)


def written_keys(config, tokens, monkeypatch):
    """[batch, time, heads, head_dim] of the last layer's memory."""
    found, plain = [], NeuralMemory._memorize

    def record(self, state, inputs, start):
        jax.debug.callback(lambda keys: found.append(np.array(keys)), inputs.keys)
        return plain(self, state, inputs, start)

    monkeypatch.setattr(NeuralMemory, "_memorize", record)
    jax.block_until_ready(jax.jit(LanguageModel(config, rngs=nnx.Rngs(0)).__call__)(tokens))
    jax.effects_barrier()
    return np.concatenate([keys for keys in found if keys.shape[:2] == (1, 32)], axis=1)


@pytest.mark.slow_but_for("mac")
@pytest.mark.parametrize("block", BLOCKS)
def test_keys_of_a_new_model_tell_tokens_apart(block, monkeypatch):
    """The mean cosine between two keys of one head, of 32 random tokens, is at most 0.3."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (1, 32)), jnp.int32)
    keys = written_keys(model(block), tokens, monkeypatch)
    cosines = np.einsum("bthd,bshd->bhts", keys, keys)
    time = keys.shape[1]
    mean = (cosines.sum(axis=(2, 3)) - time) / (time * (time - 1))
    assert np.abs(mean).max() < 0.3
