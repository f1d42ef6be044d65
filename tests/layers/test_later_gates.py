"""Gates of the models after Miras' Table 1, against numpy written from their papers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from titans_jax.config import ConfigError, MemoryConfig, ModelConfig, gate_choices, memory_rule
from titans_jax.layers.memory_gates import MemoryGates
from titans_jax.layers.neural_memory import NeuralMemory, broadcast

CONFIG = ModelConfig(dim=8, num_heads=2, head_dim=4, depth=1, dtype="float64", memory=MemoryConfig(gate_rank=3))


def softplus(x):
    return np.log1p(np.exp(x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gates_of(preset, **memory):
    """(parameters by name, where the logits of each channel-wise gate are, x [b, t, dim], keys and values [b, t, h, d],
    what the module returns for them); everything is random."""
    config = dataclasses.replace(CONFIG, memory=dataclasses.replace(CONFIG.memory, preset=preset, **memory))
    generator = np.random.default_rng(0)
    module, found = MemoryGates(config, memory_rule(config.memory), rngs=nnx.Rngs(0)), {}
    for (name,), parameter in nnx.to_flat_state(nnx.state(module)):
        found[name] = generator.normal(size=parameter.shape)
        parameter[...] = jnp.asarray(found[name])
    x, keys, values = (generator.normal(size=shape) for shape in ((1, 5, 8), (1, 5, 2, 4), (1, 5, 2, 4)))
    return found, module.channels, x, keys, values, module(*map(jnp.asarray, (x, keys, values)))


def channel_logits(parameters, at, x):
    """Linear in x through a low rank, [b, t, h, d]."""
    low = x / np.sqrt(8) @ parameters["down"]
    return np.einsum("btr,rhd->bthd", low, parameters["up"][:, at]) + parameters["channel_bias"][at]


def scalar_logits(parameters, x):
    """[b, t, h, 1]."""
    return np.einsum("btd,dhk->bthk", x / np.sqrt(8), parameters["kernel"]) + parameters["bias"]


def kimi_retention(parameters, logits):
    """g = -exp(A_log) softplus(f(x) + bias), A of a head and the bias of a channel (arXiv 2510.26692)."""
    return -np.exp(parameters["key_log_rate"])[:, None] * softplus(logits + parameters["key_step_bias"])


def test_kimi_delta_attention():
    """beta = sigmoid; keys and values are the projections."""
    with jax.enable_x64(True):
        parameters, channels, x, keys, values, (left_keys, left_values, gates) = gates_of("kimi_delta_attention")
        assert channels == ("key",)
        expected = kimi_retention(parameters, channel_logits(parameters, 0, x))
        np.testing.assert_allclose(gates.log_key_retention, expected, rtol=1e-12)
        np.testing.assert_allclose(gates.step_size, sigmoid(scalar_logits(parameters, x)), rtol=1e-12)
        np.testing.assert_array_equal(gates.log_retention, 0)
        np.testing.assert_array_equal(left_keys, keys)
        np.testing.assert_array_equal(left_values, values)


def test_rates_and_steps_start_where_those_of_mamba2_do():
    """A of the heads from 1 to 16, softplus of the biases of the channels from 0.001 to 0.1."""
    config = dataclasses.replace(CONFIG, memory=MemoryConfig(preset="kimi_delta_attention"))
    with jax.enable_x64(True):
        module = MemoryGates(config, memory_rule(config.memory), rngs=nnx.Rngs(0))
        np.testing.assert_allclose(np.exp(np.array(module.key_log_rate[...])), [1, 16], rtol=1e-12)
        steps = softplus(np.array(module.key_step_bias[...]))
        np.testing.assert_allclose(steps[:, [0, -1]], [[0.001, 0.1]] * 2, rtol=1e-10)


def test_gated_deltanet_2():
    """Retention as Kimi's; b and w are sigmoids of every channel, and w is in the values (arXiv 2605.22791)."""
    with jax.enable_x64(True):
        parameters, channels, x, keys, values, (left_keys, left_values, gates) = gates_of("gated_deltanet_2")
        assert channels == ("key", "erase", "write")
        retention, erase, write = (channel_logits(parameters, at, x) for at in range(3))
        np.testing.assert_allclose(gates.log_key_retention, kimi_retention(parameters, retention), rtol=1e-12)
        np.testing.assert_allclose(gates.erase, sigmoid(erase), rtol=1e-12)
        np.testing.assert_allclose(left_values, sigmoid(write) * values, rtol=1e-12)
        np.testing.assert_array_equal(left_keys, keys)
        np.testing.assert_array_equal(gates.step_size, 1)


def test_a_fresh_yaad_clips_hardly_any_error():
    """Of values as large as its reads, for tokens that it has not seen."""
    config = ModelConfig(
        dim=64, num_heads=2, head_dim=32, depth=1, dtype="float32", memory=MemoryConfig(preset="yaad", chunk_size=4)
    )
    layer = NeuralMemory(config, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (4, 64, 64))
    features, state = layer.features(x, broadcast(layer.start(), 4))
    reads = layer.retrieve(state.memory.weights, features["key"])
    _, _, gates = layer.gates(x, features["key"], features["value"])
    errors = np.abs(reads - features["value"])
    assert errors.mean() > 0.8 and (errors > gates.bias_gate).mean() < 0.01


@pytest.mark.parametrize("maps", [{"gate_rank": None}, {"gate_maps": "own"}])
def test_maps_of_channel_wise_gates(maps):
    """A full map of each gate, or d -> k -> d of each (Miras, appendix: channel-wise gates)."""
    with jax.enable_x64(True):
        parameters, channels, x, keys, values, (_, _, gates) = gates_of("yaad", **maps)
        assert channels == ("key", "value", "key_step", "value_step", "bias_gate")
        logits = []
        for at in range(5):
            if "gate_rank" in maps:
                each = np.einsum("btd,dhe->bthe", x / np.sqrt(8), parameters["full"][:, at])
            else:
                assert parameters["down"].shape == (8, 5, 3)
                each = np.einsum("btr,rhe->bthe", x / np.sqrt(8) @ parameters["down"][:, at], parameters["up"][:, at])
            logits.append(each + parameters["channel_bias"][at])
        np.testing.assert_allclose(gates.log_key_retention, np.log(sigmoid(-logits[0])), rtol=1e-12)
        np.testing.assert_allclose(gates.log_value_retention, np.log(sigmoid(-logits[1])), rtol=1e-12)
        np.testing.assert_allclose(gates.key_step_size, 2 * sigmoid(logits[2]), rtol=1e-12)
        np.testing.assert_allclose(gates.value_step_size, 2 * sigmoid(logits[3]), rtol=1e-12)
        np.testing.assert_allclose(gates.bias_gate, softplus(logits[4]), rtol=1e-12)


def test_a_full_map_starts_as_wide_as_a_low_rank_one():
    """Logits over tokens of unit variance have a deviation of 0.1, times what cutting a normal at two deviations leaves
    of its own, 0.88, for each of the maps."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 400, 64)), jnp.float32)
    for maps, drawn in (({}, 2), ({"gate_rank": None}, 1), ({"gate_maps": "own"}, 2)):
        memory = MemoryConfig(preset="yaad", **maps)
        config = ModelConfig(dim=64, num_heads=2, head_dim=32, depth=1, dtype="float32", memory=memory)
        module = MemoryGates(config, memory_rule(memory), rngs=nnx.Rngs(0))
        assert float(jnp.std(module.mapped(x / 8))) == pytest.approx(0.1 * 0.88**drawn, rel=0.1), maps


def test_longhorn_with_a_step_of_every_value_channel():
    """Of the head a softplus, times twice the sigmoid of a channel's logit (arXiv 2407.14207: one of every channel)."""
    with jax.enable_x64(True):
        parameters, channels, x, _, _, (_, _, gates) = gates_of("longhorn", channel_steps="value")
        assert channels == ("value_step",) and gates.key_step_size is None
        np.testing.assert_allclose(gates.step_size, softplus(scalar_logits(parameters, x)), rtol=1e-12)
        expected = 2 * sigmoid(channel_logits(parameters, 0, x))
        np.testing.assert_allclose(gates.value_step_size, expected, rtol=1e-12)
        assert gates_of("longhorn")[-1][-1].value_step_size is None


@pytest.mark.parametrize(
    "preset, why",
    [
        ("atlas", "weighs whole tokens"),
        ("delta_product", "takes 2 steps a token"),
        ("mesa", "keeps sums of all tokens, which take no steps"),
        ("preconditioned_delta", "has steps of the channels of its keys"),
    ],
)
def test_a_step_of_every_channel_that_cannot_be_is_refused(preset, why):
    memory = MemoryConfig(preset=preset, channel_steps="value")
    with pytest.raises(ConfigError) as error:
        gate_choices(memory)
    assert str(error.value) == f"model.memory.channel_steps is value; use None, as {preset} {why}"
    gate_choices(dataclasses.replace(memory, channel_steps="none"))


def test_sides_of_steps():
    """True goes with the channels that are forgotten; a word says its own; none takes them away."""
    sides = lambda preset, **memory: gate_choices(MemoryConfig(preset=preset, **memory)).step_sides  # noqa: E731
    assert sides("yaad") == ("key", "value") and sides("memora") == ("value",) and sides("titans") == ()
    assert sides("yaad", channel_steps="none") == () and sides("yaad", channel_retention="key") == ("key",)
    assert sides("titans", channel_steps="both") == ("key", "value") and sides("gla", channel_steps="key") == ("key",)


def test_comba():
    """p = b k and q - d k, b and d of the head; retention and step as Gated DeltaNet (arXiv 2506.02475)."""
    with jax.enable_x64(True):
        parameters, channels, x, keys, values, (left_keys, left_values, gates) = gates_of("comba")
        assert channels == ()
        logits = np.split(scalar_logits(parameters, x), 2, axis=-1)
        steps = softplus(logits[0] + parameters["step_bias"][:, None])
        np.testing.assert_allclose(gates.log_retention, -np.exp(parameters["log_rate"])[:, None] * steps, rtol=1e-12)
        np.testing.assert_allclose(gates.step_size, sigmoid(logits[1]), rtol=1e-12)
        part = sigmoid(parameters["erase"])[:, None]
        np.testing.assert_allclose(gates.erase, np.broadcast_to(part, keys.shape), rtol=1e-12)
        np.testing.assert_array_equal(left_keys, keys)
        np.testing.assert_array_equal(left_values, values)


def test_queries_of_comba_are_corrected():
    config = dataclasses.replace(CONFIG, memory=MemoryConfig(preset="comba"))
    generator = np.random.default_rng(0)
    queries, keys = generator.normal(size=(2, 1, 5, 2, 4))
    with jax.enable_x64(True):
        module = MemoryGates(config, memory_rule(config.memory), rngs=nnx.Rngs(0))
        np.testing.assert_allclose(
            module.queries(*map(jnp.asarray, (queries, keys))), queries - 0.02 * keys, rtol=1e-12
        )
        module.correction[...] = jnp.asarray([0.5, -2.0])
        corrected = module.queries(*map(jnp.asarray, (queries, keys)))
    np.testing.assert_allclose(corrected, queries - np.array([0.5, -2.0])[:, None] * keys, rtol=1e-12)
