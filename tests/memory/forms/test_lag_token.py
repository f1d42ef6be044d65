"""Memora with a lag token against eq 30-32 of Miras, written out."""

import miras_inputs as miras
import miras_oracle as oracle
import numpy as np
import pytest

from titans_jax import memory

FLOOR = 1e-6  # weights below it count as it in the logarithm


def lagged(inputs, params, chunk_size):
    """Reads [time, head_dim]: the first token of a chunk steps through the softmax, the others around its result."""
    weights, scale, sizes = list(params["weights"]), params["norm_scale"], params["simplex_size"]
    anchor, reads = weights, []
    for t, (query, key, value) in enumerate(
        zip(*(inputs[name] for name in ("queries", "keys", "values")), strict=True)
    ):
        first = t % chunk_size == 0
        anchor = weights if first else anchor
        steps = oracle.gradients(anchor, scale, key, oracle.read(anchor, scale, key) - value)
        for i, gradient in enumerate(steps):
            keep, step = inputs["retention"][t, i], -inputs["step_size"][t, i] * gradient
            if first:
                logits = keep * np.log(np.maximum(weights[i], FLOOR)) + step
                powers = np.exp(logits - logits.max(axis=0))
                weights = [*weights[:i], sizes[i] * powers / powers.sum(axis=0), *weights[i + 1 :]]
            else:
                weights = [*weights[:i], keep * weights[i] + step, *weights[i + 1 :]]
        anchor = weights if first else anchor
        reads.append(oracle.read(weights, scale, query))
    return np.array(reads)


@pytest.mark.slow_but_for("4-chunked")
@pytest.mark.parametrize("form", miras.FORMS)
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_lag_token_is_the_paper_s_rule(form, chunk_size):
    rule = memory.presets.memora(depth=2, expansion=2, chunk_size=chunk_size, lag_token=True)
    params = miras.random_params(rule)
    inputs = miras.draw_deep(np.random.default_rng(1), miras.TIME, step=0.2)
    reads, _ = miras.run(rule, form, params, inputs)
    assert miras.error(reads, lagged(inputs, params, chunk_size)) < 1e-10


def test_lag_token_is_not_the_logit_carry():
    rules = [memory.presets.memora(expansion=2, chunk_size=4, lag_token=lag) for lag in (False, True)]
    inputs = miras.draw_deep(np.random.default_rng(1), miras.TIME, step=0.2)
    carried, lagging = (miras.run(rule, "chunked", miras.random_params(rule), inputs)[0] for rule in rules)
    assert miras.error(carried, lagging) > 1e-4
