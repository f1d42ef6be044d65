"""Every memory rule inside a whole model: streaming equals training, and every parameter learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small

from titans_jax import memory
from titans_jax.config import ConfigError, MemoryConfig, gate_choices, memory_rule, sizes_values, skips_values
from titans_jax.memory.rule.presets import PRESETS


def model_of(preset, *pattern):
    return small.build(small.config(*pattern, memory={"preset": preset, "gate_rank": 4}, depth=len(pattern)))


def test_a_configuration_names_what_is_registered():
    for name, preset in PRESETS.items():
        published = {"forget_to": "zero", "bound_slope": False, "normalize_values": False, "scale_keys": False}
        config = MemoryConfig(preset=name, **published)
        assert name == preset.name and gate_choices(config) == preset.gates
        assert memory_rule(config) == preset.make()
    assert gate_choices(MemoryConfig(preset="mamba2")) == memory.GateChoices("rate", "rate")


def test_what_has_a_learned_start_forgets_to_it():
    """Unless told otherwise, and then its heads start to forget at different speeds."""
    for name, preset in PRESETS.items():
        config = MemoryConfig(preset=name)
        learned = preset.make().learned_start
        rule = preset.make()
        normed = dataclasses.replace(rule, forget_to_start=learned, bound_slope=rule.architecture.normalized)
        if not rule.retention.positive:
            normed = dataclasses.replace(normed, architecture=rule.architecture.with_scaled_keys())
        if name == "moneta":  # beyond an error of 1 its steps are bounded, too, unless its bias is named
            assert memory_rule(dataclasses.replace(config, bias="lp")) == normed
            normed = dataclasses.replace(normed, bias=memory.biases.lp(3.0, linear_from=1.0))
        assert memory_rule(config) == normed
        assert gate_choices(config).forget_bias == ((-7.0, -2.0) if learned else preset.gates.forget_bias)
        assert gate_choices(dataclasses.replace(config, forget_bias=-3.0)).forget_bias == -3.0


def test_values_behind_a_norm_are_sized_and_added():
    """Unless told otherwise; where weights are made of logits they are added even as projected. Where values are sized,
    steps with a bound are a sixth at first with momentum, and smaller than half for several matrices that read in
    chunks; an eighth for wide logits, and with momentum in long chunks or where their unit is not the error. A linear
    memory with a learned start adds values too, and its steps, which are limited, start small.
    """
    for name, preset in PRESETS.items():
        rule = preset.make()
        config, behind = MemoryConfig(preset=name), rule.architecture.normalized
        assert sizes_values(config) == skips_values(config) == behind
        told = dataclasses.replace(config, normalize_values=not behind)
        assert sizes_values(told) == (not behind)
        assert not behind or skips_values(told) == (name == "memora")
        for each in (config, told):
            first = preset.gates.step_size
            if first == "bounded" and sizes_values(each):
                several = "bounded_third" if len(rule.shapes(8)) > 1 else "bounded"
                first = "bounded_sixth" if rule.algorithm.has_momentum else several
            assert gate_choices(each).step_size == first
    for fields, first in (
        ({"chunk_size": 1}, "bounded_third"),
        ({"momentum": True}, "bounded_sixth"),
        ({"momentum": True, "step_unit": "head_dim"}, "bounded_low"),
        ({"momentum": True, "chunk_size": 64}, "bounded_low"),
        ({"retention": "chi_squared"}, "bounded_low"),
        ({"retention": "kullback_leibler(start_deviation=1.0)"}, "bounded_low"),
    ):
        assert gate_choices(MemoryConfig(preset="memora", **fields)).step_size == first
    for letter in ({"chunk_size": 1}, {"step_unit": "head_dim"}):
        assert gate_choices(MemoryConfig(preset="ttt_mlp", **letter)).step_size == "bounded"
    linear = MemoryConfig(architecture="linear")
    assert skips_values(linear) and not sizes_values(linear) and gate_choices(linear).step_size == "bounded_low"
    assert gate_choices(MemoryConfig(preset="yaad", architecture="linear")).step_size == "bounded_low"
    for letter in ({"bound_slope": False}, {"step_unit": "head_dim"}, {"chunk_size": 1}):
        assert gate_choices(dataclasses.replace(linear, **letter)).step_size == "bounded"
    several = MemoryConfig(preset="delta_product", normalize_values=True)
    assert sizes_values(several) and not skips_values(several)


def test_fields_of_a_configuration_set_arguments_of_the_parts_it_names():
    """All but L_q's exponent, which is below 2 where the configuration's is Moneta's, above 2."""
    config = MemoryConfig(preset="yaad", architecture="mlp", depth=3, expansion=2, bias="lp", p=1.5, chunk_size=7)
    rule = memory_rule(config)
    assert (rule.architecture, rule.bias) == (memory.architectures.mlp(3, 2), memory.biases.lp(1.5))
    assert rule.chunk_size == 7
    retention = lambda name: memory_rule(MemoryConfig(retention=name, q=5.0)).retention  # noqa: E731
    assert retention("norm_power") == memory.retentions.norm_power(5.0)
    assert retention("lq") == memory.retentions.lq()


def test_arguments_of_a_part_follow_its_name():
    made = memory_rule(MemoryConfig(bias="huber(delta=0.5, constant=True)", retention="lq(q=1.2)", preset="yaad"))
    assert (made.bias, made.retention) == (memory.biases.huber(0.5, constant=True), memory.retentions.lq(1.2))
    assert "bias_gate" not in gate_choices(MemoryConfig(preset="yaad")).channel_logits(made)


@pytest.mark.parametrize(
    "said, sentence",
    [
        ("lq(z=1)", "model.memory.retention is 'lq(z=1)', which takes q, not z"),
        ("lq(1.2)", "model.memory.retention is 'lq(1.2)'; use a name, or lq(argument=value)"),
        ("lq(q=print)", "model.memory.retention is 'lq(q=print)'; use a name, or lq(argument=value)"),
        ("lq(q=3)", "model.memory: q is 3: the mirror map of L_q needs 1 < q <= 2, for example 1.5"),
    ],
)
def test_arguments_that_a_part_does_not_take_are_refused(said, sentence):
    with pytest.raises(ConfigError) as refused:
        memory_rule(MemoryConfig(retention=said))
    assert str(refused.value) == sentence


@pytest.mark.parametrize("field", ["p", "q"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.5])
def test_moneta_s_exponents_are_finite_and_not_below_one(field, value):
    with pytest.raises(ConfigError, match=rf"^model\.memory: {field} is {value}: [^\n]*, for example \d$"):
        memory_rule(MemoryConfig(preset="moneta", **{field: value}))


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"bias": "huber(delta='a')"}, "bias is \"huber(delta='a')\", and delta is 'a'; use a number"),
        ({"bias": "huber(delta=True)"}, "bias is 'huber(delta=True)', and delta is True; use a number"),
        ({"bias": "huber(constant=3)"}, "bias is 'huber(constant=3)', and constant is 3; use True or False"),
        ({"bias": "lp(sharpness=[1])"}, "bias is 'lp(sharpness=[1])', and sharpness is [1]; use a number or None"),
        ({"retention": "lq(q=None)"}, "retention is 'lq(q=None)', and q is None; use a number"),
        ({"bias": "huber(delta=1e999)"}, "bias is 'huber(delta=1e999)', and delta is inf; use a finite number"),
        (
            {"retention": "f_divergence(g=3)"},
            "retention is 'f_divergence(g=3)', and g is no value that text can say; leave it out, or register a part "
            "of your own",
        ),
        (
            {"architecture": "residual_mlp(learned_scale=None)"},
            "architecture is 'residual_mlp(learned_scale=None)', and learned_scale is None; use True or False",
        ),
    ],
)
def test_arguments_of_a_part_have_their_kind(fields, sentence):
    with pytest.raises(ConfigError) as refused:
        memory_rule(MemoryConfig(**fields))
    assert str(refused.value) == f"model.memory.{sentence}"


def test_what_is_forgotten_can_be_said():
    def sides(**fields):
        choices = gate_choices(MemoryConfig(**fields))
        return choices.retention, choices.key, choices.value

    assert sides(preset="yaad") == ("forget", "forget", "forget")
    assert sides(preset="yaad", channel_retention="none") == ("forget", None, None)
    assert sides(preset="yaad", forget="never") == ("keep", None, None)
    assert sides(preset="titans", channel_retention="key") == ("forget", "forget", None)
    assert sides(preset="ttt_mlp") == ("forget", None, None) and sides(preset="gated_deltanet")[0] == "rate"
    for kept in ({"forget": "preset"}, {"forget": "never"}, {"forget_to": "zero"}):
        assert sides(preset="ttt_mlp", **kept) == ("keep", None, None)
    for name in ("hgrn2", "mamba2"):
        with pytest.raises(ConfigError, match=f"forget is never .* the gates of {name} cannot be changed so"):
            sides(preset=name, forget="never")
    with pytest.raises(
        ConfigError, match=r"^model\.memory\.forget is never; mamba3 forgets by what turns its keys: use auto$"
    ):
        sides(preset="mamba3", forget="never")


@pytest.mark.parametrize("one_matrix", [{"architecture": "linear"}, {"depth": 1}])
def test_a_matrix_with_momentum_that_forgets_by_both_sides_is_refused(one_matrix):
    both = MemoryConfig(channel_retention="both", **one_matrix)
    with pytest.raises(
        ConfigError, match=r"^model\.memory\.channel_retention is both, .* or model\.memory\.momentum False$"
    ):
        gate_choices(both)
    for works in ({"channel_retention": "key"}, {"momentum": False}):
        gate_choices(dataclasses.replace(both, **works))


@pytest.mark.parametrize("field, name, near", [("bias", "hubert", "huber"), ("retention", "decai", "decay")])
def test_a_name_that_nothing_is_registered_under_is_refused_with_the_nearest(field, name, near):
    with pytest.raises(ConfigError, match=rf"^model\.memory\.{field} is '{name}'; use .*; did you mean {near}\?$"):
        memory_rule(MemoryConfig(**{field: name}))


@pytest.mark.slow_but_for("gated_deltanet")
@pytest.mark.parametrize("preset", PRESETS)
def test_streaming_equals_training_and_every_parameter_learns(preset):
    """A prompt that ends inside a chunk, then token by token; float64."""
    with jax.enable_x64(True):
        model, tokens = model_of(preset, "lmm"), small.tokens(time=11)
        whole = small.forward(model, tokens)
        gradients = jax.jit(jax.grad(lambda model: jnp.sum(jnp.sin(model(tokens)))))(model)
        state = small.init_state(model, len(tokens))
        logits, state = small.extend(model, tokens[:, :6], state)
        pieces = [logits]
        for t in range(6, 11):
            logits, state = small.extend(model, tokens[:, t : t + 1], state)
            pieces.append(logits)
        np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, rtol=1e-9, atol=1e-9 * abs(whole).max())
        for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
            name = jax.tree_util.keystr(path)
            assert np.isfinite(gradient).all() and np.any(gradient != 0), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [
        {"bias": "value_shift"},
        {"bias": "mixture", "retention": "elastic_net"},
        {"preset": "deltanet", "architecture": "residual_mlp", "bias": "huber"},
        {"preset": "yaad", "bias": "huber_norm", "retention": "lq"},
        {"preset": "memora", "retention": "lagged_kullback_leibler"},
        {"preset": "moneta", "retention": "f_divergence", "momentum": True},
        {"preset": "moneta", "q": 3.0, "forget": "never"},
        {"preset": "moneta", "q": 3.0},
        {"preset": "yaad", "forget": "never", "channel_steps": "both"},
        {"preset": "memora", "retention": "chi_squared"},
        {"preset": "memora", "retention": "jensen_shannon"},
        {"preset": "memora", "retention": "alpha_divergence(alpha=0.3)"},
        {"preset": "titans", "channel_retention": "key"},
        {"preset": "titans", "architecture": "linear", "start": "zero"},
        {"preset": "titans", "architecture": "linear"},
        {"preset": "yaad", "architecture": "linear"},
        {"preset": "yaad", "shared_gates": True},
        {"preset": "longhorn", "channel_steps": "value"},
        {"preset": "yaad", "gate_rank": None},
        {"preset": "titans", "channel_steps": "both", "gate_maps": "own"},
        {"preset": "atlas", "architecture": "residual_gated_mlp", "retention": "weight_norm"},
    ],
    ids=lambda choices: "-".join(map(str, choices.values())),
)
def test_choices_combine(choices):
    """Miras: any of the four choices with any of the others, in a model that learns and streams."""
    with jax.enable_x64(True):
        model = small.build(small.config("lmm", memory={"gate_rank": 4} | choices, depth=1))
        tokens = small.tokens(time=11)
        whole = small.forward(model, tokens)
        gradients = jax.jit(jax.grad(lambda model: jnp.sum(jnp.sin(model(tokens)))))(model)
        first, state = small.extend(model, tokens[:, :6], small.init_state(model, len(tokens)))
        second, _ = small.extend(model, tokens[:, 6:], state)
        np.testing.assert_allclose(
            jnp.concatenate([first, second], axis=1), whole, rtol=1e-9, atol=1e-9 * abs(whole).max()
        )
        for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
            assert np.isfinite(gradient).all() and np.any(gradient != 0), jax.tree_util.keystr(path)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [("mac",), ("mag",), ("mal",), ("lmm", "window")])
@pytest.mark.parametrize("preset", ["memora", "rwkv7", "comba", "preconditioned_delta", "mamba3"])
def test_any_preset_in_any_block(preset, pattern):
    """Through segments, windows and hybrids: a rule with logits for a state, one with two steps a token, one with
    queries that keys correct, and two with a state of the layer's own."""
    assert_pieces_are_the_whole(preset, *pattern)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [("mag",), ("mal",), ("retrofit",), ("lmm", "window")])
def test_several_queries_a_token_in_any_block_but_mac(pattern):
    assert_pieces_are_the_whole("mamba3_mimo", *pattern)


def assert_pieces_are_the_whole(preset, *pattern):
    with jax.enable_x64(True):
        model, tokens = model_of(preset, *pattern), small.tokens(time=11)
        whole = small.forward(model, tokens)
        state, pieces = small.init_state(model, len(tokens)), []
        for begin, end in ((0, 9), (9, 10), (10, 11)):
            logits, state = small.extend(model, tokens[:, begin:end], state)
            pieces.append(logits)
        np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, rtol=1e-9, atol=1e-9 * abs(whole).max())
