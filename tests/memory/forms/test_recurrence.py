"""Every form of every rule gives the oracle's numbers: reads, surprise and state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rules
from jax.extend.core import jaxprs_in_params
from rules import EVERY_CASE, FORMS, HEAD_DIM, ONLINE, PAIRS, ROWS, TIME, TITANS, Case

from titans_jax import memory


def varied_rows(case):
    """Plain, no momentum, nothing forgotten, all forgotten, no step, constant gates, two padded ends; then plain."""
    rows = rules.random_rows(case, ROWS, TIME)
    rows["mask"] = np.ones((ROWS, TIME), bool)
    rows["momentum"][1] = 0
    rows["forget"][2], rows["momentum"][2] = 0, 1
    rows["forget"][3, 2::3] = 1
    rows["step_size"][4] = 0
    for name in ("forget", "momentum", "step_size"):
        rows[name][5] = rows[name][5, 0, 0]
    rows["mask"][6, 5:] = False
    rows["mask"][7, 8:] = False
    return rows


@functools.cache
def varied_answers(case):
    params, rows = rules.random_params(case), varied_rows(case)
    return params, rows, [rules.expect(case, params, rules.row(rows, index)) for index in range(ROWS)]


@pytest.mark.slow_but_for(
    "linear1-l2-momentum-1-chunked",
    "linear1-l2-momentum-4-*",
    "residual_mlp2-l2-momentum-4-*",
    "gated_mlp3-*-chunked",
    "mlp2-*-chunked",
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", EVERY_CASE, ids=str)
def test_recurrence_parity(case, form):
    params, rows, expected = varied_answers(case)
    answer = rules.run(case, form, params, rows)
    for index in range(ROWS):
        rules.assert_answers(case, rules.row(answer, index), expected[index])


@pytest.mark.slow
@pytest.mark.parametrize("case, form", PAIRS, ids=str)
def test_recurrence_parity_in_float32(case, form):
    params, rows, expected = varied_answers(case)
    answer = rules.run(case, form, params, rows, dtype=np.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(answer)} == {np.dtype("float32"), np.dtype("int32")}
    for index in range(ROWS):
        rules.assert_answers(case, rules.row(answer, index), expected[index], tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case, form", PAIRS, ids=str)
@pytest.mark.parametrize("time", [1, 3, 8])
def test_any_length(case, form, time):
    params, rows = rules.random_params(case), rules.random_rows(case, 1, time)
    answer = rules.run(case, form, params, rows)
    rules.assert_answers(case, rules.row(answer, 0), rules.expect(case, params, rules.row(rows, 0)))


@pytest.mark.slow_but_for("residual_mlp2-l2-momentum-4-chunked")
@pytest.mark.parametrize("case, form", PAIRS, ids=str)
def test_no_tokens(case, form):
    params, rows = rules.random_params(case), rules.random_rows(case, 2, 0)
    answer = rules.run(case, form, params, rows)
    assert answer["reads"].shape == (2, 0, HEAD_DIM)
    assert answer["loss"].shape == answer["cotangent_norm"].shape == (2, 0)
    for got, start in zip(answer["weights"], params["weights"], strict=True):
        np.testing.assert_array_equal(got, np.stack([start, start]))
    assert not answer["position"].any() and not any(leaf.any() for leaf in answer["momentum"])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_one_gate_for_all_matrices(form):
    """Leaves [time] mean the same gate for every matrix, and may stand beside leaves [time, matrices]."""
    params, rows = rules.random_params(TITANS), rules.random_rows(TITANS, 2, TIME)
    for name in ("forget", "momentum"):
        rows[name] = rows[name][..., 0]
    answer = rules.run(TITANS, form, params, rows)
    for index in range(2):
        rules.assert_answers(TITANS, rules.row(answer, index), rules.expect(TITANS, params, rules.row(rows, index)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "chunk_size, algorithm, dtype",
    [
        (1, "momentum", np.float64),
        (4, "momentum", np.float64),
        (16, "momentum", np.float64),
        (1, "gradient_descent", np.float64),
        (1, "momentum", np.float32),
        (16, "momentum", np.float32),
    ],
)
def test_linear_memory_is_exact_over_long_sequences(chunk_size, algorithm, dtype):
    """The triangular solve against the token recurrence; steps are smaller in longer chunks, to be stable."""
    case, time = Case("linear", algorithm=algorithm, chunk_size=chunk_size), 301
    params, rows = rules.random_params(case), rules.random_rows(case, 2, time)
    rows["step_size"] *= 8 if chunk_size == 1 else 1
    rows["forget"][0] *= 0.01
    answer = rules.run(case, "chunked", params, rows, dtype=dtype)
    for index in range(2):
        expected = rules.expect(case, params, rules.row(rows, index))
        rules.assert_answers(case, rules.row(answer, index), expected, 1e-10 if dtype == np.float64 else 1e-5)


def extreme_rows(case, time):
    """Gates at their ends; steps small enough to stay bounded where nothing is forgotten and momentum never fades."""
    rows = rules.random_rows(case, 8, time)
    rows["step_size"] *= 0.02
    rows["forget"][0], rows["momentum"][0] = 0, 1
    rows["step_size"][0] *= 0.01
    rows["forget"][1] = 1
    rows["forget"][2, ::3], rows["momentum"][2, 1::3] = 1, 0
    rows["step_size"][3] = 0
    rows["momentum"][4] = 0
    rows["forget"][5], rows["momentum"][5] = 0.9, 0.99
    rows["forget"][6], rows["momentum"][6] = 0.5, 0
    rows["forget"][7], rows["momentum"][7], rows["step_size"][7] = 1, 1, 0
    return rows


LONG_CHUNK = Case("residual_mlp", 2, chunk_size=64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, form, time, dtype",
    [
        (ONLINE, "chunked", 256, np.float64),
        (ONLINE, "chunked", 256, np.float32),
        (Case("linear", chunk_size=64), "chunked", 150, np.float32),
        (LONG_CHUNK, "recurrent", 150, np.float64),
        (LONG_CHUNK, "associative", 150, np.float64),
        (LONG_CHUNK, "chunked", 150, np.float64),
        (LONG_CHUNK, "chunked", 150, np.float32),
        (Case("residual_mlp", 2, chunk_size=256), "associative", 256, np.float32),
        (Case("residual_mlp", 2, chunk_size=256), "chunked", 256, np.float32),
    ],
    ids=str,
)
def test_extreme_gates(case, form, time, dtype):
    params, rows, probe = rules.random_params(case), extreme_rows(case, time), rules.random_probe(case, 8, time)
    answer = rules.run(case, form, params, rows, probe, dtype)
    for name, leaf in answer["gradients"].items():
        assert all(np.isfinite(part).all() for part in jax.tree.leaves(leaf)), f"gradient of {name}"
    for index in range(8):
        expected = rules.expect(case, params, rules.row(rows, index))
        rules.assert_answers(case, rules.row(answer, index), expected, 1e-10 if dtype == np.float64 else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case, form", PAIRS, ids=str)
def test_gates_in_log_space(case, form):
    """log_retention = -inf clears the memory and log_momentum = -inf the momentum, with finite gradients."""
    params, rows = rules.random_params(case), rules.row(rules.random_rows(case, 1, TIME), 0)
    rows["forget"][4], rows["momentum"][6] = 1, 0
    with np.errstate(divide="ignore"):
        gates = (np.log1p(-rows["forget"]), np.log(rows["momentum"]), rows["step_size"])

    @jax.jit
    def answer(params, gates, tokens):
        def objective(gates):
            reads, _ = memory.memorize(
                case.rule, params, memory.init_state(case.rule, params), *tokens, memory.Gates(*gates), form
            )
            return jnp.sum(reads**2), reads

        return jax.grad(objective, has_aux=True)(gates)

    with jax.enable_x64(True):
        tokens = tuple(rows[name] for name in ("queries", "keys", "values"))
        gradients, reads = answer(*jax.tree.map(jnp.asarray, (params, gates, tokens)))
        gradients = [np.asarray(leaf) for leaf in gradients]
    expected = rules.expect(case, params, rows)
    np.testing.assert_allclose(np.asarray(reads), expected["reads"], rtol=1e-10, atol=1e-12)
    assert all(np.isfinite(leaf).all() for leaf in gradients)
    np.testing.assert_allclose(gradients[0][4], 0, atol=1e-12)
    np.testing.assert_allclose(gradients[1][6], 0, atol=1e-12)


@pytest.mark.slow_but_for("chunked")
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_inputs(form):
    """bfloat16 tokens with float32 gates: the state stays float32 and the reads are those of the rounded tokens.

    Steps are small: larger ones, behind the layer norm, amplify the operands' rounding (2e-3) to several percent.
    """
    params, rows = rules.random_params(TITANS), rules.row(rules.random_rows(TITANS, 1, TIME), 0)
    rows["step_size"] *= 0.1
    tokens = [jnp.asarray(rows[name], jnp.bfloat16) for name in ("queries", "keys", "values")]
    rounded = {name: np.asarray(leaf, np.float64) for name, leaf in zip(rules.INPUTS, tokens, strict=False)}
    start = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    gates = memory.Gates.from_values(
        **{name: jnp.asarray(rows[name], jnp.float32) for name in ("forget", "momentum", "step_size")}
    )
    rule = TITANS.rule
    reads, state = jax.jit(lambda: memory.memorize(rule, start, memory.init_state(rule, start), *tokens, gates, form))()
    expected = rules.expect(TITANS, params, rows | rounded)["reads"]
    assert {leaf.dtype for leaf in (*state.weights, *state.momentum)} == {jnp.dtype("float32")}
    error = np.asarray(reads, np.float64) - expected
    assert np.sqrt(np.mean(error**2) / np.mean(expected**2)) <= 5e-3


def test_chunked_forms_no_weight_per_token():
    """No intermediate of the matmul form is as large as one gradient per token of a chunk."""
    head_dim, expansion, chunk_size = 16, 4, 16
    rule = memory.presets.titans(depth=2, expansion=expansion, chunk_size=chunk_size, residual=True)

    def reads(params, tokens, gate):
        gates = memory.Gates.from_values(forget=gate, momentum=gate, step_size=gate)
        return memory.memorize(rule, params, memory.init_state(rule, params), tokens, tokens, tokens, gates)[0]

    params = memory.init_params(rule, jax.random.key(0), head_dim)
    pending = [jax.make_jaxpr(reads)(params, jnp.ones((2 * chunk_size, head_dim)), jnp.ones(2 * chunk_size)).jaxpr]
    largest = 0
    while pending:
        current = pending.pop()
        for equation in current.eqns:
            largest = max([largest, *(variable.aval.size for variable in equation.outvars)])
            pending += jaxprs_in_params(equation.params)
    # The hidden activations of the whole call are 2 * chunk_size * 64 numbers, eight times fewer.
    assert largest < chunk_size * head_dim * expansion * head_dim
