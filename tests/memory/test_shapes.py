"""The shapes that signatures and fields promise hold in every form."""

import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
import shapes

from titans_jax import memory
from titans_jax.memory import gates, interface, presets, state
from titans_jax.memory.forms import decay, inner_gradient
from titans_jax.ops import channel_decay, matmul, solve_tril

HEAD_DIM, TIME = 4, 9
MODULES = (interface, gates, state, decay, inner_gradient, channel_decay, matmul)
# What every form of a rule must have passed through; the others' shapes are checked where they are called.
USED = {
    "titans": (presets.titans(chunk_size=4), {"coefficients", "gate_products", "inner_products"}),
    "deltanet": (presets.deltanet(), {"block_coefficients"}),
    "gla": (presets.gla(), {"clipped", "cumulative"}),
    "delta_product": (presets.delta_product(), {"matmul"}),
}


def call(rule, form, **changes):
    steps = rule.algorithm.steps
    written = (TIME, HEAD_DIM) if steps == 1 else (TIME, steps, HEAD_DIM)
    tokens = {"queries": jnp.ones((TIME, HEAD_DIM)), "keys": jnp.ones(written), "values": jnp.ones(written)} | changes
    params = memory.init_params(rule, jax.random.key(0), HEAD_DIM)
    gate = jnp.full(TIME, -0.1)
    given = memory.Gates(gate, gate, jnp.full(written[:-1], 0.1))
    if rule == presets.gla():
        given = dataclasses.replace(given, log_key_retention=jnp.full((TIME, HEAD_DIM), -0.1))
    start = memory.init_state(rule, params)
    resets = jnp.arange(TIME) == 4
    return params, memory.memorize(
        rule, params, start, *tokens.values(), given, form, resets=resets, return_surprise=True
    )


@pytest.mark.parametrize("form", ["recurrent", "associative", "chunked"])
@pytest.mark.parametrize("name", USED)
def test_calls(monkeypatch, name, form):
    rule, used = USED[name]
    called = shapes.check_calls(monkeypatch, *MODULES)

    def every_call():
        params, (reads, end, surprise) = call(rule, form)
        memory.retrieve(rule, params, end, reads)
        memory.retrieve(rule, params, end, reads[0])
        shapes.assert_fields(end)
        shapes.assert_fields(surprise)

    jax.eval_shape(every_call)
    assert {"memorize", "retrieve", "read"} <= called
    assert form != "chunked" or used <= called


@pytest.mark.parametrize("tile", [None, 4])
def test_coefficients(tile):
    def every_call(row):
        shapes.assert_fields(decay.coefficients(row, row, row, tile=tile))
        shapes.assert_fields(decay.coefficients(row, None, row, resets=row > 0, tile=tile))

    jax.eval_shape(every_call, jnp.full((1, 8), -0.1))


def test_triangular_systems():
    def every_call(lower, right):
        for inverse in (solve_tril.inverse, solve_tril.inverse_in_kernel):
            found = shapes.checked(inverse)(lower, lower.dtype)
            shapes.checked(solve_tril.solve.__wrapped__)(False, lower, found, right)

    jax.eval_shape(every_call, jnp.zeros((8, 8)), jnp.zeros((8, 3)))


def test_a_wrong_shape_is_seen(monkeypatch):
    """The check itself: values of another width, and a result that is not what it says."""
    shapes.check_calls(monkeypatch, interface)
    with pytest.raises(jaxtyping.TypeCheckError, match="values"):
        jax.eval_shape(lambda: call(presets.deltanet(), "chunked", values=jnp.ones((TIME, HEAD_DIM + 1))))
    wrong = memory.Surprise(jnp.ones(3), jnp.ones(4))
    with pytest.raises(AssertionError, match="cotangent_norm"):
        shapes.assert_fields(wrong)
