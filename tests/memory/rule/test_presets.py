"""Every preset is its model's published recurrence, in every form; what the papers call equal is, the rest is not."""

import dataclasses

import jax
import jax.numpy as jnp
import miras_inputs
import miras_oracle as oracle
import numpy as np
import pytest
from miras_inputs import FORMS, HEAD_DIM, MODELS, TIME, deep_model, error, memorize, rows, run

from titans_jax import memory
from titans_jax.memory import presets

each_form = pytest.mark.parametrize("form", FORMS)
TOLERANCE = 1e-10
LEARNED = ("ttt_linear", "ttt_mlp", "titans", "omeganet", "atlas", "dla", "lact", "hope", "moneta", "yaad", "memora")
FAST = ("gla", "dfw", "gated_deltanet", "kimi_delta_attention", "rwkv7", "delta_product", "ttt_mlp", "yaad", "memora")


def library(name, form, **changes):
    """Reads of a model under some other inputs."""
    model = MODELS[name]
    return run(model.rule, form, model.params, model.inputs() | changes)[0]


def test_every_preset_has_an_oracle():
    """Every one of the package; other tests may have registered more."""
    modules = {module.__name__ for module in (presets, memory.later_presets, memory.atlas_presets)}
    made = {preset.make.__name__ for preset in presets.PRESETS.values() if preset.make.__module__ in modules}
    assert made == set(MODELS)


@pytest.mark.slow_but_for("*-chunked")
@each_form
@pytest.mark.parametrize("name", MODELS)
def test_preset_is_its_published_recurrence(name, form):
    """By the program that `test_channels` also streams through, which saves compiling two of each."""
    model = MODELS[name]
    inputs = model.inputs()
    reads, _ = run(model.rule, form, model.params, rows(model, inputs), batched=True)
    expected = model.expect(inputs, model.params)
    assert error(reads, np.broadcast_to(expected, reads.shape)) <= TOLERANCE


@pytest.mark.slow_but_for("chunked")
@each_form
def test_deep_linear_attention_over_a_window_is_its_published_recurrence(form):
    """ATLAS' SWDT, as far as notes on the paper define it: `dla` by the Omega rule."""
    model = miras_inputs.dla_model(window=3)
    inputs = model.inputs()
    expected = model.expect(inputs, model.params)
    assert error(run(model.rule, form, model.params, inputs)[0], expected) <= TOLERANCE
    assert error(MODELS["dla"].expect(inputs, model.params), expected) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_preset_in_the_fast_path(name):
    """One row at a static position, without resets and mask, of every path that the chunked form takes."""
    model = MODELS[name]
    inputs = model.inputs()
    assert error(run(model.rule, "chunked", model.params, inputs)[0], model.expect(inputs, model.params)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, TIME + 3])
@pytest.mark.parametrize(
    "name, form, draw, extra",
    [
        ("ttt_mlp", "recurrent", miras_inputs.draw_ttt, ()),
        ("moneta", "chunked", miras_inputs.draw_deep, (3.0, 4.0)),
        ("memora", "chunked", miras_inputs.draw_memora, ("simplex_size",)),
    ],
)
def test_the_chunk_is_part_of_the_model(name, form, draw, extra, chunk_size):
    """Exact at every token, and gradients of the start all along: the oracle's numbers, which differ."""
    model = deep_model(name, draw, chunk_size, *extra, expansion=2)
    other = deep_model(name, draw, 4, *extra, expansion=2)
    inputs = model.inputs()
    expected = model.expect(inputs, model.params)
    assert error(run(model.rule, form, model.params, inputs)[0], expected) <= TOLERANCE
    assert error(other.expect(inputs, model.params), expected) > 1e-4


@pytest.mark.slow
def test_mesa_is_the_same_solution_whatever_its_chunk():
    """The preset's own chunk of 64, and Sherman-Morrison where nothing is forgotten."""
    model = MODELS["mesa"]
    inputs = model.inputs() | {"retention": np.ones(TIME)}
    ridge = np.exp(model.params["log_ridge"])
    expected = oracle.mesa_sherman_morrison(
        inputs["queries"], inputs["keys"], inputs["values"], inputs["step_size"], ridge
    )
    assert error(model.expect(inputs, model.params), expected) <= TOLERANCE
    assert error(run(presets.mesa(), "chunked", model.params, inputs)[0], expected) <= TOLERANCE


@pytest.mark.slow
def test_mesa_in_several_tiles_of_a_chunk():
    """Values and gradients; the second chunk is not full, and a token in its first tile forgets all before it."""
    model, generator = MODELS["mesa"], np.random.default_rng(7)
    inputs = model.inputs(84)
    inputs["retention"][60] = 0
    rule, weigh = presets.mesa(chunk_size=48), generator.normal(size=(84, HEAD_DIM))
    assert error(run(rule, "chunked", model.params, inputs)[0], model.expect(inputs, model.params)) <= TOLERANCE

    def gradient(form):
        def loss(point):
            params = {"weights": model.params["weights"], "log_ridge": point["log_ridge"]}
            return jnp.sum(memorize(rule, form, params, point)[0] * weigh)

        return jax.jit(jax.grad(loss))(inputs | {"log_ridge": model.params["log_ridge"]})

    with jax.enable_x64(True):
        chunked, recurrent = gradient("chunked"), gradient("recurrent")
        for name in (*inputs, "log_ridge"):
            assert error(chunked[name], recurrent[name]) <= TOLERANCE, name


def linear_titans(bias=None):
    """Titans with M(x) = x W, exact at every token, from zero."""
    rule = presets.titans(depth=1, residual=False, chunk_size=1)
    return rule if bias is None else dataclasses.replace(rule, bias=bias)


def linear_titans_reads(inputs, forget, step_size, bias=None):
    gates = {"retention": 1 - forget, "momentum": np.zeros(TIME), "step_size": step_size}
    tokens = {name: inputs[name] for name in ("queries", "keys", "values")}
    return run(linear_titans(bias), "chunked", {"weights": (np.zeros((HEAD_DIM,) * 2),)}, tokens | gates)[0]


def test_titans_without_momentum_is_gated_deltanet_only_if_it_forgets_nothing():
    """The error is judged before forgetting or after it; one step apart by (1 - a) beta k^T k W (memory/README.md, The
    rule)."""
    inputs = MODELS["gated_deltanet"].inputs()
    nothing, beta, a = np.zeros(TIME), inputs["step_size"], inputs["retention"]
    kept = library("gated_deltanet", "chunked", retention=np.ones(TIME))
    assert error(linear_titans_reads(inputs, nothing, beta), kept) <= TOLERANCE
    delta = library("deltanet", "chunked", **(inputs | {"retention": np.ones(TIME)}))
    assert error(linear_titans_reads(inputs, nothing, beta), delta) <= TOLERANCE

    titans, gated = linear_titans_reads(inputs, 1 - a, beta), library("gated_deltanet", "chunked")
    weights = beta[0] * np.outer(inputs["keys"][0], inputs["values"][0])  # the same in both, as they start from zero
    query, key = inputs["queries"][1], inputs["keys"][1]
    gap = (1 - a[1]) * beta[1] * (query @ key) * (key @ weights)
    np.testing.assert_allclose(gated[1] - titans[1], gap, rtol=1e-9, atol=1e-14)
    assert error(titans, gated) > 0.01


@each_form
@pytest.mark.parametrize("name", ("gated_deltanet", "delta_product"))
def test_what_is_forgotten_before_the_error_is_the_change_since_the_start(name, form):
    """With a learned start M_0 and forgetting to it, W' = M_0 + a (W - M_0), e = k W' - v, W = W' - b k^T e; further
    steps of a token forget nothing."""
    model = MODELS[name]
    inputs = model.inputs()
    start = np.random.default_rng(3).normal(size=(HEAD_DIM, HEAD_DIM))
    rule = dataclasses.replace(model.rule, learned_start=True, forget_to_start=True)
    reads, _ = run(rule, form, {"weights": (start,)}, inputs)
    steps, weights, expected = rule.algorithm.steps, start, []
    keys, values = (inputs[part].reshape(TIME, steps, HEAD_DIM) for part in ("keys", "values"))
    for t, step_sizes in enumerate(np.reshape(inputs["step_size"], (TIME, steps))):
        weights = start + inputs["retention"][t] * (weights - start)
        for key, value, step_size in zip(keys[t], values[t], step_sizes, strict=True):
            weights = weights - step_size * np.outer(key, key @ weights - value)
        expected.append(inputs["queries"][t] @ weights)
    assert error(reads, np.stack(expected)) <= TOLERANCE


def test_titans_with_a_dot_product_and_nothing_else_is_linear_attention():
    inputs = MODELS["linear_attention"].inputs()
    reads = linear_titans_reads(inputs, np.zeros(TIME), np.ones(TIME), memory.biases.dot_product())
    assert error(reads, library("linear_attention", "chunked")) <= TOLERANCE


def test_titans_without_momentum_or_forgetting_is_ttt():
    model, titans = MODELS["ttt_mlp"], MODELS["titans"]
    inputs = model.inputs()
    expected = run(model.rule, "chunked", model.params, inputs)[0]
    off = {"momentum": np.zeros((TIME, 2)), "retention": np.ones((TIME, 2))}
    steps = {"step_size": np.repeat(inputs["step_size"][:, None], 2, axis=1)}
    assert error(run(titans.rule, "chunked", model.params, inputs | off | steps)[0], expected) <= TOLERANCE
    assert error(run(titans.rule, "chunked", model.params, titans.inputs())[0], expected) > 1e-3


def test_longhorn_is_deltanet_with_the_implicit_step():
    inputs = MODELS["longhorn"].inputs()
    theta = inputs["step_size"]
    step = theta / (1 + theta * np.sum(inputs["keys"] ** 2, axis=1))
    assert error(library("deltanet", "chunked", step_size=step), library("longhorn", "chunked")) <= TOLERANCE
    assert error(library("deltanet", "chunked"), library("longhorn", "chunked")) > 0.01


@pytest.mark.slow_but_for("chunked-sides1", "recurrent-sides0")
@each_form
@pytest.mark.parametrize("sides", [("value_step_size",), ("value_step_size", "key_step_size")])
def test_longhorn_with_a_step_of_every_channel(sides, form):
    """Column j of W is argmin theta_j (k w - v_j)^2 + sum_i (w_i - w'_i)^2 / m_i, by its normal equations; theta_j = 0
    leaves it alone. The steps of the paper are per value channel; m is 1 there."""
    model, inputs = MODELS["longhorn"], MODELS["longhorn"].inputs()
    generator = np.random.default_rng(3)
    inputs |= {name: generator.uniform(0.2, 3.0, (TIME, HEAD_DIM)) for name in sides}
    inputs["value_step_size"][2, 1] = 0.0
    held = 1 / inputs.get("key_step_size", np.ones((TIME, HEAD_DIM)))
    W, expected = np.zeros((HEAD_DIM, HEAD_DIM)), np.zeros((TIME, HEAD_DIM))
    for t in range(TIME):
        k, v = inputs["keys"][t], inputs["values"][t]
        for j in range(HEAD_DIM):
            theta = inputs["step_size"][t] * inputs["value_step_size"][t, j]
            W[:, j] = np.linalg.solve(np.diag(held[t]) + theta * np.outer(k, k), held[t] * W[:, j] + theta * k * v[j])
        expected[t] = inputs["queries"][t] @ W
    assert error(run(model.rule, form, model.params, inputs)[0], expected) <= TOLERANCE
    # DeltaNet with these steps is another memory.
    assert error(run(MODELS["deltanet"].rule, form, model.params, inputs)[0], expected) > 0.01


def test_kimi_delta_attention_with_equal_channels_is_gated_deltanet():
    inputs = MODELS["gated_deltanet"].inputs()
    a = inputs["retention"]
    channels = {"key_retention": np.repeat(a[:, None], HEAD_DIM, axis=1), "retention": np.ones(TIME)}
    expected = library("gated_deltanet", "chunked")
    assert error(library("kimi_delta_attention", "chunked", **(inputs | channels)), expected) <= TOLERANCE


def test_delta_product_of_one_step_is_gated_deltanet():
    assert presets.delta_product(steps=1) == presets.gated_deltanet()


def memora_reads(retention, form="recurrent", chunk_size=1, **channels):
    """(package, eq 27 on log W) with the gradients of chunks' starts; retention(t, i) is what eq 27 multiplies log W of
    matrix i with."""
    model = deep_model("memora", miras_inputs.draw_memora, chunk_size, "simplex_size", expansion=2)
    inputs, params = model.inputs(), model.params
    sizes = params["simplex_size"]
    inputs = {name: inputs[name] for name in ("queries", "keys", "values")} | {
        "retention": np.full(TIME, 0.9),
        "step_size": np.full(TIME, 0.1),
        "key_retention": np.ones((TIME, HEAD_DIM)),
        "value_retention": np.ones((TIME, HEAD_DIM)),
        **channels,
    }
    weights = [c * oracle.softmax(z) for z, c in zip(params["weights"], sizes, strict=True)]
    step = oracle.kullback_leibler_rule(lambda t, i: 0.9 * retention(t, i), inputs["step_size"], sizes)
    tokens = (inputs[name] for name in ("queries", "keys", "values"))
    expected = oracle.token_rule(*tokens, weights, params["norm_scale"], step, chunk_size)
    return run(model.rule, form, params, inputs)[0], expected


def test_memora_carries_logits_as_eq_27_carries_weights():
    """Equal while retention is constant in a softmax slice, which runs over inputs; not if it differs inside one."""
    a = np.random.default_rng(4).uniform(0.3, 1.0, (TIME, HEAD_DIM))
    reads, expected = memora_reads(lambda t, i: 1.0)
    assert error(reads, expected) <= TOLERANCE
    reads, expected = memora_reads(lambda t, i: a[t][None, :] if i == 1 else 1.0, value_retention=a)
    assert error(reads, expected) <= TOLERANCE
    reads, expected = memora_reads(lambda t, i: a[t][:, None] if i == 0 else 1.0, key_retention=a)
    assert error(reads, expected) > 1e-4


@pytest.mark.slow_but_for("chunked")
@each_form
def test_every_token_of_a_chunk_reads_the_weights_of_eq_27(form):
    """Exactly, given the gradients: no read inside a chunk is an approximation."""
    a = np.random.default_rng(4).uniform(0.3, 1.0, (TIME, HEAD_DIM))
    reads, expected = memora_reads(lambda t, i: a[t][None, :] if i == 1 else 1.0, form, 5, value_retention=a)
    assert error(reads, expected) <= TOLERANCE


def test_matrix_models_start_from_zero_and_deep_ones_are_learned():
    for name, preset in presets.PRESETS.items():
        make = preset.make
        assert make().learned_start == (name in LEARNED)
        assert make().algorithm.has_momentum == (name in ("titans", "atlas", "lact"))
    assert not any(np.any(w) for w in memory.init_params(presets.gla(), jax.random.key(0), HEAD_DIM)["weights"])
