"""Steps that are limited, or small at first, so that no key that is written again and again makes a memory unstable
(memory/README.md, Gates)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from titans_jax.config import MemoryConfig, ModelConfig, gate_choices, memory_rule, step_size_bound
from titans_jax.layers.memory_gates import MemoryGates
from titans_jax.memory import init_params
from titans_jax.memory.step_unit import error_removed

HEAD_DIM = 4


def gates_of(**fields):
    """The gates of 200 random tokens [1, t, 2, ...] whose logits are random too, as they are and as the letter has
    them, and their steps as a share of the error in a fresh memory."""
    config = MemoryConfig(architecture="linear", gate_rank=3, max_step_size=4.0, **fields)
    made, draw = [], np.random.default_rng(0)
    x = draw.normal(size=(1, 200, 8))
    keys, values = draw.normal(size=(2, 1, 200, 2, HEAD_DIM))
    for memory in (config, dataclasses.replace(config, bound_slope=False)):
        model = ModelConfig(dim=8, num_heads=2, head_dim=HEAD_DIM, dtype="float64", memory=memory)
        module, draw = MemoryGates(model, memory_rule(memory), rngs=nnx.Rngs(0)), np.random.default_rng(1)
        for _, parameter in nnx.to_flat_state(nnx.state(module)):
            parameter[...] = jnp.asarray(draw.normal(size=parameter.shape))
        made.append(module(*map(jnp.asarray, (x, keys, values)))[2])
    unit = error_removed(memory_rule(config), HEAD_DIM)
    return *made, *(np.asarray(gates.step_size) * unit for gates in made)


@pytest.mark.parametrize("momentum", [True, False])
def test_a_chunks_step_removes_no_more_than_the_error(momentum):
    """With what momentum makes of it, and is what it was where it is smaller; nothing else changes."""
    with jax.enable_x64(True):
        gates, letter, share, free = gates_of(momentum=momentum, chunk_size=16)
        most = 1 - np.exp(gates.log_momentum) if momentum else 1
        np.testing.assert_allclose(share, np.minimum(free, most), rtol=1e-9)
        assert 0.1 < np.mean(free > most) < 0.9 or momentum
        for one, other in zip(
            *(jax.tree.leaves(dataclasses.replace(g, step_size=None)) for g in (gates, letter)), strict=True
        ):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("chunk_size", [1, 16])
def test_factors_of_channels_count(chunk_size):
    """The step of the channels with the largest factors, of key and value, is limited as one without factors is."""
    with jax.enable_x64(True):
        gates, letter, share, free = gates_of(momentum=False, chunk_size=chunk_size, channel_steps="both")
        largest = np.max(gates.key_step_size, -1) * np.max(gates.value_step_size, -1)
        assert np.max(largest) > 1.5
        most = 1 if chunk_size > 1 else 1 + np.exp(gates.log_retention)
        taken, wanted = share * largest[..., None], free * largest[..., None]
        np.testing.assert_allclose(taken, np.minimum(wanted, most), rtol=1e-9)
        assert np.mean(wanted > most) > 0.1


@pytest.mark.parametrize("channel_retention", ["none", "key", "value", "both"])
def test_token_by_token_no_key_makes_it_larger(channel_retention):
    """a W - theta k k^T W is no longer than W for any unit key, whatever each channel keeps, though steps turn it
    over; by the letter it is for many."""

    def growth(gates, share):
        keys = np.random.default_rng(2).normal(size=(200, 2, HEAD_DIM))
        keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
        kept = np.exp(gates.log_retention[0])
        one = np.ones((200, 2, HEAD_DIM))
        rows = one if gates.log_key_retention is None else np.exp(gates.log_key_retention[0])
        columns = one if gates.log_value_retention is None else np.exp(gates.log_value_retention[0])
        removed = share[0, ..., None] * keys[..., :, None] * keys[..., None, :]
        norms = [
            np.linalg.norm(
                np.eye(HEAD_DIM) * (kept * rows)[..., None] * columns[..., j, None, None] - removed, 2, (-2, -1)
            )
            for j in range(HEAD_DIM)
        ]
        return np.max(norms, axis=0)

    with jax.enable_x64(True):
        gates, letter, share, free = gates_of(momentum=False, chunk_size=1, channel_retention=channel_retention)
        assert np.max(growth(gates, share)) < 1 + 1e-9
        assert np.max(share) > 1 and np.mean(growth(letter, free) > 1) > 0.3


@pytest.mark.parametrize(
    "fields", [{"preset": "yaad"}, {"preset": "memora"}, {"preset": "titans"}, {"preset": "titans", "momentum": False}]
)
def test_a_first_write_overshoots_in_no_direction(fields):
    """From the direction in which a fresh memory loses most of its error, a first step, with what momentum of a half
    adds, removes less than twice the error; half of the largest step would remove more, which one key again and again
    would magnify."""
    config = MemoryConfig(**fields)
    model, rule = ModelConfig(dim=32, num_heads=2, head_dim=16, memory=config), memory_rule(config)

    def most_removed(key):
        """The largest eigenvalue of J D J^T, J the derivative of a read by the weights, D that of the weights by what
        is carried."""
        start, key = jax.random.split(key)
        params, key = init_params(rule, start, 16), jax.random.normal(key, (16,))

        def read(weights):
            x = key / jnp.linalg.norm(key)
            return rule.architecture.read(lambda i, x: x @ weights[i], params, x)

        def read_carried(carried):
            return read(rule.retention.weights(carried, params))

        gradients = jax.jacrev(read)(rule.retention.weights(params["weights"], params))
        moved = jax.vmap(lambda step: jax.jvp(read_carried, (params["weights"],), (step,))[1])(gradients)
        return jnp.linalg.eigvalsh((moved + moved.T) / 2)[-1]

    most = float(jnp.mean(jax.jit(jax.vmap(most_removed))(jax.random.split(jax.random.key(0), 64))))
    first = jax.nn.sigmoid(gate_choices(config).step_size_gate.start) * (2 if rule.algorithm.has_momentum else 1)
    assert 1 < step_size_bound(model) * first * most < 1.8 and step_size_bound(model) / 2 * most > 2
