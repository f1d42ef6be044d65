"""Memory layers of width 8 with drawn parameters, in float64: whole rows behind persistent tokens, and in pieces."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from titans_jax.layers import memory_layer

DIM = 8
PERSISTENT = np.random.default_rng(3).normal(size=(3, DIM))


def with_memory(config, **fields):
    return dataclasses.replace(config, memory=dataclasses.replace(config.memory, **fields))


@functools.cache
def layer_of(config):
    """A layer whose parameters, scores of caches and scales of levels too, are large enough to tell."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: memory_layer(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(1)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape)), params))


def inputs(batch, time, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, time, DIM)))


@jax.jit
def run(layer, x):
    """y, the state after x, and a report."""
    return layer(x, persistent=jnp.asarray(PERSISTENT))


def row(layer, x):
    return run(layer, x)[0]


@functools.partial(jax.jit, static_argnums=(1, 2))
def init_state(layer, batch, max_length=None):
    return layer.init_state(batch, jnp.asarray(PERSISTENT), max_length)


@jax.jit
def read_on(layer, x, state):
    return layer(x, state)[:2]


def in_pieces(layer, x, pieces, state):
    """Reads of x from a state on, so many tokens at a time, and the state after it."""
    reads, begin = [], 0
    for size in pieces:
        y, state = read_on(layer, x[:, begin : begin + size], state)
        reads.append(y)
        begin += size
    return jnp.concatenate(reads, axis=1), state


def close_to(found, expected, tolerance=1e-10):
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def kinds(state):
    """Shape and dtype of every array."""
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
