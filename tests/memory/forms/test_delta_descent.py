"""Delta gradient descent beside its preset: without a norm, with momentum, of a linear memory, and in a kernel."""

import dataclasses

import numpy as np
import pytest
from miras_inputs import FORMS, HEAD_DIM, TIME, draw_deep, error, hope_model, random_params, run

from titans_jax import memory
from titans_jax.memory import algorithms, architectures, biases, presets, retentions

TOLERANCE = 1e-10
PLAIN = dataclasses.replace(presets.PRESETS["hope"].make(chunk_size=4), architecture=architectures.skip_mlp(2, 2))
RULES = {
    "no norm": PLAIN,
    "momentum": dataclasses.replace(PLAIN, algorithm=algorithms.delta_gradient_descent(has_momentum=True)),
}


@pytest.mark.slow_but_for("no norm-recurrent", "momentum-chunked")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", RULES)
def test_it_is_the_published_recurrence(name, form):
    model = hope_model(RULES[name])
    inputs = model.inputs()
    wanted = model.expect(inputs, model.params)
    assert error(run(model.rule, form, model.params, inputs)[0], wanted) <= TOLERANCE
    plain = algorithms.momentum() if model.rule.algorithm.has_momentum else algorithms.gradient_descent()
    descent = dataclasses.replace(model.rule, algorithm=plain)
    assert error(run(descent, "chunked", model.params, inputs)[0], wanted) > 1e-4


def test_a_linear_memory_erases_twice():
    """With the loss of 1/2 ||k W - v||^2, W <- W (a I - 2 theta k^T k) + theta k^T v on the side of the keys."""
    rule = memory.MemoryRule(
        architectures.linear(), biases.l2(), retentions.decay(), algorithms.delta_gradient_descent(), chunk_size=1
    )
    inputs, params = draw_deep(np.random.default_rng(1), TIME, matrices=1, step=0.4), random_params(rule)
    (weights,), reads = params["weights"], []
    for q, k, v, a, theta in zip(
        *(inputs[n] for n in ("queries", "keys", "values", "retention", "step_size")), strict=True
    ):
        weights = (a * np.eye(HEAD_DIM) - 2 * theta * np.outer(k, k)) @ weights + theta * np.outer(k, v)
        reads.append(q @ weights)
    assert error(run(rule, "chunked", params, inputs)[0], np.array(reads)) <= TOLERANCE


def test_the_kernel_has_it():
    model = hope_model(presets.PRESETS["hope"].make(expansion=2, chunk_size=8))
    inputs = model.inputs(16)
    single = run(model.rule, "fused", model.params, inputs, dtype=np.float32)[0]
    assert error(single.astype(np.float64), model.expect(inputs, model.params)) <= 1e-5
