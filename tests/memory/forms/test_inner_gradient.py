"""Rank-one gradients of all tokens: their sum is the gradient of the summed inner losses by the fast weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax import memory
from titans_jax.memory import algorithms, architectures, biases, retentions
from titans_jax.memory.forms import inner_gradient
from titans_jax.memory.forms.chunk_algorithm import Tokens

TOKENS, HEAD_DIM = 5, 4
ARCHITECTURES = {
    "linear": architectures.linear(),
    "mlp": architectures.mlp(3, 2),
    "residual_mlp": architectures.residual_mlp(2, 2),
    "gated_mlp": architectures.gated_mlp(2),
}
LOSSES = {  # of read r, value v and the bias's own gate, of one token
    "l2": lambda r, v, gate: jnp.sum((r - v) ** 2) / 2,
    "dot_product": lambda r, v, gate: -jnp.sum(r * v),
    "affine": lambda r, v, gate: gate[0] * jnp.sum(r**2) / 2 - jnp.sum(r * v),
}


def tanh_gelu(x):
    return x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def answer(name, weights, scale, x):
    """M(x) of one key [head_dim], from memory/README.md."""
    if name == "gated_mlp":
        first, second, last = weights
        gate = x @ first
        return (gate / (1 + jnp.exp(-gate)) * (x @ second)) @ last
    hidden = x @ weights[0]
    for matrix in weights[1:]:
        hidden = tanh_gelu(hidden) @ matrix
    if name != "residual_mlp":
        return hidden
    centred = hidden - jnp.mean(hidden)
    return x + scale * centred / jnp.sqrt(jnp.mean(centred**2) + 1e-6)


def draw(architecture, bias, seed=0):
    rule = memory.MemoryRule(
        ARCHITECTURES[architecture], getattr(biases, bias)(), retentions.decay(), algorithms.gradient_descent(), TOKENS
    )
    generator = np.random.default_rng(seed)
    keys, values = generator.normal(size=(2, TOKENS, HEAD_DIM))
    weights = tuple(generator.normal(size=shape) / np.sqrt(shape[0]) for shape in rule.shapes(HEAD_DIM))
    gate = generator.uniform(0.2, 1, (TOKENS, 1)) if rule.bias.takes_gate else None
    params = {"weights": weights, "norm_scale": generator.uniform(0.5, 1.5, HEAD_DIM)}
    return rule, params, weights, Tokens(keys, keys, values, gate, None, None, None)


def by_definition(architecture, bias, params, weights, tokens):
    """(gradient of every token and matrix, its loss, norm of the loss's gradient by the read)."""
    gates = np.ones((TOKENS, 1)) if tokens.bias_gate is None else tokens.bias_gate

    def loss(weights, at_read, key, value, gate):
        return LOSSES[bias](answer(architecture, weights, params["norm_scale"], key) + at_read, value, gate)

    each = jax.vmap(jax.value_and_grad(loss, argnums=(0, 1)), in_axes=(None, None, 0, 0, 0))
    losses, (gradients, cotangents) = each(weights, jnp.zeros(HEAD_DIM), tokens.keys, tokens.values, gates)
    return gradients, losses, jnp.linalg.norm(cotangents, axis=-1)


def found(rule, params, weights, tokens):
    run = jax.jit(inner_gradient.inner_gradients, static_argnums=0)
    return jax.tree.map(np.asarray, run(rule, params, weights, tokens))


@pytest.mark.parametrize(
    "architecture, bias",
    [("linear", "l2"), ("linear", "affine"), ("mlp", "l2"), ("residual_mlp", "dot_product"), ("residual_mlp", "l2"),
     ("gated_mlp", "l2")],
)  # fmt: skip
def test_gradients_of_every_token(architecture, bias):
    """x_i^T delta_i is token i's gradient of every fast matrix, so that their sum is that of the summed loss."""
    rule, params, weights, tokens = draw(architecture, bias)
    with jax.enable_x64(True):
        params, weights, tokens = jax.tree.map(jnp.asarray, (params, weights, tokens))
        got = found(rule, params, weights, tokens)
        define = jax.jit(by_definition, static_argnums=(0, 1))
        wanted, losses, norms = jax.tree.map(np.asarray, define(architecture, bias, params, weights, tokens))
    assert len(got.inputs) == len(got.deltas) == len(weights)
    for inputs, deltas, gradients in zip(got.inputs, got.deltas, wanted, strict=True):
        np.testing.assert_allclose(inputs[:, :, None] * deltas[:, None, :], gradients, rtol=0, atol=1e-12)
        np.testing.assert_allclose(inputs.T @ deltas, np.sum(gradients, axis=0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(got.surprise.loss, losses, rtol=1e-12)
    np.testing.assert_allclose(got.surprise.cotangent_norm, norms, rtol=1e-12)


def test_step_sizes_of_channels_scale_the_outer_sides():
    rule, params, weights, tokens = draw("mlp", "l2")
    generator = np.random.default_rng(1)
    keys, values = generator.uniform(0.1, 1, (2, TOKENS, HEAD_DIM))
    with jax.enable_x64(True):
        arguments = jax.tree.map(jnp.asarray, (params, weights, tokens))
        plain = found(rule, *arguments)
        scaled = tokens._replace(key_step_size=keys, value_step_size=values)
        scaled = found(rule, *arguments[:2], jax.tree.map(jnp.asarray, scaled))
    for i in range(3):
        np.testing.assert_allclose(scaled.inputs[i], plain.inputs[i] * (keys if i == 0 else 1), rtol=1e-12)
        np.testing.assert_allclose(scaled.deltas[i], plain.deltas[i] * (values if i == 2 else 1), rtol=1e-12)
    np.testing.assert_array_equal(scaled.surprise.loss, plain.surprise.loss)


def test_the_surprise_is_measured_and_not_learned_from():
    """Its norm has no gradient at 0, where a learned token stands."""
    rule, params, weights, tokens = draw("linear", "l2")
    tokens = tokens._replace(values=tokens.keys @ weights[0])

    def measured(weights):
        surprise = inner_gradient.inner_gradients(rule, params, weights, tokens).surprise
        return jnp.sum(surprise.loss) + jnp.sum(surprise.cotangent_norm)

    with jax.enable_x64(True):
        params, weights, tokens = jax.tree.map(jnp.asarray, (params, weights, tokens))
        assert not np.any(jax.grad(measured)(weights)[0])


def test_a_rule_that_decays_first_takes_gradients_at_what_is_left():
    rule = memory.presets.gated_deltanet()
    generator = np.random.default_rng(2)
    weights, keep = generator.normal(size=(HEAD_DIM, HEAD_DIM)).astype(np.float32), np.float32(0.5)
    sides = generator.uniform(0.2, 1, (2, HEAD_DIM)).astype(np.float32)
    log = jnp.log(jnp.asarray([keep]))
    gate = memory.Gates(log, None, log, None, None, *jnp.log(jnp.asarray(sides)))
    (found,) = inner_gradient.gradient_weights(rule, {}, (jnp.asarray(weights),), gate)
    np.testing.assert_allclose(found, keep * np.diag(sides[0]) @ weights @ np.diag(sides[1]), rtol=1e-5)
    assert inner_gradient.gradient_weights(draw("linear", "l2")[0], {}, (weights,), gate)[0] is weights
