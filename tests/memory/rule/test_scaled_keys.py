"""Keys that are scaled in front of a memory's hidden layer: what fresh hidden units are given, and what that does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from titans_jax import memory
from titans_jax.config import MemoryConfig, memory_rule
from titans_jax.memory.rule import architectures

HEAD_DIM = 16


def rule_of(part):
    return dataclasses.replace(memory.presets.titans(), architecture=part)


def unit_keys(count, seed=0):
    keys = np.random.default_rng(seed).normal(size=(count, HEAD_DIM))
    return jnp.asarray(keys / np.linalg.norm(keys, axis=1, keepdims=True), jnp.float32)


def hidden_inputs(part, key):
    """What the first matrix of a fresh memory says of many unit keys, in front of gelu."""
    rule, found = rule_of(part), []
    params = memory.init_params(rule, key, HEAD_DIM)

    def linear(i, x):
        y = x @ params["weights"][i]
        found.append(y)
        return y

    part.read(linear, params, unit_keys(2000))
    return found[0]


@pytest.mark.parametrize("make", [architectures.residual_mlp, architectures.polynomial_mlp])
@pytest.mark.parametrize("depth", [2, 3])
def test_fresh_hidden_units_read_a_root_mean_square_of_1(make, depth):
    scaled, plain = make(depth, 32, scale_keys=True), make(depth, 32)
    found, before = (np.sqrt(np.mean(hidden_inputs(p, jax.random.key(0)) ** 2)) for p in (scaled, plain))
    assert found == pytest.approx(1.0, rel=0.1)
    assert before < 0.3


def share_not_linear(part):
    """The share of a fresh network's variance over unit keys that no affine map of the key explains."""
    rule = rule_of(part)
    params = memory.init_params(rule, jax.random.key(1), HEAD_DIM)
    keys = unit_keys(4000)
    said = np.asarray(architectures.Mlp.read(part, lambda i, x: x @ params["weights"][i], params, keys))
    terms = np.concatenate([np.asarray(keys), np.ones((len(keys), 1))], axis=1)
    rest = said - terms @ np.linalg.lstsq(terms, said, rcond=None)[0]
    return rest.var() / said.var()


def test_only_with_scaled_keys_is_a_fresh_deep_memory_more_than_linear():
    assert share_not_linear(architectures.residual_mlp(2, 4)) < 0.07
    assert share_not_linear(architectures.residual_mlp(2, 4, scale_keys=True)) > 0.15


@pytest.mark.parametrize("depth", [2, 3])
def test_start_variance_is_that_of_fresh_memories(depth):
    part, draws = architectures.residual_mlp(depth, 4, scale_keys=True), 2000

    def variance(key):
        key, start = jax.random.split(key)
        params = memory.init_params(rule_of(part), start, HEAD_DIM)
        x = jax.random.normal(key, (HEAD_DIM,))
        x = x / jnp.linalg.norm(x) * HEAD_DIM**0.5
        return jnp.var(architectures.mlp(depth, 4).read(lambda i, y: y @ params["weights"][i], params, x))

    found = np.asarray(jax.vmap(variance)(jax.random.split(jax.random.key(0), draws)))
    expected = rule_of(part).start_variance(HEAD_DIM)
    assert abs(found.mean() - expected) < 4 * found.std() / draws**0.5
    assert expected == pytest.approx(oracle.fresh_variance(depth, HEAD_DIM, HEAD_DIM**0.5), rel=1e-6)


@pytest.mark.parametrize("part", [architectures.residual_mlp(1), architectures.linear(), architectures.gated_mlp()])
def test_a_memory_that_ignores_it_reads_as_before(part):
    params = memory.init_params(rule_of(part), jax.random.key(0), HEAD_DIM)
    found, expected = (
        p.read(lambda i, x: x @ params["weights"][i], params, unit_keys(4)) for p in (part.with_scaled_keys(), part)
    )
    np.testing.assert_array_equal(found, expected)


def test_configurations_scale_keys_but_of_weights_made_of_logits():
    """Unless told otherwise."""
    for preset in ("titans", "yaad", "moneta", "memora", "ttt_mlp", "omeganet", "dla", "atlas"):
        scaled = (
            memory_rule(MemoryConfig(preset=preset, scale_keys=say)).architecture.scale_keys
            for say in (None, True, False)
        )
        assert tuple(scaled) == (preset != "memora", True, False)
    assert not memory_rule(MemoryConfig(retention="kullback_leibler")).architecture.scale_keys
    for named in ("residual_mlp(scale_keys=True)", "polynomial_mlp(degree=3)"):
        rule = memory_rule(MemoryConfig(architecture=named, scale_keys="poly" in named))
        assert rule.architecture.scale_keys and rule.bound_slope
