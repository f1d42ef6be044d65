"""Steps that shrink where the memory's norm is steep: the oracle's numbers, and stable for one key for ever."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from flax import nnx

from titans_jax import memory
from titans_jax.config import MemoryConfig, ModelConfig
from titans_jax.layers import NeuralMemory
from titans_jax.memory.rule import architectures, retentions

TIME, HEAD_DIM, CHUNK = 11, 6, 4
presets = memory.presets
RULE = dataclasses.replace(
    presets.titans(expansion=2, chunk_size=CHUNK), forget_to_start=True, bound_slope=True
)  # test_forget_to_start has the others


def draw(scale):
    """float64 (params, queries, keys, values, gates), the last matrix of the start times `scale`."""
    generator = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), memory.init_params(RULE, jax.random.key(0), HEAD_DIM))
    params["weights"] = (*params["weights"][:-1], scale * params["weights"][-1])
    queries, keys, values = (jnp.asarray(generator.normal(size=(TIME, HEAD_DIM))) for _ in range(3))
    keys = keys / jnp.linalg.norm(keys, axis=1, keepdims=True)
    steps = jnp.asarray(generator.uniform(0.005, 0.02, (TIME, 2)))
    gates = memory.Gates.from_values(jnp.full((TIME, 2), 0.1), jnp.full((TIME, 2), 0.6), steps)
    return params, queries, keys, values, gates


@functools.partial(jax.jit, static_argnums=0)
def reads(rule, params, queries, keys, values, gates):
    return memory.memorize(rule, params, memory.init_state(rule, params), queries, keys, values, gates, "chunked")[0]


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_is_the_oracle_s(scale):
    """Where the start is small (every step is smaller), as it is, and large (no step is)."""
    with jax.enable_x64(True):
        params, *tokens, gates = draw(scale)
        found = reads(RULE, params, *tokens, gates)
        plain = reads(dataclasses.replace(RULE, bound_slope=False), params, *tokens, gates)
        slow = {"weights": [np.asarray(w) for w in params["weights"]], "norm_scale": np.asarray(params["norm_scale"])}
        values = (1 - np.exp(gates.log_retention), np.exp(gates.log_momentum), np.asarray(gates.step_size))
        published = oracle.Rule("residual_mlp", "l2", True, CHUNK, forget_to_start=True, bound_slope=True)
        expected, *_ = oracle.memorize(published, slow, oracle.start(slow), *map(np.asarray, tokens), *values)
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
        assert (np.abs(found - plain).max() < 1e-12) == (scale == 3.0)


@pytest.mark.parametrize(("depth", "expansion"), [(1, 4), (2, 4), (3, 2), ("gated", 2)])
def test_start_variance_is_that_of_fresh_memories(depth, expansion):
    if depth == "gated":
        plain, whole = architectures.gated_mlp(expansion), architectures.residual_gated_mlp(expansion)
    else:
        plain, whole = architectures.mlp(depth, expansion), architectures.residual_mlp(depth, expansion)
    rule = dataclasses.replace(RULE, architecture=whole)
    draws, dim = 4000, 8

    def variance(key):
        params = memory.init_params(rule, key, dim)
        outputs = plain.read(lambda i, x: x @ params["weights"][i], params, jnp.full((dim,), dim**-0.5))
        return jnp.var(outputs)

    found = np.asarray(jax.jit(jax.vmap(variance))(jax.random.split(jax.random.key(0), draws)))
    expected = rule.start_variance(dim)
    assert abs(found.mean() - expected) < 4 * found.std() / draws**0.5


def fresh_variance(rule, plain, head_dim, draws):
    """Variance in front of the norm, the mean over fresh memories and unit keys; plain: the network without it."""

    def variance(key):
        key, start = jax.random.split(key)
        params = memory.init_params(rule, start, head_dim)
        weights = rule.retention.weights(params["weights"], params)
        x = jax.random.normal(key, (head_dim,))
        return jnp.var(plain.read(lambda i, y: y @ weights[i], params, x / jnp.linalg.norm(x)))

    return np.mean(jax.jit(jax.vmap(variance))(jax.random.split(jax.random.key(0), draws)))


def test_start_variance_knows_that_q_3_keeps_a_norm_of_1():
    """Moneta's W = A / ||A||_3: what fresh memories give is near what the rule expects, within what the norms vary."""
    whole, plain, dim = architectures.residual_mlp(2, 4), architectures.mlp(2, 4), 32
    rule = dataclasses.replace(RULE, architecture=whole, retention=retentions.norm_power(3.0))
    assert fresh_variance(rule, plain, dim, 500) == pytest.approx(rule.start_variance(dim), rel=0.05)
    assert rule.start_variance(dim) < 0.05 * dataclasses.replace(rule, retention=RULE.retention).start_variance(dim)


@pytest.mark.parametrize("head_dim, depth", [(16, 2), (64, 2), (64, 1)])
@pytest.mark.parametrize("size", [None, 3.0])
def test_start_variance_of_weights_made_of_logits(head_dim, depth, size):
    """Fresh memories of a softmax, and those that carry its weights, have the variance that the rule expects, but for
    what hidden units have in common, which makes gelu steeper: 11 % for 16 inputs, 1 to 4 % for 64."""
    whole, plain = architectures.residual_mlp(depth, 2), architectures.mlp(depth, 2)
    flat = retentions.kullback_leibler(size), 0.12 if head_dim == 16 else 0.1
    for retention, most in (flat, (retentions.chi_squared(size), 0.1)):
        rule = dataclasses.replace(RULE, architecture=whole, retention=retention)
        assert fresh_variance(rule, plain, head_dim, 1000) == pytest.approx(rule.start_variance(head_dim), rel=most)


def slope_after_one_key(time=2048, **fields):
    """The slope of a layer's weights after so many equal tokens by those at the start."""
    model = ModelConfig(dim=32, num_heads=2, head_dim=16, memory=MemoryConfig(**fields), dtype="float64")
    layer = NeuralMemory(model, rngs=nnx.Rngs(1))
    x = jnp.broadcast_to(jax.random.normal(jax.random.key(1), (32,), jnp.float64), (1, time, 32))
    start = layer.init_state(1)

    def end(weights, x):
        state = start._replace(memory=dataclasses.replace(start.memory, weights=weights, anchor=weights))
        return layer(x, state)[1].memory.weights

    first = start.memory.weights
    by = tuple(jax.random.normal(jax.random.key(2), w.shape, w.dtype) for w in first)
    _, moved = jax.jit(lambda x: jax.jvp(lambda weights: end(weights, x), (first,), (by,)))(x)
    return float(optax.tree.norm(moved) / optax.tree.norm(by))


def test_one_key_for_ever_makes_no_memory_unstable():
    """It grows without end without the bound, where all heads forget alike; with it the start is forgotten, as fast as
    the slowest head forgets."""
    with jax.enable_x64(True):
        for scale_keys in (True, False):
            assert slope_after_one_key(bound_slope=False, forget_bias=-5.0, scale_keys=scale_keys) > 1000
        assert slope_after_one_key(forget_bias=-5.0) < 1e-3
        assert slope_after_one_key() < (1 - 1 / (1 + np.exp(7))) ** 2048


@pytest.mark.parametrize("chunk_size", [1, 4, 16])
@pytest.mark.parametrize("momentum", [True, False])
def test_one_key_for_ever_makes_no_linear_memory_unstable(momentum, chunk_size):
    """Steps that begin at three times the error, and more with momentum, are cut to what no key makes unstable."""
    fields = {"architecture": "linear", "momentum": momentum, "chunk_size": chunk_size, "max_step_size": 24.0}
    fields["form"] = "recurrent"  # the form of many parallel steps has no forward derivative
    with jax.enable_x64(True):
        grown = slope_after_one_key(256, **fields, bound_slope=False)
        # One step a token with momentum of a half is stable below three times the error.
        assert grown > 1e10 or (momentum and chunk_size == 1)
        assert slope_after_one_key(256, **fields) < 1


def test_a_memory_without_a_norm_is_refused():
    with pytest.raises(ValueError, match="bound_slope is True: it needs a memory with a norm"):
        dataclasses.replace(presets.titans(residual=False), bound_slope=True)
