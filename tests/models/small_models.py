"""Small models in float64 and the compiled functions that all tests of this folder share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from titans_jax.config import MemoryConfig, ModelConfig
from titans_jax.models import LanguageModel

KINDS = ("lmm", "mac", "mag", "mal", "attention", "window")
CHUNK, SEGMENT, WINDOW, TIME, VOCAB, MAX_LENGTH = 4, 8, 6, 19, 32, 32


def config(*pattern, memory=None, **fields):
    """Two heads of 8, depth 2; every border falls inside TIME tokens."""
    memory = MemoryConfig(**{"chunk_size": CHUNK, "expansion": 2} | (memory or {}))
    defaults = {"dim": 16, "depth": 2, "num_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "hidden_dim": 24,
                "segment": SEGMENT, "window": WINDOW, "num_persistent": 3, "dtype": "float64"}
    return ModelConfig(pattern=pattern, memory=memory, **defaults | fields)


@functools.cache
def build(config, seed=0):
    """A model whose parameters are all away from their start values, where some gradients would vanish."""
    model = jax.jit(lambda: LanguageModel(config, rngs=nnx.Rngs(seed)))()
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype), model)


def tokens(batch=2, time=TIME, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, (batch, time)), jnp.int32)


forward = jax.jit(lambda model, tokens: model(tokens))
forward_packed = jax.jit(lambda model, tokens, segment_ids: model(tokens, segment_ids))
extend = jax.jit(lambda model, tokens, state: model.extend(tokens, state))
init_state = jax.jit(lambda model, batch: model.init_state(batch, MAX_LENGTH), static_argnums=1)


@jax.jit
def gradients(model, tokens, weights):
    return jax.grad(lambda model: jnp.sum(model(tokens) * weights))(model)


def params_by_path(model):
    """{path: numpy array}, as the oracle reads them."""
    return {path: np.array(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}
