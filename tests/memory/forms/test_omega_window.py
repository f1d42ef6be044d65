"""The Omega rule's window in every form: its own oracle, cut anywhere, and what it is where it has one token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from miras_inputs import (
    FORMS,
    HEAD_DIM,
    TIME,
    draw_omega,
    draw_titans,
    error,
    memorize,
    omega_model,
    random_params,
    rows,
    run,
)

from titans_jax import memory
from titans_jax.memory.forms.omega_window import window_matrix

TOLERANCE = 1e-10
L2, DECAY = memory.biases.l2(), memory.retentions.decay()
LINEAR, RESIDUAL = memory.architectures.linear(), memory.architectures.residual_mlp(2, 2)


def rule_of(window, has_momentum, architecture=RESIDUAL, chunk_size=4, **choices):
    algorithm = memory.algorithms.omega(window, has_momentum)
    rule = memory.MemoryRule(architecture, L2, DECAY, algorithm, chunk_size)
    return dataclasses.replace(rule, **choices)


def model_of(window, has_momentum, architecture=RESIDUAL):
    model = omega_model(rule_of(window, has_momentum, architecture), window, has_momentum)
    if architecture is RESIDUAL:
        return model
    one = lambda inputs: inputs | {name: inputs[name][:, :1] for name in ("retention", "step_size")}  # noqa: E731
    return dataclasses.replace(model, draw=lambda generator, time: one(draw_omega(generator, time, window)))


MODELS = {
    "a chunk's window, momentum": model_of(4, True),
    "one token before, linear": model_of(2, False, LINEAR),
}


def test_weights_of_a_window_stand_on_a_band():
    weights = np.random.default_rng(0).uniform(size=(5, 2)).astype(np.float32)
    expected = np.zeros((5, 7), np.float32)
    for t in range(5):
        expected[t, t + 2] = 1
        for j in (1, 2):
            expected[t, t + 2 - j] = weights[t, j - 1]
    np.testing.assert_array_equal(window_matrix(jnp.asarray(weights)), expected)


@pytest.mark.slow_but_for("*-chunked")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_is_its_oracle_however_it_is_cut(name, form):
    """By one program: the row as it is, after a split at every token, and documents that begin with chunks."""
    model = MODELS[name]
    inputs = model.inputs()
    expected = model.expect(inputs, model.params)
    masked = rows(model, inputs)
    masked["mask"] = np.tril(np.ones((TIME + 1, TIME), bool), -1)
    reads, states = run(model.rule, form, model.params, masked, batched=True)
    assert error(reads[TIME], expected) <= TOLERANCE
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


def test_the_outer_gradient_is_that_of_the_recurrence():
    """By everything that is learned or computed, the state's window too, with momentum and a window of a chunk."""
    model = MODELS["a chunk's window, momentum"]
    inputs = {name: leaf[:10] for name, leaf in model.inputs().items()}
    weigh = np.random.default_rng(5).normal(size=(10, HEAD_DIM))
    with jax.enable_x64(True):
        last = draw_omega(np.random.default_rng(6), 3)
        window = memory.state.WindowTokens(last["keys"], last["values"], last["step_size"])

        def gradient(form):
            def loss(point):
                params, inputs, window = point
                state = dataclasses.replace(memory.init_state(model.rule, params), window=window)
                return jnp.sum(memorize(model.rule, form, params, inputs | {"state": state})[0] * weigh)

            point = jax.tree.map(jnp.asarray, (model.params, inputs, window))
            return jax.jit(jax.grad(loss), compiler_options={"xla_backend_optimization_level": 0})(point)

        chunked, recurrent = gradient("chunked"), gradient("recurrent")
        for path, leaf in jax.tree_util.tree_leaves_with_path(recurrent):
            assert np.any(leaf != 0), jax.tree_util.keystr(path)
        for got, expected in zip(jax.tree.leaves(chunked), jax.tree.leaves(recurrent), strict=True):
            assert error(got, expected) <= TOLERANCE


@pytest.mark.slow_but_for("forget_to_start-chunked")
@pytest.mark.parametrize("form", ["associative", "chunked"])
@pytest.mark.parametrize(
    "choices",
    [
        {"forget_to_start": True, "bound_slope": True},
        {"retention": memory.retentions.elastic_net(0.001)},
        {"retention": memory.retentions.norm_power(4.0)},
    ],
    ids=lambda choices: next(iter(choices)),
)
def test_other_choices_are_the_recurrent_form(choices, form):
    rule = rule_of(3, True, **choices)
    params, inputs = random_params(rule), draw_omega(np.random.default_rng(1), TIME, momentum=True)
    expected = run(rule, "recurrent", params, inputs)[0]
    assert error(run(rule, form, params, inputs)[0], expected) <= TOLERANCE


@pytest.mark.parametrize("has_momentum", [True, False])
def test_a_window_of_one_token_is_titans_to_the_bit(has_momentum):
    titans = memory.presets.titans(expansion=2, chunk_size=4, momentum=has_momentum)
    params, inputs = random_params(titans), draw_titans(np.random.default_rng(1), TIME)
    for one, other in zip(
        *(jax.tree.leaves(run(rule, "chunked", params, inputs)) for rule in (rule_of(1, has_momentum), titans)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def test_weights_of_zero_are_titans():
    titans = memory.presets.titans(expansion=2, chunk_size=4)
    params, inputs = random_params(titans), draw_titans(np.random.default_rng(1), TIME)
    nothing = inputs | {"window_weight": np.zeros((TIME, 2))}
    expected = run(titans, "chunked", params, inputs)[0]
    assert error(run(rule_of(3, True), "chunked", params, nothing)[0], expected) <= TOLERANCE
    some = inputs | {"window_weight": np.full((TIME, 2), 0.5)}
    assert error(run(rule_of(3, True), "chunked", params, some)[0], expected) > 1e-3


def test_a_bfloat16_window_is_carried_exactly():
    """Its keys and values come back as they were, in the wider dtype of a state."""
    rule = rule_of(3, False)
    draw = np.random.default_rng(0)
    tokens = [jnp.asarray(draw.normal(size=(4, HEAD_DIM)), jnp.bfloat16) for _ in range(3)]
    params = memory.init_params(rule, jax.random.key(0), HEAD_DIM)
    gates = memory.Gates.from_values(jnp.zeros(4), None, jnp.full(4, 0.01), window_weight=jnp.ones((4, 2)))
    state = memory.init_state(rule, params)
    _, state = jax.jit(lambda *tokens: memory.memorize(rule, params, state, *tokens, gates))(*tokens)
    np.testing.assert_array_equal(state.window.keys, tokens[1][2:].astype(jnp.float32))
    np.testing.assert_array_equal(state.window.values, tokens[2][2:].astype(jnp.float32))
    assert state.window.step_size.shape == (2, 2) and np.all(state.window.step_size == np.float32(0.01))


def call(rule, **changes):
    params = memory.init_params(rule, jax.random.key(0), HEAD_DIM)
    state, zeros = changes.pop("state", memory.init_state(rule, params)), jnp.zeros((3, HEAD_DIM))
    gates = {"log_retention": jnp.zeros(3), "log_momentum": None, "step_size": jnp.ones(3)}
    return memory.memorize(rule, params, state, zeros, zeros, zeros, memory.Gates(**gates | changes))


WEIGHTS = {"window_weight": jnp.ones((3, 2))}
REFUSED = {
    "window is 0: it must be an integer of 1 or more, for example 16.": lambda: rule_of(0, True),
    "window is 2.0: it must be an integer of 1 or more, for example 16.": lambda: rule_of(2.0, True),
    "window is 5: a window reaches at most into the chunk before, so it must be in [1, 4], the chunk_size.": (
        lambda: rule_of(5, True)
    ),
    "window is 3: it needs a bias without a gate of its own": lambda: rule_of(3, True, bias=memory.biases.huber()),
    "window is 2: it needs a bias without": lambda: rule_of(2, True, retention=memory.retentions.kullback_leibler()),
    "gates.window_weight is None: Omega(window=3, has_momentum=False) needs one weight per token and token before it, "
    "shape (3, 2).": lambda: call(rule_of(3, False)),
    "gates.window_weight is given: Omega(window=1, has_momentum=False) needs None.": (
        lambda: call(rule_of(1, False), window_weight=jnp.ones((3, 0)))
    ),
    "gates.window_weight has shape (3, 3): it must be (3, 2).": (
        lambda: call(rule_of(3, False), window_weight=jnp.ones((3, 3)))
    ),
    "state.window has 0 tokens: Omega(window=3, has_momentum=False) needs 2": (
        lambda: call(rule_of(3, False), **WEIGHTS, state=titans_state())
    ),
    "gates has a channel-wise retention or step size: Omega(window=3, has_momentum=False) weighs whole tokens": (
        lambda: call(rule_of(3, False), **WEIGHTS, log_key_retention=jnp.zeros((3, HEAD_DIM)))
    ),
    "window_weight has the value 2: it must be in [0, 1].": (
        lambda: memory.Gates.from_values(jnp.zeros(3), None, jnp.ones(3), window_weight=jnp.full((3, 2), 2.0))
    ),
}


def titans_state():
    rule = memory.presets.titans(expansion=2, momentum=False)
    return memory.init_state(rule, memory.init_params(rule, jax.random.key(0), HEAD_DIM))


@pytest.mark.parametrize("sentence", REFUSED)
def test_refusals(sentence):
    with pytest.raises(ValueError) as refused:
        REFUSED[sentence]()
    assert str(refused.value).startswith(sentence) and len(str(refused.value).splitlines()) == 1
