"""Small models in float64 and the compiled functions that all tests of this folder share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from titans_jax.config import MemoryConfig, ModelConfig, memory_rule
from titans_jax.models import LanguageModel

SHARED = {"step_unit": "error", "max_step_size": 2.0}
"""Memory whose tokens share their steps."""
KINDS = ("lmm", "mac", "mag", "mal", "attention", "window", "retrofit", "mamba", "samba")
CHUNK, SEGMENT, WINDOW, TIME, VOCAB, MAX_LENGTH = 4, 8, 6, 19, 32, 32


def config(*pattern, memory=None, **fields):
    """Two heads of 8, depth 2; every border falls inside TIME tokens. The step sizes' unit is the one that is not
    measured, which would be compiled for every rule."""
    memory = {"chunk_size": CHUNK, "expansion": 2, "step_unit": "head_dim", "max_step_size": 0.1} | (memory or {})
    memory = MemoryConfig(**memory)
    defaults = {
        "dim": 16,
        "depth": 2,
        "num_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "hidden_dim": 24,
        "segment": SEGMENT,
        "window": WINDOW,
        "num_persistent": 3,
        "dtype": "float64",
    }
    return ModelConfig(pattern=pattern, memory=memory, **defaults | fields)


@functools.cache
def build(config, seed=4):
    """A model with random parameters, none at a start value where gradients or terms vanish. Drawn by numpy, because
    compiling an initialiser is dearer than all else here. The seed is one at which the model is well conditioned: a
    memory behind a norm can be drawn next to a singular point, where gradients are a thousand times larger (seed 0).
    """
    rng = np.random.default_rng(seed)
    matrices = 1 if config.memory.shared_gates else len(memory_rule(config.memory).shapes(config.head_dim))
    titans = config.memory.preset == "titans" and config.memory.bias is None

    def draw(path, leaf):
        if path[-3:-1] == ("memory", "gates") and titans:
            # [..., heads, gate of each matrix], drawn gate by gate.
            *front, heads, width = leaf.shape
            noise = rng.normal(size=(*front, width // matrices, heads, matrices))
            noise = np.moveaxis(noise, -2, -3).reshape(leaf.shape)
            # Little forgetting: under much of it a memory behind a norm is chaotic, and float32 has nothing to say.
            center = np.repeat([-6.0, 0.0, 0.5], matrices)[:width] if path[-1] == "bias" else 0.0
            return jnp.asarray(center + 0.3 * noise, leaf.dtype)
        center = 1.0 if path[-1] in ("scale", "norm_scale") else 0.0
        return jnp.asarray(center + 0.3 * rng.normal(size=leaf.shape), leaf.dtype)

    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))
    leaves = {path: leaf.replace(draw(path, leaf)) for path, leaf in nnx.to_flat_state(abstract)}
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))


def tokens(batch=2, time=TIME, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, (batch, time)), jnp.int32)


forward = jax.jit(lambda model, tokens: model(tokens))
forward_packed = jax.jit(lambda model, tokens, segment_ids: model(tokens, segment_ids))
extend = jax.jit(lambda model, tokens, state: model.extend(tokens, state))
init_state = jax.jit(lambda model, batch: model.init_state(batch, MAX_LENGTH), static_argnums=1)


def params_by_path(model):
    """{path: numpy array}, as the oracle reads them."""
    return {path: np.array(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}
