"""Gate choices: words and gates of one's own, the logits they need, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax.memory import GateChoices, LearnedGate, presets
from titans_jax.memory.rule.gate_choices import KEY_GATES, RETENTION_GATES, STEP_SIZE_GATES, starts_of_heads

HEAD_DIM = 4


def logits(name):
    preset = presets.PRESETS[name]
    rule = preset.make()
    return preset.gates.scalar_logits(rule, HEAD_DIM), preset.gates.channel_logits(rule)


@pytest.mark.parametrize(
    "name, scalars, channels",
    [
        ("titans", {"retention": (2, -8.0), "step_size": (2, 0.0), "momentum": (2, 0.0)}, {}),
        ("mamba2", {"rate": (1, 0.0)}, {}),
        ("gated_deltanet", {"rate": (1, 0.0), "step_size": (1, 0.0)}, {}),
        ("delta_product", {"rate": (1, 0.0), "step_size": (2, 0.0)}, {}),
        ("retnet", {}, {}),
        ("gla", {}, {"key": 0.0}),
        ("hgrn2", {}, {}),
        ("rwkv7", {}, {"key": -3.0, "removal_step": 0.0}),
        ("kimi_delta_attention", {"step_size": (1, 0.0)}, {"key": 0.0}),
        ("gated_deltanet_2", {}, {"key": 0.0, "erase": 0.0, "write": 0.0}),
    ],
)
def test_logits_of_presets(name, scalars, channels):
    """How many a head and a token, where they start, and in which order they are drawn."""
    found = logits(name)
    assert found == (scalars, channels) and [list(part) for part in found] == [list(scalars), list(channels)]


def test_gates_that_all_matrices_share():
    """One of each, as many inner steps as before, and channels as they were."""
    choices = dataclasses.replace(presets.PRESETS["titans"].gates, shared=True)
    rule = presets.titans(depth=3)
    found = choices.scalar_logits(rule, HEAD_DIM)
    assert found == {"retention": (1, -8.0), "step_size": (1, 0.0), "momentum": (1, 0.0)}
    own = dataclasses.replace(presets.PRESETS["yaad"].gates, shared=True)
    assert own.channel_logits(presets.yaad()) == presets.PRESETS["yaad"].gates.channel_logits(presets.yaad())
    product = dataclasses.replace(presets.PRESETS["delta_product"].gates, shared=True)
    assert product.scalar_logits(presets.delta_product(), HEAD_DIM)["step_size"] == (2, 0.0)


def test_a_huber_threshold_is_per_channel_and_starts_at_five():
    scalars, channels = logits("yaad")
    assert list(scalars) == ["retention", "step_size"]
    assert list(channels) == ["key", "value", "key_step", "value_step", "bias_gate"]
    assert jax.nn.softplus(channels["bias_gate"]) == pytest.approx(5)


def test_a_gate_of_ones_own_brings_its_function_and_its_start():
    own = LearnedGate(jnp.tanh, start=0.3, bounded=True)
    choices = GateChoices(retention=LearnedGate(jax.nn.log_sigmoid, 2.0), step_size=own, value=own)
    rule = presets.deltanet()
    assert choices.scalar_logits(rule, HEAD_DIM) == {"retention": (1, 2.0), "step_size": (1, 0.3)}
    assert choices.channel_logits(rule) == {"value": 0.3}
    assert choices.step_size_gate is own and choices.bounded and hash(choices) == hash(choices)


def test_the_word_forget_starts_where_the_choices_say():
    choices = GateChoices("forget", key="forget", value="gla", forget_bias=-8.0)
    starts = (choices.retention_gate.start, choices.key_gate.start, choices.value_gate.start)
    assert starts == (-8.0, -8.0, 0.0)


def test_heads_start_between_two_numbers():
    np.testing.assert_allclose(starts_of_heads((-7.0, -2.0), 6), [-7, -6, -5, -4, -3, -2], rtol=1e-12)
    assert starts_of_heads((-7.0, -2.0), 1).tolist() == [-4.5]
    assert starts_of_heads(-5.0, 2).tolist() == [-5, -5] and starts_of_heads(-5.0, 1).tolist() == [-5]


@pytest.mark.parametrize("table", [RETENTION_GATES, KEY_GATES], ids=["retention", "channel"])
def test_every_word_for_a_retention_keeps_at_most_all(table):
    x = jnp.linspace(-20.0, 20.0, 9)
    for gate in table.values():
        if hasattr(gate, "function"):
            log_retention = gate.function(x) if hasattr(gate, "start") else gate.function(jnp.arange(4.0), 4)
            assert np.all(np.isfinite(log_retention)) and np.all(log_retention <= 0)


def test_every_word_for_a_step_size_steps_forward():
    x = jnp.linspace(-20.0, 20.0, 9)
    for name, gate in STEP_SIZE_GATES.items():
        if name not in ("rate", "one"):
            assert np.all(gate.function(x) >= 0)
    np.testing.assert_allclose(STEP_SIZE_GATES["double"].function(jnp.zeros(1)), 1.0)
    np.testing.assert_array_equal(STEP_SIZE_GATES["one"].function(jnp.arange(3.0), 3), np.ones(3))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"retention": "forgets"}, "retention is 'forgets': it must be one of 'forget', 'rate'"),
        ({"step_size": None}, "step_size is None: it must be one of 'bounded'"),
        ({"key": "keep"}, "key is 'keep': it must be one of 'forget', 'gla', 'rwkv', 'rate', None, or a LearnedGate."),
        ({"keys": "both"}, "keys is 'both': it must be one of 'projected', 'complement', 'removal', 'rotated'."),
        ({"erase": "keys"}, "erase is 'keys': it must be one of 'all', 'channels', 'head'."),
        ({"preconditioned": True, "channel_steps": True}, "preconditioned is True"),
        ({"channel_steps": "all"}, "channel_steps is 'all': it must be one of True, False, 'key', 'value', 'both'."),
        ({"keys": "complement"}, "key is None"),
        ({"lower_bound": True}, "key is None"),
        ({"step_size": "rate"}, 'step_size is "rate": it is the step of a retention "rate"'),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError) as error:
        GateChoices(**fields)
    assert message in str(error.value)
