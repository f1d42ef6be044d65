"""Steps of whole chunks, made orthogonal: their own oracle in every form, cut anywhere; and forgetting to the start."""

import dataclasses

import jax
import jax.numpy as jnp
import muon_oracle
import numpy as np
import pytest
from miras_inputs import (
    FORMS,
    HEAD_DIM,
    MODELS,
    TIME,
    draw_atlas,
    draw_titans,
    error,
    memorize,
    muon_model,
    random_params,
    rows,
    run,
)

from titans_jax import memory
from titans_jax.memory.pallas import entry

TOLERANCE = 1e-10
L2, DECAY = memory.biases.l2(), memory.retentions.decay()
LINEAR, RESIDUAL = memory.architectures.linear(), memory.architectures.residual_mlp(2, 2)


def rule_of(window=1, chunk_size=4, **choices):
    algorithm = memory.algorithms.muon(window, choices.pop("coefficients", "muon"))
    rule = memory.MemoryRule(RESIDUAL, L2, DECAY, algorithm, chunk_size)
    return dataclasses.replace(rule, **choices)


def model_of(window=1, chunk_size=4, **choices):
    rule = rule_of(window, chunk_size, **choices)
    return muon_model(rule, lambda generator, time: draw_atlas(generator, time, window))


def one_matrix(inputs):
    """Inputs with the gates of the first of two matrices."""
    gates = ("retention", "momentum", "step_size")
    return inputs | {name: inputs[name][:, :1] for name in gates}


TO_START = model_of(3, forget_to_start=True, bound_slope=True)


@pytest.mark.slow_but_for("*-chunked")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["atlas", "lact"])
def test_is_its_oracle_however_it_is_cut(name, form):
    """By one program: the row as it is, after a split at every token, and documents that begin with chunks. What an
    open chunk has gathered stays in the momentum if it is closed early."""
    model = MODELS[name]
    inputs = model.inputs()
    expected = model.expect(inputs, model.params)
    masked = rows(model, inputs)
    masked["mask"] = np.tril(np.ones((TIME + 1, TIME), bool), -1)
    reads, states = run(model.rule, form, model.params, masked, batched=True)
    assert error(reads[TIME], expected) <= TOLERANCE
    inside = jax.tree.map(lambda leaf: jnp.asarray(leaf[6], jnp.result_type(leaf[6])), states)
    np.testing.assert_allclose(inside.step_total, np.sum(inputs["step_size"][4:6], axis=0), rtol=1e-6)
    closed = memory.start_chunk(inside)
    assert closed.position == 0 and not np.any(closed.step_total) and all(map(np.any, closed.momentum))
    resumed = rows(model, inputs)
    for count in range(TIME + 1):
        for key in (*inputs, "mask"):
            resumed[key][count] = np.roll(resumed[key][count], -count, axis=0)
        resumed["mask"][count, TIME - count :] = False
    reads, _ = run(model.rule, form, model.params, resumed | {"state": states}, batched=True)
    for count in range(TIME):
        assert error(reads[count, : TIME - count], expected[count:]) <= TOLERANCE

    packed = rows(model, inputs)
    packed["resets"][0, [4, 12]] = True
    packed["mask"][0, 10:12] = False
    reads, _ = run(model.rule, form, model.params, packed, batched=True)
    for begin, end in ((0, 4), (4, 10), (12, TIME)):
        alone = model.expect({key: leaf[begin:end] for key, leaf in inputs.items()}, model.params)
        assert error(reads[0, begin:end], alone) <= TOLERANCE


@pytest.mark.parametrize("form", ["recurrent", "chunked"])
def test_a_chunk_of_one_token_is_the_papers_rule(form):
    """W_t = a W_{t-1} + theta_t NS(S_t) at every token, written out for a linear memory."""
    rule = rule_of(chunk_size=1, architecture=LINEAR)
    inputs = one_matrix(draw_titans(np.random.default_rng(3), TIME))
    inputs["step_size"] = 10 * inputs["step_size"]
    params = random_params(rule)
    (weights,), momentum, expected = params["weights"], 0.0, []
    for t in range(TIME):
        key, retention, eta, theta = (inputs[x][t] for x in ("keys", "retention", "momentum", "step_size"))
        momentum = eta * momentum - theta * np.outer(key, key @ weights - inputs["values"][t])
        weights = retention * weights + theta * muon_oracle.newton_schulz(momentum, muon_oracle.MUON)
        expected.append(inputs["queries"][t] @ weights)
    assert error(run(rule, form, params, inputs)[0], np.array(expected)) <= TOLERANCE


@pytest.mark.slow_but_for("to the start-chunked")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(TO_START, id="to the start"),
        pytest.param(model_of(coefficients="lact"), id="no window"),
        pytest.param(model_of(4, chunk_size=1 + 3), id="a chunk's window"),
    ],
)
def test_other_rules_are_their_oracle(model, form):
    inputs = model.inputs()
    assert error(run(model.rule, form, model.params, inputs)[0], model.expect(inputs, model.params)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("retention", [memory.retentions.elastic_net(0.001), memory.retentions.norm_power(4.0)])
def test_retentions_with_one_slope_follow_the_step(retention):
    rule = rule_of(retention=retention)
    params, inputs = random_params(rule), draw_atlas(np.random.default_rng(1), 9, 1)
    recurrent, chunked = (run(rule, form, params, inputs)[0] for form in ("recurrent", "chunked"))
    assert error(chunked, recurrent) <= TOLERANCE


def test_no_token_sees_a_step_that_holds_a_later_one():
    """To the bit, and tokens before a chunk's last see none of the chunk's own writes."""
    model = MODELS["atlas"]
    inputs = rows(model, model.inputs())
    for row in range(TIME):
        for key in ("keys", "values"):
            inputs[key][row, row] = -inputs[key][row, row]
    reads, _ = run(model.rule, "chunked", model.params, inputs, batched=True)
    for row in range(TIME):
        stepped = row | 3  # the last token of the changed one's chunk
        np.testing.assert_array_equal(reads[row, :stepped], reads[-1, :stepped])
        if stepped < TIME:
            assert np.any(reads[row, stepped] != reads[-1, stepped])


def test_the_outer_gradient_is_the_finite_difference():
    """Through Newton-Schulz, by all that is learned or computed, of a linear memory, which compiles soonest."""
    rule, generator = rule_of(3, architecture=LINEAR, forget_to_start=True), np.random.default_rng(5)
    inputs, weigh = one_matrix(draw_atlas(generator, 10)), generator.normal(size=(10, HEAD_DIM))
    with jax.enable_x64(True):
        point = jax.tree.map(jnp.asarray, (random_params(rule), inputs))

        def loss(point):
            return jnp.sum(memorize(rule, "chunked", *point)[0] * weigh)

        quickly = {"xla_backend_optimization_level": 0}
        compiled = jax.jit(jax.value_and_grad(loss), compiler_options=quickly)
        _, gradient = compiled(point)
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
            assert np.all(np.isfinite(leaf)) and np.any(leaf != 0), jax.tree_util.keystr(path)
        direction = jax.tree.map(lambda x: jnp.asarray(generator.normal(size=x.shape)) * jnp.abs(x), point)
        inner = sum(jnp.vdot(g, d) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
        ahead, behind = (
            compiled(jax.tree.map(lambda x, d: x + sign * 1e-6 * d, point, direction))[0]  # noqa: B023
            for sign in (1, -1)
        )
        np.testing.assert_allclose(inner, (ahead - behind) / 2e-6, rtol=1e-6)


def refuse(**choices):
    return lambda: rule_of(**choices)


def call(**changes):
    rule = rule_of()
    params = memory.init_params(rule, jax.random.key(0), HEAD_DIM)
    state, zeros = memory.init_state(rule, params), jnp.zeros((3, HEAD_DIM))
    if changes.pop("state", None):
        state = memory.init_state(memory.presets.titans(expansion=2), params)
    gates = {"log_retention": jnp.zeros(3), "log_momentum": jnp.zeros(3), "step_size": jnp.ones(3)}
    return lambda: memory.memorize(rule, params, state, zeros, zeros, zeros, memory.Gates(**gates | changes))


REFUSED = {
    "window is 0: it must be an integer of 1 or more, for example 16.": refuse(window=0),
    "coefficients is 'cubic': it must be 'muon' or 'lact'.": refuse(coefficients="cubic"),
    "algorithm is Muon(": refuse(retention=memory.retentions.kullback_leibler()),
    "window is 5: a window reaches at most into the chunk before": refuse(window=5),
    "gates.log_momentum is None: Muon(": call(log_momentum=None),
    "state.step_total is None: Muon(": call(state="titans"),
    "gates has a channel-wise retention or step size: Muon(": call(log_key_retention=jnp.zeros((3, HEAD_DIM))),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refusals(sentence):
    with pytest.raises(ValueError) as refused:
        REFUSED[sentence]()
    assert str(refused.value).startswith(sentence) and len(str(refused.value).splitlines()) == 1


def test_no_closed_form_runs_it():
    gate = jnp.ones((1, 1))
    for rule in (rule_of(chunk_size=8), rule_of(architecture=LINEAR), rule_of(chunk_size=1, architecture=LINEAR)):
        assert not any(closed.supports(rule, memory.Gates(gate, gate, gate)) for closed in entry.EXACT)
    hebbian = rule_of(architecture=LINEAR, bias=memory.biases.dot_product())
    assert not hebbian.exact and dataclasses.replace(hebbian, chunk_size=1).exact
