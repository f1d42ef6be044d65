"""Memories that are read and never written: nothing of a sequence reaches them, in any block or preset."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from flax import nnx

from titans_jax import memory
from titans_jax.layers import NeuralMemory
from titans_jax.models import without_writes

# One of each family: what is carried (weights, sums, logits), where from (a learned start or zero), steps per token,
# and a retention gate that acts at a chunk's end whatever the gates say.
FAMILIES = {
    "titans": {},
    "forget_to_start": {"forget_to": "start"},
    "elastic_net": {"retention": "elastic_net"},
    "moneta": {"preset": "moneta"},
    "yaad": {"preset": "yaad"},
    "memora": {"preset": "memora"},
    "lagged": {"preset": "memora", "retention": "lagged_kullback_leibler"},
    "f_divergence": {"preset": "moneta", "retention": "f_divergence"},
    "ttt_linear": {"preset": "ttt_linear"},
    "retnet": {"preset": "retnet"},
    "gated_deltanet": {"preset": "gated_deltanet"},
    "delta_product": {"preset": "delta_product"},
    "rwkv7": {"preset": "rwkv7"},
    "mesa": {"preset": "mesa"},
}


def both(config):
    """A small model, and the same one without writes."""
    model = small.build(config)
    graphdef, params = nnx.split(model)
    return model, nnx.merge(without_writes(graphdef), params)


@pytest.mark.slow_but_for("titans", "elastic_net", "gated_deltanet")
@pytest.mark.parametrize("family", FAMILIES)
def test_reads_are_those_of_the_start(family):
    """`memorize` without writes is `memory.retrieve` at the initial state, head by head; the state stays there."""
    config = small.config("lmm", memory={"gate_rank": 4, "value_skip": False} | FAMILIES[family], depth=1)
    with jax.enable_x64(True):
        layer = jax.jit(lambda: NeuralMemory(config, rngs=nnx.Rngs(0)))()
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 11, config.dim)))
        (written, _), _, _ = jax.jit(lambda layer, x: layer.memorize(x, layer.init_state(2)))(layer, x)
        layer.writes = False

        def run(layer, x):
            start = layer.init_state(2)
            (reads, _), after, report = layer.memorize(x, start)
            queries, _ = layer.query(x, start.tails["query"])
            return reads, start.memory, after.memory, report, queries

        reads, start, after, report, queries = jax.jit(run)(layer, x)
        jax.tree.map(np.testing.assert_array_equal, start, after)
        assert report == {}
        for head in range(config.num_heads):
            params = jax.tree.map(lambda leaf, head=head: leaf[head], layer.params())
            state = memory.init_state(layer.rule, params)
            expected = memory.retrieve(layer.rule, params, state, queries[:, :, head])
            np.testing.assert_allclose(reads[:, :, head], expected, rtol=1e-12, atol=1e-12)
        assert np.abs(reads - written).max() > 1e-6


@pytest.mark.slow_but_for("mac")
@pytest.mark.parametrize("kind", ["lmm", "mac", "mag", "mal", "retrofit"])
def test_streaming_equals_training_and_no_memory_moves(kind):
    """A prompt that ends inside a chunk and a segment, then token by token; float64."""
    with jax.enable_x64(True):
        model, without = both(small.config(kind))
        tokens = small.tokens()
        whole = small.forward(without, tokens)
        state, pieces = small.init_state(without, len(tokens)), []
        start = carried(state)
        for begin, end in ((0, 13), *((t, t + 1) for t in range(13, small.TIME))):
            logits, state = small.extend(without, tokens[:, begin:end], state)
            pieces.append(logits)
        np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, rtol=1e-9, atol=1e-9 * abs(whole).max())
        jax.tree.map(np.testing.assert_array_equal, carried(state), start)
        assert np.abs(whole - small.forward(model, tokens)).max() > 1e-6
        packed = jnp.repeat(jnp.asarray([1, 1, 2, 2, 0], jnp.int32), small.SEGMENT // 2)[None, : small.TIME]
        packed = jnp.broadcast_to(packed, tokens.shape)
        assert jnp.isfinite(small.forward_packed(without, tokens, packed)).all()


def carried(state):
    """The fast weights of all memories of a state."""
    is_memory = lambda leaf: isinstance(leaf, memory.MemoryState)  # noqa: E731
    return [leaf.weights for leaf in jax.tree.leaves(state, is_leaf=is_memory) if is_memory(leaf)]


def test_the_parameters_are_the_same_tree():
    graphdef, params = nnx.split(small.build(small.config("mac", "window", dtype="float32")))
    model = nnx.merge(without_writes(graphdef), params)
    same = nnx.state(model)
    assert jax.tree.structure(nnx.to_pure_dict(same)) == jax.tree.structure(nnx.to_pure_dict(params))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(same), nnx.to_pure_dict(params))
    memories = [module for _, module in nnx.iter_graph(model) if isinstance(module, NeuralMemory)]
    assert [module.writes for module in memories] == [False]
    plain, _ = nnx.split(small.build(small.config("window", dtype="float32")))
    assert without_writes(plain) == plain
    assert dataclasses.is_dataclass(graphdef) and without_writes(graphdef) != graphdef
