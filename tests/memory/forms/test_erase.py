"""Errors that are taken with a part of the key (`Gates.erase`), beside what the presets that have them do."""

import dataclasses

import jax
import numpy as np
import pytest
from miras_inputs import FORMS, HEAD_DIM, MODELS, TIME, error, run

from titans_jax import memory
from titans_jax.memory import algorithms, architectures, biases, presets, retentions

TOLERANCE = 1e-10


def expected(inputs, chunk_size, decay_first=False):
    """W_t = Diag(a_t) W_{t-1} + S_t, S_t = eta_t S_{t-1} - theta_t k_t^T e_t, e_t = (b_t * k_t) W - v_t.

    W is that of the chunk's start or, if the rule decays first, what the token's retention leaves; several inner steps
    come one after the other.
    """
    weights, past, reads = np.zeros((HEAD_DIM, HEAD_DIM)), np.zeros((HEAD_DIM, HEAD_DIM)), []
    for t in range(TIME):
        keys, values, erase, steps = (
            np.atleast_2d(inputs[name][t]) for name in ("keys", "values", "erase", "step_size")
        )
        retention = np.broadcast_to(inputs["retention"][t], (HEAD_DIM, 1)) * inputs["key_retention"][t][:, None]
        for i, (k, v, b) in enumerate(zip(keys, values, erase, strict=True)):
            if t % chunk_size == 0:
                anchor = weights
            kept = retention if i == 0 else 1.0
            e = (b * k) @ (kept * anchor if decay_first else anchor) - v
            past = inputs["momentum"][t] * past if "momentum" in inputs else 0.0
            past = past - steps.ravel()[i] * np.outer(k, e)
            weights = kept * weights + past
        reads.append(inputs["queries"][t] @ weights)
    return np.array(reads)


def linear(algorithm, chunk_size=1):
    return memory.MemoryRule(
        architectures.linear(), biases.l2(), retentions.decay(), algorithm, chunk_size, learned_start=False
    )


RULES = {
    "decays later": linear(algorithms.gradient_descent()),
    "two steps": linear(algorithms.gradient_descent(steps=2, decay_first=True)),
    "momentum": linear(algorithms.momentum(), chunk_size=4),
}


def draw(rule):
    generator = np.random.default_rng(3)
    written = (TIME, HEAD_DIM) if rule.algorithm.steps == 1 else (TIME, rule.algorithm.steps, HEAD_DIM)
    queries, keys, values = (generator.normal(size=shape) for shape in ((TIME, HEAD_DIM), written, written))
    gates = {
        "retention": generator.uniform(0.5, 1.0, TIME),
        "key_retention": np.ones((TIME, HEAD_DIM)) if rule.algorithm.has_momentum else generator.uniform(
            0.3, 1.0, (TIME, HEAD_DIM)
        ),
        "step_size": generator.uniform(0.1, 0.5, written[:-1]),
        "erase": generator.uniform(0.1, 0.9, written),
    }  # fmt: skip
    if rule.algorithm.has_momentum:
        gates["momentum"] = generator.uniform(0.1, 0.6, TIME)
    return {"queries": queries, "keys": keys / np.linalg.norm(keys, axis=-1, keepdims=True), "values": values} | gates


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", RULES)
def test_erase_is_in_the_error_and_not_in_the_write(name, form):
    rule = RULES[name]
    inputs = draw(rule)
    wanted = expected(inputs, rule.chunk_size, rule.algorithm.decay_first)
    params = {"weights": (np.zeros((HEAD_DIM, HEAD_DIM)),)}
    assert error(run(rule, form, params, inputs)[0], wanted) <= TOLERANCE
    assert error(expected(inputs | {"erase": np.ones_like(inputs["erase"])}, rule.chunk_size), wanted) > 1e-3


def test_the_kernel_has_it():
    model = MODELS["gated_deltanet_2"]
    inputs = model.inputs()
    single = run(model.rule, "fused", model.params, inputs, dtype=np.float32)[0]
    assert error(single.astype(np.float64), model.expect(inputs, model.params)) <= 1e-5


def test_gated_deltanet_2_with_one_number_for_both_gates_is_kimi_delta_attention():
    inputs = MODELS["kimi_delta_attention"].inputs()
    step = inputs.pop("step_size")[:, None]
    both = inputs | {"erase": np.repeat(step, HEAD_DIM, axis=1), "values": step * inputs["values"]}
    rule, params = MODELS["gated_deltanet_2"].rule, MODELS["gated_deltanet_2"].params
    wanted = MODELS["kimi_delta_attention"].expect(inputs | {"step_size": step[:, 0]}, params)
    assert error(run(rule, "chunked", params, both)[0], wanted) <= TOLERANCE


@pytest.mark.parametrize("rule", [presets.titans(expansion=2), presets.mesa()], ids=["mlp", "least squares"])
def test_memories_that_write_along_the_key_they_read_refuse_it(rule):
    params = memory.init_params(rule, jax.random.key(0), 4)
    x, gate = np.zeros((2, 4), np.float32), np.zeros((2,), np.float32)
    gates = memory.Gates(gate, gate if rule.algorithm.has_momentum else None, gate, erase=x)
    with pytest.raises(ValueError, match=r"gates\.erase is given: .* use None, or linear\(\) and gradient_descent"):
        memory.memorize(rule, params, memory.init_state(rule, params), x, x, x, gates)
    with pytest.raises(ValueError, match=r"gates\.erase has shape"):
        memory.memorize(
            presets.deltanet(), {"weights": (np.zeros((4, 4), np.float32),)},
            memory.init_state(presets.deltanet(), {"weights": (np.zeros((4, 4), np.float32),)}),
            x, x, x, dataclasses.replace(gates, log_momentum=None, erase=gate),
        )  # fmt: skip
