"""Polynomial features of keys: the monomials, how many, their scale, and what a fresh memory makes of them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import omega_oracle
import pytest

from titans_jax import memory
from titans_jax.config import ConfigError, MemoryConfig, ModelConfig, memory_rule
from titans_jax.config.schema import Config
from titans_jax.config.validate import validate
from titans_jax.memory.rule import architectures


@pytest.mark.parametrize(("inputs", "degree"), [(5, 1), (5, 2), (3, 4)])
def test_monomials(inputs, degree):
    draw = np.random.default_rng(0)
    x, scale = draw.normal(size=(2, inputs)), draw.normal(size=degree + 1)
    with jax.enable_x64(True):
        found = architectures.monomials(jnp.asarray(x), jnp.asarray(scale))
    expected = [omega_oracle.monomials(row, scale) for row in x]
    assert found.shape == (2, math.comb(inputs + degree, degree))
    np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-15)


def test_the_first_matrix_reads_them_all():
    """ATLAS: 2,145 for heads of 64 and degree 2; coefficients start at 1/i!."""
    assert architectures.polynomial_mlp(2, 4, 2).shapes(64) == ((2145, 256), (256, 64))
    assert architectures.polynomial_mlp(1, 4, 2).shapes(8) == ((45, 8),)
    scale = architectures.polynomial_mlp(degree=3).slow(4)["degree_scale"]
    np.testing.assert_allclose(scale, [1, 1, 1 / 2, 1 / 6], rtol=1e-6)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_the_mean_square_of_features_is_that_of_unit_keys(degree):
    keys = np.random.default_rng(0).normal(size=(20_000, 5))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    part = architectures.polynomial_mlp(degree=degree)
    features = jax.jit(architectures.monomials)(jnp.asarray(keys, jnp.float32), part.slow(5)["degree_scale"])
    assert part.input_square(5) == pytest.approx(float(np.mean(np.square(features))), rel=2e-3)


def test_start_variance_is_that_of_fresh_memories_and_unit_keys():
    rule = memory.presets.omeganet(expansion=2, degree=2)
    draws, dim = 2000, 6

    def variance(key):
        key, start = jax.random.split(key)
        params = memory.init_params(rule, start, dim)
        x = jax.random.normal(key, (dim,))
        features = architectures.monomials(x / jnp.linalg.norm(x), params["degree_scale"])
        outputs = architectures.mlp(2, 2).read(lambda i, y: y @ params["weights"][i], params, features)
        return jnp.var(outputs)

    found = np.asarray(jax.jit(jax.vmap(variance))(jax.random.split(jax.random.key(0), draws)))
    expected = rule.start_variance(dim)
    assert abs(found.mean() - expected) < 4 * found.std() / draws**0.5
    assert found.std() < 2 * expected  # so that the line above tells


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: architectures.polynomial_mlp(degree=0), "degree is 0: it must be an integer of 1 or more, for"),
        (lambda: architectures.polynomial_mlp(degree=1.5), "degree is 1.5: it must be an integer of 1 or more, for"),
        (
            lambda: architectures.polynomial_mlp(degree=3).shapes(64),
            "degree is 3: heads of width 64 have 47,905 monomials up to it, more than 16,384; use a smaller degree or",
        ),
    ],
)
def test_degrees_that_cannot_be_are_refused(make, sentence):
    with pytest.raises(ValueError) as refused:
        make()
    assert str(refused.value).startswith(sentence) and len(str(refused.value).splitlines()) == 1


def test_a_configuration_names_it_and_refuses_what_it_cannot_hold():
    config = MemoryConfig(preset="omeganet", architecture="polynomial_mlp(degree=3)", expansion=2, omega_window=8)
    rule = memory_rule(config)
    assert rule.architecture == architectures.polynomial_mlp(2, 2, 3, scale_keys=True) and rule.bound_slope
    assert rule.algorithm == memory.algorithms.omega(8)
    assert memory_rule(dataclasses.replace(config, momentum=True)).algorithm == memory.algorithms.omega(8, True)
    with pytest.raises(ConfigError, match=r"^model.memory.architecture: degree is 3: heads of width 64 have 47,905"):
        validate(Config(model=ModelConfig(memory=config)))
    for window in (0, 17):
        with pytest.raises(ConfigError, match=rf"^model.memory.omega_window is {window}; use None, or 1 to chunk_size"):
            memory_rule(dataclasses.replace(config, omega_window=window))
    assert memory_rule(dataclasses.replace(config, omega_window=None, chunk_size=4)).algorithm.window == 4
