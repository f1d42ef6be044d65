"""A rule that forgets to its learned start: retention acts on what has changed since, in every form; and, as in models,
takes smaller steps where its norm is steep."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax import memory

TIME, HEAD_DIM, CHUNK = 11, 6, 4
presets = memory.presets
RULES = {
    "titans": presets.titans(expansion=2, chunk_size=CHUNK),
    "linear": presets.titans(1, chunk_size=CHUNK, residual=False),
    "moneta": presets.moneta(expansion=2, chunk_size=CHUNK),
    "yaad": presets.yaad(expansion=2, chunk_size=CHUNK),
    "memora": presets.memora(expansion=2, chunk_size=CHUNK),
}
RULES = {
    name: dataclasses.replace(rule, forget_to_start=True, bound_slope=rule.architecture.normalized)
    for name, rule in RULES.items()
}


def draw(rule, forget=None):
    """float64 (params, queries, keys, values, gates)."""
    generator = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), memory.init_params(rule, jax.random.key(0), HEAD_DIM))
    queries, keys, values = (jnp.asarray(generator.normal(size=(TIME, HEAD_DIM))) for _ in range(3))
    keys = keys / jnp.linalg.norm(keys, axis=1, keepdims=True)
    shape = (TIME, len(rule.shapes(HEAD_DIM)))
    uniform = lambda low, high: jnp.asarray(generator.uniform(low, high, shape))  # noqa: E731
    forget = uniform(0.05, 0.5) if forget is None else jnp.full(shape, forget)
    momentum = uniform(0.1, 0.9) if rule.algorithm.has_momentum else None
    return params, queries, keys, values, memory.Gates.from_values(forget, momentum, uniform(0.005, 0.02))


@functools.partial(jax.jit, static_argnums=(0, 1))
def reads(rule, form, params, queries, keys, values, gates):
    return memory.memorize(rule, params, memory.init_state(rule, params), queries, keys, values, gates, form)


def test_the_linear_memory_token_by_token():
    """W_t = M_0 + (1 - alpha_t) (W_{t-1} - M_0) + S_t, gradients at the chunk's start."""
    with jax.enable_x64(True):
        rule = RULES["linear"]
        params, queries, keys, values, gates = draw(rule)
        found, state = reads(rule, "chunked", params, queries, keys, values, gates)
        start = np.asarray(params["weights"][0])
        weights, momentum = start.copy(), np.zeros_like(start)
        retention, eta, theta = (np.exp(gates.log_retention), np.exp(gates.log_momentum), np.asarray(gates.step_size))
        for t in range(TIME):
            anchor = weights if t % CHUNK == 0 else anchor  # noqa: F821
            key, value = np.asarray(keys[t]), np.asarray(values[t])
            momentum = eta[t] * momentum - theta[t] * np.outer(key, key @ anchor - value)
            weights = start + retention[t] * (weights - start) + momentum
            np.testing.assert_allclose(found[t], np.asarray(queries[t]) @ weights, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(state.weights[0], weights - start, rtol=1e-10, atol=1e-12)


@pytest.mark.slow_but_for("titans-chunked", "linear-chunked")
@pytest.mark.parametrize("form", ["associative", "chunked"])
@pytest.mark.parametrize("name", RULES)
def test_forms_agree_in_value_and_gradient(name, form):
    with jax.enable_x64(True):
        rule = RULES[name]
        arguments = draw(rule)

        def probe(form, *arguments):
            found, state = reads(rule, form, *arguments)
            return jnp.sum(jnp.sin(found)) + sum(jnp.sum(jnp.cos(w)) for w in state.weights)

        for wanted, got in zip(
            jax.tree.leaves(jax.grad(probe, (1, 2, 3, 4, 5))("recurrent", *arguments)),
            jax.tree.leaves(jax.grad(probe, (1, 2, 3, 4, 5))(form, *arguments)),
            strict=True,
        ):
            # Moneta's fourth norm of small matrices has large derivatives.
            np.testing.assert_allclose(got, wanted, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ["titans", "yaad", "memora"])
def test_what_forgets_everything_is_the_learned_start(name):
    """alpha = 1, theta = 0: every read is that of the start, however much was written before."""
    with jax.enable_x64(True):
        rule = RULES[name]
        params, queries, keys, values, gates = draw(rule)
        _, state = reads(rule, "recurrent", params, queries, keys, values, gates)
        _, *rest, _ = draw(rule)
        step = jnp.zeros_like(gates.step_size)
        momentum = None if gates.log_momentum is None else jnp.full_like(step, 1e-30)
        empty = memory.Gates.from_values(jnp.ones_like(step), momentum, step)
        after = memory.memorize(rule, params, state, *rest, empty, "recurrent")[1]
        fresh = memory.init_state(rule, params)
        wanted = memory.retrieve(rule, params, fresh, queries)
        np.testing.assert_allclose(memory.retrieve(rule, params, after, queries), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("orthogonal", "least"), [(False, 1e-3), (True, 1e-4)])
def test_float32_is_exact_however_much_is_forgotten(orthogonal, least):
    """A quarter of the tokens keep e^-12, in chunks of 16. Forgetting to zero shrinks the weights behind the norm,
    which makes their rounding errors large again, at least this large; forgetting to the start leaves them as large as
    the start, whose entries are independent or which is orthogonal."""
    time, head_dim = 128, 32
    generator = np.random.default_rng(1)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    tokens = [*unit(generator.normal(size=(2, time, head_dim))), generator.normal(size=(time, head_dim))]
    kept = np.where(generator.random((time, 1)) < 0.25, -12, -0.01)
    gates = [np.broadcast_to(x, (time, 2)) for x in (kept, np.log(0.5), 0.3)]
    off = {}
    for start in (True, False):
        found = {}
        rule = dataclasses.replace(presets.titans(2, 2, 16), forget_to_start=start, orthogonal_start=orthogonal)
        params = jax.tree.map(np.asarray, memory.init_params(rule, jax.random.key(1), head_dim))
        for dtype in (jnp.float32, jnp.float64):
            with jax.enable_x64(dtype == jnp.float64):
                inputs = jax.tree.map(lambda x: jnp.asarray(x, dtype), [params, *tokens, memory.Gates(*gates)])  # noqa: B023
                found[dtype] = reads(rule, "chunked", *inputs)[0]
        narrow, wide = (np.asarray(found[dtype], np.float64) for dtype in (jnp.float32, jnp.float64))
        off[start] = np.linalg.norm(narrow - wide) / np.linalg.norm(wide)
    assert off[True] < 1e-5 < least < off[False], off


def test_it_needs_a_learned_start():
    for rule in (presets.gated_deltanet(), presets.memora(lag_token=True)):
        with pytest.raises(ValueError, match="forget_to_start is True: .* use False"):
            dataclasses.replace(rule, forget_to_start=True)
