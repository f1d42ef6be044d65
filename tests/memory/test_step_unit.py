"""The unit of step sizes, against writes that are really made."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax import memory
from titans_jax.memory.step_unit import error_removed

HEAD_DIM, SAMPLES = 8, 512
L2 = memory.biases.l2()  # of another bias the share depends on how large the error is
RULES = {
    "titans": memory.presets.titans(expansion=2, chunk_size=1),
    "memora": memory.presets.memora(expansion=2, chunk_size=1),
    "moneta": memory.presets.moneta(expansion=2, chunk_size=1),
    "ttt_linear": memory.presets.ttt_linear(chunk_size=1),
    "atlas": memory.atlas_presets.atlas(expansion=2, chunk_size=1),
}
RULES = {name: dataclasses.replace(rule, bias=L2) for name, rule in RULES.items()}


def share_removed(rule, step_size):
    """How much of the error along itself one write takes away, the mean over starts and tokens."""

    def one(key):
        start, *keys = jax.random.split(key, 3)
        params = memory.init_params(rule, start, HEAD_DIM)
        key, error = (jax.random.normal(each, (1, HEAD_DIM)) for each in keys)
        key = key / jnp.linalg.norm(key)
        if rule.algorithm.steps_by_chunk:  # whose share depends on how large the error is
            error = jnp.sign(error)
        state = memory.init_state(rule, params)
        value = memory.retrieve(rule, params, state, key) - error
        momentum = jnp.zeros(1) if rule.algorithm.has_momentum else None
        gates = memory.Gates.from_values(forget=jnp.zeros(1), momentum=momentum, step_size=jnp.full(1, step_size))
        _, state = memory.memorize(rule, params, state, key, key, value, gates, form="recurrent")
        left = memory.retrieve(rule, params, state, key) - value
        return jnp.sum((error - left) * error), jnp.sum(error**2)

    removed, before = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(7), SAMPLES))
    return float(jnp.sum(removed) / jnp.sum(before))


@pytest.mark.slow_but_for("titans", "memora", "atlas")
@pytest.mark.parametrize("name", RULES)
def test_a_small_step_removes_its_share(name):
    """Other starts and tokens than the unit is measured with: 512 of each agree to some percent."""
    unit = error_removed(RULES[name], HEAD_DIM)
    assert share_removed(RULES[name], 1e-3 / unit) == pytest.approx(1e-3, rel=0.15)


def test_a_linear_memory_from_zero_loses_its_error_with_a_step_of_one():
    assert error_removed(memory.presets.deltanet(), HEAD_DIM) == pytest.approx(1, abs=1e-3)


def test_neither_bias_nor_chunk_nor_algorithm_changes_it():
    rule = RULES["titans"]
    others = (
        dataclasses.replace(rule, chunk_size=64),
        dataclasses.replace(rule, bias=memory.biases.huber(), algorithm=memory.algorithms.gradient_descent()),
        dataclasses.replace(rule, forget_to_start=True),
    )
    assert {error_removed(other, HEAD_DIM) for other in others} == {error_removed(rule, HEAD_DIM)}


def test_the_unit_of_orthogonal_steps_hardly_depends_on_the_width():
    """Nor on the window; a plain one grows as head_dim."""
    rules = {window: memory.atlas_presets.atlas(window, expansion=2) for window in (1, 16)}
    units = [error_removed(rules[window], dim) for window, dim in ((1, 8), (16, 8), (16, 32))]
    assert units[0] == units[1] and 1 < units[0] < 2 and units[2] == pytest.approx(units[1], rel=0.1)


def test_it_is_a_number_inside_a_compiled_function_too():
    found = []
    jax.jit(lambda x: found.append(error_removed(RULES["titans"], HEAD_DIM)) or x)(1.0)
    assert isinstance(found[0], float) and np.isfinite(found[0])
