"""TNT as a layer: against numpy token by token, streaming, documents, and memories that are never written."""

import dataclasses
import sys
from pathlib import Path

import drawn_layers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from drawn_layers import PERSISTENT, close_to, init_state, kinds, layer_of, row, with_memory
from flax import nnx

from titans_jax.config import MemoryConfig, ModelConfig, gate_choices, memory_rule
from titans_jax.layers.document_layout import find_documents
from titans_jax.layers.key_projection import key_projection
from titans_jax.memory import choose_form
from titans_jax.ops.backend import TPU

sys.path.append(str(Path(__file__).parents[1] / "models"))
from model_oracle import Model, sigmoid  # noqa: E402

CHUNK, SHARD, LOCAL, TIME, MAX_STEP = 8, 8, (4,), 20, 0.1
CONFIG = ModelConfig(
    pattern=("lmm",), dim=8, depth=1, num_heads=2, head_dim=4, num_persistent=3, dtype="float64",
    memory=MemoryConfig(
        chunk_size=CHUNK, local_chunks=LOCAL, shard=SHARD, expansion=2, step_unit="head_dim", max_step_size=MAX_STEP
    ),
)  # fmt: skip


def configured(**fields):
    return with_memory(CONFIG, **fields)


def inputs(batch=2, time=TIME):
    return drawn_layers.inputs(batch, time)


def in_pieces(layer, x, pieces):
    return drawn_layers.in_pieces(layer, x, pieces, init_state(layer, 2))


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("time", [1, 6])
def test_the_projection_on_keys_in_half_precision(time):
    """A token alone and several, from a sum that is not zero; XLA for CPUs cannot do all of it with operands of
    bfloat16. Within a few roundings to 8 bits."""
    rng = np.random.default_rng(2)
    queries, keys = (jnp.asarray(rng.normal(size=(2, time, 2, 8)), jnp.bfloat16) for _ in range(2))
    before = jnp.asarray(rng.normal(size=(2, 2, 8, 8)), jnp.float32)
    found, after = jax.jit(lambda *x: key_projection(x[0], x[1], None, x[2]))(queries, keys, before)
    q, k, total = (np.asarray(x, np.float64) for x in (queries, keys, before))
    for t in range(time):
        unit = k[:, t] / np.linalg.norm(k[:, t], axis=-1, keepdims=True)
        total = total + np.einsum("bhd,bhe->bhde", unit, unit)
        expected = np.einsum("bhd,bhde->bhe", q[:, t], total)
        np.testing.assert_allclose(np.asarray(found[:, t], np.float64), expected, atol=0.05 * np.abs(expected).max())
    np.testing.assert_allclose(after, total, atol=0.02)


class Memories:
    """The memories of all heads that a prefix of paths names, written and read token by token."""

    def __init__(self, config, params, prefix, chunk_size, max_step):
        own = {path[len(prefix) :]: value for path, value in params.items() if path[: len(prefix)] == prefix}
        start = [own["start_weights", i] for i in range(2)]
        scale = own["slow", "norm_scale"]
        self.slow = [
            {"weights": [w[head] for w in start], "norm_scale": scale[head]} for head in range(config.num_heads)
        ]
        momentum = config.memory.momentum is not False
        ours = {"forget_to_start": True, "bound_slope": True, "scale_keys": config.memory.scale_keys is not False}
        self.rule = oracle.Rule("residual_mlp", "l2", momentum, chunk_size, **ours)
        self.kernel, self.bias, self.max_step = own["gates", "kernel"], own["gates", "bias"], max_step / config.head_dim
        self.first = [oracle.start(slow) for slow in self.slow]

    def write(self, states, x, key, value):
        """The states after a token, x [dim], key and value [heads, head_dim]."""
        gates = sigmoid(np.einsum("d,dhk->hk", x / np.sqrt(len(x)), self.kernel) + self.bias)
        forget, step, *momentum = np.moveaxis(gates.reshape(len(gates), -1, 2), 1, 0)
        momentum = momentum[0] if momentum else np.zeros_like(forget)
        one = lambda head, array: array[head][None]  # noqa: E731
        return [
            oracle.memorize(
                self.rule, self.slow[head], state, one(head, key), one(head, key), one(head, value),
                one(head, forget), one(head, momentum), self.max_step * one(head, step),
            )[1]
            for head, state in enumerate(states)
        ]  # fmt: skip

    def read(self, weights, queries):
        """[heads, head_dim], of weights of every head."""
        scales = [slow["norm_scale"] for slow in self.slow]
        return np.array([oracle.read(self.rule, *parts) for parts in zip(weights, scales, queries, strict=True)])


def recurrence(config, x):
    """The layer on one row x [time, dim] after the persistent tokens, from the equations: V carried and read as it was
    at its chunk's start; W and P anew at every shard, where they are what the persistent tokens left."""
    memory = config.memory
    params = {path: np.array(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(layer_of(config)))}
    model, rows = Model(config, {}), np.concatenate([PERSISTENT, x])
    named = {("memory", *path): value for path, value in params.items()}
    q, k, v = (model.features(named, name, rows, None) for name in ("query", "key", "value"))
    far = Memories(config, params, (), memory.chunk_size, MAX_STEP * min(1, config.head_dim / memory.chunk_size))
    near = [Memories(config, params, ("local", i), chunk, MAX_STEP) for i, chunk in enumerate(memory.local_chunks)]
    V, W = far.first, [each.first for each in near]
    P = np.zeros((config.num_heads, config.head_dim, config.head_dim))

    def add(P, key):
        square = np.maximum(np.sum(key**2, axis=-1), 1e-6)  # the first key is zeros: no token is before it
        return P + np.einsum("hi,hj->hij", key, key) / square[:, None, None]

    reads, seen = [], [state.weights for state in V]  # fewer persistent tokens than a chunk has
    for t in range(len(PERSISTENT)):
        V = far.write(V, rows[t], k[t], v[t])
        W = [each.write(states, rows[t], k[t], v[t]) for each, states in zip(near, W, strict=True)]
        P = add(P, k[t])
        projected = np.einsum("hij,hj->hi", P, q[t])
        local = [each.read([s.weights for s in states], projected) for each, states in zip(near, W, strict=True)]
        reads.append(far.read(seen, q[t]) + sum(local))
    closed = lambda states: [oracle.State(s.weights, s.momentum, s.weights, 0) for s in states]  # noqa: E731
    V, first = closed(V), ([closed(states) for states in W], P)
    for t, token in enumerate(range(len(PERSISTENT), len(rows))):
        if t % memory.shard == 0:
            W, P = first
        if t % memory.chunk_size == 0:
            seen = [state.weights for state in V]
        answer = far.read(seen, q[token])
        V = far.write(V, rows[token], k[token], v[token])
        P = add(P, k[token])
        projected = np.einsum("hij,hj->hi", P, q[token])
        for i, each in enumerate(near):
            W = [*W[:i], each.write(W[i], rows[token], k[token], v[token]), *W[i + 1 :]]
            answer = answer + each.read([state.weights for state in W[i]], projected)
        reads.append(answer)
    part = slice(len(PERSISTENT), None)
    predictions = model.predictions(named, rows, np.array(reads))[part]
    return model.leave(named, x, np.array(reads)[part] + model.skip(named, rows, part), predictions)


OTHERS = [
    {"local_chunks": (2, 4)},
    {"chunk_size": 4, "local_chunks": (1,)},
    {"chunk_size": 16, "local_chunks": (8,)},
    {"momentum": False},
]


@pytest.mark.parametrize("fields", [{}, *(pytest.param(f, marks=pytest.mark.exhaustive) for f in OTHERS)])
def test_reads_equal_the_numpy_recurrence(fields):
    """Two whole shards and an open one, after persistent tokens."""
    config, x = configured(**fields), inputs()
    expected = np.stack([recurrence(config, np.array(one)) for one in x])
    close_to(row(layer_of(config), x), expected)


PIECES = ([9, 1, 1, 9], [1] * 11 + [9])


@pytest.mark.parametrize(
    "fields", [{}, pytest.param({"step_unit": "error", "max_step_size": 1.5}, marks=pytest.mark.exhaustive)]
)
def test_pieces_equal_the_whole(fields):
    """Inside a shard, over its borders, and token by token; exhaustively also with steps that chunks share."""
    layer, x = layer_of(configured(**fields)), inputs()
    whole = row(layer, x)
    for pieces in PIECES:
        found, state = in_pieces(layer, x, pieces)
        close_to(found, whole)
    assert kinds(state) == kinds(init_state(layer, 2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", ["ttt_mlp", "moneta", "yaad", "memora"])
def test_pieces_equal_the_whole_whatever_the_memory(preset):
    layer, x = layer_of(configured(preset=preset, gate_rank=2, q=4.0)), inputs()
    whole = row(layer, x)
    assert np.isfinite(whole).all()
    close_to(in_pieces(layer, x, PIECES[0])[0], whole, 1e-9)


@pytest.mark.slow
def test_a_state_that_is_known_to_be_at_a_border():
    layer, x = layer_of(CONFIG), inputs()
    first, state = in_pieces(layer, x, [1] * 8)
    is_memory = lambda node: hasattr(node, "position")  # noqa: E731
    known = jax.tree.map(
        lambda node: dataclasses.replace(node, position=0) if is_memory(node) else node, state, is_leaf=is_memory
    )
    last, after = jax.jit(lambda x: layer(x, known)[:2])(x[:, 8:])
    close_to(jnp.concatenate([first, last], axis=1), row(layer, x))
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.slow
def test_the_gradient_is_the_difference_of_losses():
    graphdef, params = nnx.split(layer_of(CONFIG))
    rng, point = np.random.default_rng(5), (params, inputs(batch=1, time=12))
    direction = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), point)
    loss = jax.jit(jax.value_and_grad(lambda point: jnp.sum(jnp.sin(nnx.merge(graphdef, point[0])(point[1])[0]))))
    gradient = loss(point)[1]
    leaves = jax.tree.leaves(gradient)
    assert all(np.isfinite(leaf).all() and np.any(leaf != 0) for leaf in leaves)
    slope = sum(float(jnp.vdot(g, d)) for g, d in zip(leaves, jax.tree.leaves(direction), strict=True))
    ahead, behind = (loss(jax.tree.map(lambda x, d: x + sign * 1e-5 * d, point, direction))[0] for sign in (1, -1))  # noqa: B023
    assert float(ahead - behind) / 2e-5 == pytest.approx(slope, rel=1e-6)


def test_a_later_token_changes_no_earlier_read():
    layer, x = layer_of(CONFIG), inputs()
    before = np.array(row(layer, x))
    for t in (1, 7, 11):
        after = np.array(row(layer, x.at[:, t].add(1.0)))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).any(axis=(0, 2)).all()  # by local memories, then by the global one


def test_documents_keep_to_themselves():
    """Documents that begin with a shard equal themselves alone; padding between them changes nothing."""
    layer, x = layer_of(CONFIG), inputs(batch=1, time=24)
    ids = jnp.asarray([1] * 6 + [0] * 2 + [2] * 13 + [0] * 3, jnp.int32)[None]
    packed = jax.jit(lambda x, ids: layer(x, documents=find_documents(ids), persistent=jnp.asarray(PERSISTENT))[0])
    found = packed(x, ids)
    for begin, end in ((0, 6), (8, 21)):
        alone = jnp.zeros_like(x).at[:, : end - begin].set(x[:, begin:end])
        close_to(found[:, begin:end], row(layer, jnp.concatenate([alone[:, :TIME]] * 2))[:1, : end - begin])
    padding = packed(x.at[:, 6:8].add(1.0), ids)
    np.testing.assert_array_equal(padding[0, ids[0] > 0], found[0, ids[0] > 0])
    assert jnp.isnan(packed(x, jnp.roll(ids, 4))).all()


def test_without_writes_memories_stay_at_their_start():
    layer, x = nnx.merge(*nnx.split(layer_of(CONFIG))), inputs()
    written = row(layer, x)
    for each in (layer, *layer.local):
        each.writes = False
    without, state, _ = drawn_layers.run(layer, x)
    assert abs(written - without).max() > 1e-6
    for one in (state.running, *state.shard.local):  # what is carried is the change since the learned start
        assert not any(np.any(leaf) for leaf in (*one.memory.weights, *one.memory.momentum))


def test_local_memories_run_in_the_kernel_of_a_tpu():
    """The global one needs none: between the tokens of its chunk nothing is computed."""
    config = configured(local_chunks=(8,), chunk_size=16, shard=16).memory
    local = dataclasses.replace(config, local_chunks=(), chunk_size=8)
    for each, form in ((config, "chunked"), (local, "fused")):
        rule = memory_rule(each)
        assert choose_form("auto", rule, gate_choices(each).example(rule), TPU) == form
    assert memory_rule(config).stale and not memory_rule(local).stale
