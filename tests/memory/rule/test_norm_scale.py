"""The norm of a memory without a learned scale."""

import jax
import numpy as np
import pytest
from rules import FORMS, TITANS, random_params, random_rows

from titans_jax import memory
from titans_jax.config import MemoryConfig, memory_rule


def without_scale(**choices):
    return memory_rule(MemoryConfig(architecture="residual_mlp(learned_scale=False)", forget_to="zero", **choices))


@pytest.mark.parametrize("form", FORMS)
def test_it_reads_as_with_a_scale_of_1(form):
    same = {"expansion": TITANS.expansion, "chunk_size": TITANS.chunk_size, "scale_keys": TITANS.scale_keys}
    rule = without_scale(**same, bound_slope=False)
    params, rows = random_params(TITANS), random_rows(TITANS, rows=1, time=11)
    queries, keys, values, *gates = (rows[name][0] for name in rows)
    gates = memory.Gates.from_values(*gates)

    def reads(rule, params):
        state = memory.init_state(rule, params)
        return memory.memorize(rule, params, state, queries, keys, values, gates, form=form)[0]

    with jax.enable_x64(True):
        found = jax.jit(lambda params: reads(rule, params))({"weights": params["weights"]})
        ones = params | {"norm_scale": np.ones_like(params["norm_scale"])}
        expected = jax.jit(lambda params: reads(TITANS.rule, params))(ones)
        other = jax.jit(lambda params: reads(TITANS.rule, params))(params)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert np.max(np.abs(found - other)) > 0.1  # the scale matters to these reads


def test_it_has_no_parameter_and_the_same_step_unit():
    rule, scaled = without_scale(), memory_rule(MemoryConfig(forget_to="zero"))
    assert set(memory.init_params(rule, jax.random.key(0), 8)) == {"weights"}
    assert rule.start_variance(8) == scaled.start_variance(8) > 0
