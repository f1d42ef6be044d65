"""Linear memories in the fused form, forward and backward, compiled by the TPU compiler for absent machines."""

import functools

import jax
import jax.numpy as jnp
import pytest

from titans_jax import memory
from titans_jax.memory import presets
from titans_jax.tpu.hlo import Program
from titans_jax.tpu.topology import describe, find_topology

pytestmark = [pytest.mark.tpu_compiler, pytest.mark.slow]

pytest.importorskip("libtpu", reason="libtpu, which holds the TPU compiler, is not installed")

HEADS = 2


def compiled(topology, rule, time, head_dim, streamed, channels=()):
    """The program of the gradient of all reads.

    streamed: documents, and padding behind a state whose position is traced. channels: gates that every channel has.
    """
    mesh = jax.sharding.Mesh(describe(find_topology(topology))[:1], ("device",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=place)
    token, gate = shape((HEADS, time, head_dim), jnp.bfloat16), shape((HEADS, time), jnp.float32)
    matrices = (shape((HEADS, head_dim, head_dim), jnp.float32),)
    steps = rule.algorithm.steps
    written, stepped = (shape((*x.shape[:2], steps, *x.shape[2:]), x.dtype) if steps > 1 else x for x in (token, gate))
    inputs = {
        "tokens": (token, written, written),
        "gates": (gate, gate if rule.algorithm.has_momentum else None, stepped),
        "more": {name: shape((written if "step" in name else token).shape, jnp.float32) for name in channels},
    }
    if rule.bias.takes_gate:
        inputs["more"]["bias_gate"] = stepped
    flags = {"resets": shape((HEADS, time), bool), "mask": shape((HEADS, time), bool)} if streamed else {}
    if streamed:
        inputs |= {"state": (matrices, matrices if rule.algorithm.has_momentum else (), matrices)}
        flags |= {"position": shape((HEADS,), jnp.int32)}

    def head(inputs, weights, flags):
        params = {"weights": weights}
        state = memory.init_state(rule, params)
        if "state" in inputs:
            state = memory.MemoryState(*inputs["state"], flags["position"])
        gates = memory.Gates(*inputs["gates"], mask=flags.get("mask"), **inputs["more"])
        return memory.memorize(rule, params, state, *inputs["tokens"], gates, resets=flags.get("resets"))

    def loss(inputs, weights, flags):
        reads, state = jax.vmap(head)(inputs, weights, flags)
        return sum(jnp.sum(jnp.square(x)) for x in (reads, *state.weights, *state.momentum, *state.anchor))

    with jax.set_mesh(mesh):
        return Program(jax.jit(jax.grad(loss, (0, 1))).lower(inputs, matrices, flags).compile().as_text())


@pytest.mark.parametrize(
    "topology, head_dim", [("v5e:1x1", 96), ("v5p:2x2x1", 64), ("v6e:1x1", 48), ("tpu7x:2x2x1", 128)]
)
def test_generations_and_widths(topology, head_dim):
    """What "auto" stands for is the kernel: one forward and one backward, for all heads."""
    calls = compiled(topology, presets.gated_deltanet(), 96, head_dim, False).kernels()
    assert sorted((call.name.split(".")[0], times) for call, times in calls) == [
        ("memorize", 1),
        ("memorize_backward", 1),
    ]


@pytest.mark.parametrize("chunk_size", [1, 16])
def test_documents_padding_and_momentum(chunk_size):
    rule = presets.titans(1, chunk_size=chunk_size, residual=False)
    assert len(compiled("v5e:1x1", rule, 128, 64, True).kernels()) == 2


@pytest.mark.parametrize(
    "topology, name, channels",
    [
        ("v5e:1x1", "dfw", ("log_key_retention", "log_value_retention")),
        ("v6e:1x1", "rwkv7", ("log_key_retention", "key_step_size")),
        ("v5p:2x2x1", "gated_deltanet", ("log_key_retention",)),
    ],
)
def test_channels_that_forget_apart(topology, name, channels):
    """With documents and padding, too."""
    assert len(compiled(topology, presets.PRESETS[name].make(), 128, 64, True, channels).kernels()) == 2
