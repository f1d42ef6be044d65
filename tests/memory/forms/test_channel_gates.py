"""Gates of every channel in every form, extreme ones over long blocks, and every preset as a stream."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import miras_inputs
import miras_oracle as oracle
import numpy as np
import pytest
from miras_inputs import FORMS, HEAD_DIM, MODELS, TIME, error, random_params, rows, run

from titans_jax import memory
from titans_jax.memory import presets

each_form = pytest.mark.parametrize("form", FORMS)
each_model = pytest.mark.parametrize("name", MODELS)
TOLERANCE = 1e-10
L2 = memory.biases.l2()


def rule_of(architecture, algorithm, chunk_size):
    return memory.MemoryRule(architecture, L2, memory.retentions.decay(), algorithm, chunk_size)


LINEAR, RESIDUAL = memory.architectures.linear(), memory.architectures.residual_mlp(2, 2)
DESCENT, MOMENTUM = memory.algorithms.gradient_descent(), memory.algorithms.momentum()
BOTH = ("key_retention", "value_retention")
STEPS = ("key_step_size", "value_step_size")
CASES = {
    "linear-key": (rule_of(LINEAR, DESCENT, 1), BOTH[:1]),
    "linear-value": (rule_of(LINEAR, DESCENT, 1), BOTH[1:]),
    "linear-all": (rule_of(LINEAR, DESCENT, 4), BOTH + STEPS),
    "linear-momentum-key": (rule_of(LINEAR, MOMENTUM, 1), BOTH[:1] + STEPS),
    "linear-momentum-value": (rule_of(LINEAR, MOMENTUM, 4), BOTH[1:]),
    "residual-momentum-all": (rule_of(RESIDUAL, MOMENTUM, 4), BOTH + STEPS),
}


@pytest.mark.slow_but_for("linear-all-chunked", "residual-momentum-all-chunked")
@each_form
@pytest.mark.parametrize("case", CASES)
def test_channel_wise_gates(case, form):
    """Retention of inputs acts on the rows of the first matrix, of outputs on the columns of the last; so do steps."""
    rule, names = CASES[case]
    params = random_params(rule)
    matrices = len(params["weights"])
    generator = np.random.default_rng(2)
    inputs = miras_inputs.draw_deep(generator, TIME, matrices, 0.02 if matrices > 1 else 0.5)
    inputs |= {name: generator.uniform(0.3, 1.0, (TIME, HEAD_DIM)) for name in names}
    if rule.algorithm.has_momentum:
        inputs["momentum"] = generator.uniform(0.1, 0.9, (TIME, matrices))
    reads, _ = run(rule, form, params, inputs)

    def expect(gates):
        arguments = (inputs["queries"], inputs["keys"], inputs["values"], params["weights"], params.get("norm_scale"))
        return oracle.descend(*arguments, lambda r, t: r, chunk_size=rule.chunk_size, **gates)

    gates = miras_inputs.gates(inputs)
    assert error(reads, expect(gates)) <= TOLERANCE
    for name in names:  # each of them tells
        assert error(reads, expect({key: gate for key, gate in gates.items() if key != name})) > 1e-5


def test_momentum_of_a_linear_memory_takes_one_side():
    """Retention of rows and of columns of one matrix does not separate under momentum; without it, it does."""
    both = {name: np.full((TIME, HEAD_DIM), 0.5) for name in BOTH} | {"momentum": np.full(TIME, 0.5)}
    inputs = miras_inputs.draw_deltanet(np.random.default_rng(0), TIME) | both
    rule = rule_of(LINEAR, MOMENTUM, 1)
    with pytest.raises(ValueError, match="log_key_retention and gates.log_value_retention") as refusal:
        run(rule, "chunked", random_params(rule), inputs)
    assert len(str(refusal.value).splitlines()) == 1


def test_a_momentum_gate_that_nothing_uses_changes_nothing():
    """Plain descent ignores it, whatever the channels do."""
    rule = rule_of(LINEAR, DESCENT, 4)
    generator = np.random.default_rng(0)
    inputs = miras_inputs.draw_deltanet(generator, TIME)
    inputs |= {name: generator.uniform(0.3, 1.0, (TIME, HEAD_DIM)) for name in BOTH}
    plain = run(rule, "recurrent", random_params(rule), inputs)[0]
    unused = run(rule, "recurrent", random_params(rule), inputs | {"momentum": np.full(TIME, 0.5)})[0]
    np.testing.assert_array_equal(unused, plain)


@pytest.mark.slow_but_for("chunked")
@each_form
def test_a_slope_of_every_channel(form):
    """Of an affine bias; at 1 it is L2's."""
    rule = rule_of(LINEAR, DESCENT, 1)
    affine = dataclasses.replace(rule, bias=memory.biases.affine())
    inputs = miras_inputs.draw_deltanet(np.random.default_rng(4), TIME)
    slopes = np.random.default_rng(5).uniform(0.3, 1.0, (TIME, HEAD_DIM))
    params = random_params(rule)
    np.testing.assert_allclose(
        run(affine, form, params, inputs | {"bias_gate": np.ones_like(slopes)})[0],
        run(rule, "recurrent", params, inputs)[0],
        rtol=1e-10, atol=1e-12,
    )  # fmt: skip
    reads, expected = (run(affine, f, params, inputs | {"bias_gate": slopes})[0] for f in (form, "recurrent"))
    np.testing.assert_allclose(reads, expected, rtol=1e-10, atol=1e-12)


# A block of 64 tokens in float32: e^(K_t - K_i) taken apart would overflow at 0.5^-64 and far before at 1e-6.

LONG = 64
BLOCKS = {
    "dfw": (presets.dfw(), BOTH),
    "kimi": (presets.gated_deltanet(), BOTH[:1]),
    "residual": (rule_of(memory.architectures.residual_mlp(1), DESCENT, 64), BOTH),
    "momentum": (rule_of(LINEAR, MOMENTUM, 64), BOTH[:1]),
}
EXTREMES = ("half", "one millionth", "zero and one")


def retention_of(kind, generator):
    if kind == "half":
        return np.full((LONG, HEAD_DIM), 0.5)
    if kind == "one millionth":
        return np.full((LONG, HEAD_DIM), 1e-6)
    return generator.choice([0.0, 1.0, 1e-6], (LONG, HEAD_DIM), p=[0.1, 0.8, 0.1])


def block(name):
    """(rule, params, rows of float32 inputs, one per extreme)."""
    rule, sides = BLOCKS[name]
    generator = np.random.default_rng(3)
    drawn = []
    for kind in EXTREMES:
        row = miras_inputs.draw_deltanet(generator, LONG)
        row["step_size"] *= 0.05 if name == "residual" else 0.5
        row |= {side: retention_of(kind, generator) for side in sides}
        if rule.algorithm.has_momentum:
            row["momentum"] = np.full(LONG, 0.5)
        drawn.append(row | {"retention": np.ones(LONG)})
    return rule, random_params(rule), jax.tree.map(lambda *leaves: np.stack(leaves), *drawn)


@pytest.mark.slow
@pytest.mark.parametrize("name, form", [*((name, "chunked") for name in BLOCKS), ("dfw", "fused"), ("kimi", "fused")])
def test_extreme_retention_in_float32(name, form):
    rule, params, inputs = block(name)
    expected = run(rule, "recurrent", params, inputs, np.float64, batched=True)[0]
    reads = run(rule, form, params, inputs, np.float32, batched=True)[0]
    assert np.isfinite(reads).all()
    for row, kind in enumerate(EXTREMES):
        assert error(reads[row].astype(np.float64), expected[row]) <= 1e-5, kind


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dfw", "kimi", "residual"])
def test_outer_gradients_through_extreme_retention_are_finite_and_right(name):
    """By every input, gates in logarithms: float32 in the chunked form against float64 in the recurrent form."""
    rule, params, inputs = block(name)
    probe = np.random.default_rng(5).normal(size=(LONG, HEAD_DIM))

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(form, params, inputs, probe):
        def objective(inputs, probe):
            return jnp.sum(miras_inputs.memorize(rule, form, params, inputs)[0] * probe)

        found = jax.vmap(jax.grad(objective), in_axes=(0, None))(inputs, probe)
        # d/d log a = a d/da: by a itself, 1e-6 of it, no float32 gradient would have digits.
        return {k: g * inputs[k] if k in miras_inputs.RETENTIONS else g for k, g in found.items()}

    def gradients(form, dtype):
        with jax.enable_x64(dtype == np.float64):
            arrays = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), (params, inputs, probe))
            return jax.tree.map(np.asarray, gradient(form, *arrays))

    found, expected = gradients("chunked", np.float32), gradients("recurrent", np.float64)
    for key in inputs:
        assert np.isfinite(found[key]).all(), key
        for row, kind in enumerate(EXTREMES):
            scale = np.sqrt(np.mean(expected[key][row] ** 2))
            gap = np.sqrt(np.mean((found[key][row] - expected[key][row]) ** 2))
            # A digit less than reads, for twice the operations; a gradient below 1e-3 is the others' rounding.
            assert gap <= 1e-4 * max(scale, 1e-3), (key, kind)


# Streams.


@functools.cache
def expected_from(name, begin, end):
    """The oracle's reads of a document [begin, end) of the model's inputs."""
    model = MODELS[name]
    return model.expect({key: leaf[begin:end] for key, leaf in model.inputs().items()}, model.params)


@functools.cache
def states_after(name, form):
    """(reads, states) of rows that are padding from token 0, 1, .. TIME on: the state after every number of tokens."""
    model = MODELS[name]
    masked = rows(model, model.inputs())
    masked["mask"] = np.tril(np.ones((TIME + 1, TIME), bool), -1)
    return run(model.rule, form, model.params, masked, batched=True)


@pytest.mark.slow
@each_form
@each_model
def test_padding_changes_nothing(name, form):
    """Reads before it are the oracle's; it holds real tokens, so a leak into the state shows in the next test."""
    reads, states = states_after(name, form)
    for count in range(1, TIME + 1):
        assert error(reads[count, :count], expected_from(name, 0, TIME)[:count]) <= TOLERANCE
    for got, start in zip(states.weights, MODELS[name].params["weights"], strict=True):
        np.testing.assert_allclose(got[0], start, rtol=1e-13)


@pytest.mark.slow
@each_form
@each_model
def test_resume_at_every_token(name, form):
    """Row s goes on from the state after s tokens, and is padded at its end."""
    model = MODELS[name]
    _, states = states_after(name, form)
    resumed = rows(model, model.inputs())
    for count in range(TIME + 1):
        for key in (*model.inputs(), "mask"):
            resumed[key][count] = np.roll(resumed[key][count], -count, axis=0)
        resumed["mask"][count, TIME - count :] = False
    reads, _ = run(model.rule, form, model.params, resumed | {"state": states}, batched=True)
    for count in range(TIME):
        assert error(reads[count, : TIME - count], expected_from(name, 0, TIME)[count:]) <= TOLERANCE


@pytest.mark.slow
@each_form
@each_model
def test_documents_are_read_as_if_alone(name, form):
    """Row r begins a document at token r, the last row at tokens 3, 4 and 9; off the grid of longer chunks the parallel
    forms are never silently wrong."""
    model = MODELS[name]
    packed = rows(model, model.inputs())
    packed["resets"][np.arange(TIME), np.arange(TIME)] = True
    packed["resets"][TIME, [3, 4, 9]] = True
    reads, _ = run(model.rule, form, model.params, packed, batched=True)
    for row in range(TIME + 1):
        borders = sorted({0, *np.flatnonzero(packed["resets"][row])})
        if form != "recurrent" and any(border % model.rule.chunk_size for border in borders):
            assert np.isnan(reads[row]).all()
            continue
        for begin, end in zip(borders, [*borders[1:], TIME], strict=True):
            assert error(reads[row, begin:end], expected_from(name, begin, end)) <= TOLERANCE


@pytest.mark.slow
def test_every_preset_with_a_matrix_memory_takes_documents_anywhere():
    """Their chunk is one token, or, for Mesa, whatever is asked: its solution depends on no chunk."""
    for name, preset in presets.PRESETS.items():
        rule = preset.make()
        assert rule.learned_start or rule.chunk_size == 1 or name == "mesa"
    assert dataclasses.replace(presets.mesa(), chunk_size=1).exact
