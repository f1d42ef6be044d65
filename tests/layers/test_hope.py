"""Self-referential Titans and the continuum memory: against numpy token by token, streaming, documents, no writes."""

import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from titans_jax.config import Config, ConfigError, MemoryConfig, ModelConfig, step_size_bound
from titans_jax.config.validate import validate
from titans_jax.layers import ContinuumMemory, SelfReferentialMemory
from titans_jax.layers.continuum_memory import error_removed, level_rule, level_width
from titans_jax.layers.document_layout import find_documents
from titans_jax.layers.neural_memory import broadcast
from titans_jax.layers.norms import l2_normalize
from titans_jax.layers.self_referential import memories_of

sys.path.append(str(Path(__file__).parents[1] / "memory"))
import hope_oracle as oracle  # noqa: E402
from slopes import assert_slope_is_the_difference  # noqa: E402

CHUNK, TIME = 4, 16
CHUNKS = (2, 8)
CONFIG = ModelConfig(
    pattern=("hope",), dim=12, depth=1, num_heads=2, head_dim=6, num_persistent=0, hidden_dim=10, dtype="float64",
    memory=MemoryConfig(
        preset="hope", chunk_size=CHUNK, expansion=2, max_step_size=1.0, continuum_chunks=CHUNKS
    ),
)  # fmt: skip
ALONE = {"step_unit": "head_dim", "max_step_size": 0.3}
INDEPENDENT = {"continuum_order": "independent"}


def configured(**fields):
    return dataclasses.replace(CONFIG, memory=dataclasses.replace(CONFIG.memory, **fields))


@functools.cache
def layer_of(kind, config=CONFIG):
    """A layer with random parameters."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(1)
    draw = lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape) + (leaf.ndim == 1))  # noqa: E731
    return nnx.merge(graphdef, jax.tree.map(draw, params))


def by_path(layer):
    return {path: np.array(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(layer))}


def inputs(batch=2, time=TIME, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, time, CONFIG.dim)))


@jax.jit
def row(layer, x):
    return layer(x)[0]


@jax.jit
def read_on(layer, x, state):
    return layer(x, state)[:2]


@jax.jit
def packed(layer, x, ids):
    return layer(x, documents=find_documents(ids))[0]


def in_pieces(layer, x, pieces):
    state, found, begin = jax.jit(lambda layer: layer.init_state(2))(layer), [], 0
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    for size in pieces:
        y, state = read_on(layer, x[:, begin : begin + size], state)
        found.append(y)
        begin += size
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == shapes
    return jnp.concatenate(found, axis=1), state


def assert_close(found, expected, tolerance=1e-10):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * abs(expected).max())


KINDS = [SelfReferentialMemory, ContinuumMemory]


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("fields", [{}, pytest.param(ALONE, marks=pytest.mark.exhaustive)], ids=["shared", "alone"])
def test_self_referential_titans_equal_the_numpy_loop(fields):
    config, x = configured(**fields), inputs()
    layer = layer_of(SelfReferentialMemory, config)
    share = None if fields else config.memory.max_step_size
    choices = (2, CHUNK, step_size_bound(config), share, config.head_dim**0.5)
    expected = [oracle.self_referential(by_path(layer), np.array(one), *choices) for one in x]
    assert_close(row(layer, x), np.stack(expected))


@pytest.mark.parametrize(
    "fields", [{}, pytest.param(INDEPENDENT, marks=pytest.mark.exhaustive)], ids=["sequential", "independent"]
)
def test_a_continuum_memory_equals_the_numpy_loop(fields):
    """Eight windows, and two."""
    layer, x = layer_of(ContinuumMemory, configured(**fields)), inputs()
    expected = np.stack([oracle.continuum(by_path(layer), np.array(one), CHUNKS, bool(fields)) for one in x])
    assert_close(row(layer, x), expected)
    layer = nnx.merge(*nnx.split(layer))
    layer.writes = False
    assert abs(row(layer, x) - expected).max() > 1e-3
    assert_close(row(layer, x)[:, :2], expected[:, :2])  # the first window of all levels reads what was learned


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_the_difference_of_losses(kind):
    """Through all memories, along one random direction of parameters and inputs."""
    graphdef, params = nnx.split(layer_of(kind))
    loss = jax.jit(jax.value_and_grad(lambda point: jnp.sum(jnp.sin(nnx.merge(graphdef, point[0])(point[1])[0]))))
    point = (params, inputs(batch=1, time=8))
    assert_slope_is_the_difference(loss, point, np.random.default_rng(5))
    for path, leaf in jax.tree.leaves_with_path(loss(point)[1]):
        assert np.isfinite(leaf).all() and np.any(leaf != 0), jax.tree_util.keystr(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_token_changes_no_earlier_answer(kind):
    layer, x = layer_of(kind), inputs()
    before = np.array(row(layer, x))
    for t in (1, 6, 11):
        after = np.array(row(layer, x.at[:, t].add(1.0)))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any(axis=-1).all() and (after[:, -1] != before[:, -1]).any(axis=-1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_equal_the_whole(kind):
    """From inside a window and from its start, over borders of several levels, and token by token; the last window is
    open."""
    layer, x = layer_of(kind), inputs()
    found, _ = in_pieces(layer, x, [5, 1, 1, 1, 5, 1, 1])
    assert_close(found, row(layer, x)[:, :15])


@pytest.mark.parametrize("kind", KINDS)
def test_documents_keep_to_themselves(kind):
    """Documents that begin with a window equal themselves alone; padding between them changes nothing."""
    layer, x = layer_of(kind), inputs(batch=1, time=24)
    ids = jnp.asarray([1] * 6 + [0] * 2 + [2] * 13 + [0] * 3, jnp.int32)[None]
    found = packed(layer, x, ids)
    for begin, end in ((0, 6), (8, 21)):
        alone = jnp.zeros_like(x).at[:, : end - begin].set(x[:, begin:end])
        alone = packed(layer, alone, (jnp.arange(24) < end - begin).astype(jnp.int32)[None])[:, : end - begin]
        assert_close(found[:, begin:end], alone)
    padding = packed(layer, x.at[:, 6:8].add(1.0), ids)
    np.testing.assert_array_equal(padding[0, ids[0] > 0], found[0, ids[0] > 0])
    assert jnp.isnan(packed(layer, x, jnp.roll(ids, 2))).all()


@pytest.mark.parametrize("kind", KINDS)
def test_without_writes_nothing_moves(kind):
    layer, x = nnx.merge(*nnx.split(layer_of(kind))), inputs()
    layer.writes = False
    found, state = in_pieces(layer, x, [8, 8])
    assert_close(found, row(layer, x))
    of_memories = lambda state: state.memories if kind is SelfReferentialMemory else state  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, of_memories(state), of_memories(layer.init_state(2)))


def test_a_token_forgets_as_much_in_every_level():
    """What a level has learned fades with the tokens that were read, however many of them it waits for."""
    layer, x = layer_of(ContinuumMemory), inputs()
    layer = nnx.merge(*nnx.split(layer))
    layer.gate_bias[...] = jnp.stack([jnp.full(2, -1e9), jnp.asarray([-3.0, -3.0])], axis=1)  # no steps
    layer.gate_kernel[...] = jnp.zeros_like(layer.gate_kernel[...])
    start = layer.start()
    learned = jax.tree.map(lambda leaf: leaf + 1.0, [level.weights for level in start])
    state = tuple(
        dataclasses.replace(level, weights=weights, anchor=weights, position=jnp.zeros((), jnp.int32))
        for level, weights in zip(start, learned, strict=True)
    )
    state = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (2, *leaf.shape)) if leaf.ndim else leaf, state)
    _, after = read_on(layer, x, state)
    left = (1 - 1 / (1 + np.exp(3.0))) ** TIME
    for first, level in zip(start, after, strict=True):
        for before, weights in zip(first.weights, level.weights, strict=True):
            np.testing.assert_allclose(weights - before[None], left, rtol=1e-9)


def test_what_is_called_a_step_of_one_removes_the_error_of_a_fresh_level():
    """trace(J J^T) / dim, J the derivative of the answer by both matrices, over random starts and inputs."""
    dim, hidden, rng, found = 120, 80, np.random.default_rng(0), []
    for _ in range(60):
        first, second = rng.normal(size=(dim, hidden)) / dim**0.5, rng.normal(size=(hidden, dim)) / hidden**0.5
        x = rng.normal(size=dim)
        behind = oracle.gelu_slope(x @ first)[:, None] * second
        found.append(np.sum(oracle.gelu(x @ first) ** 2) + np.sum(x**2) * np.sum(behind**2) / dim)
    assert np.mean(found) == pytest.approx(error_removed(dim, hidden), rel=0.05)
    assert level_rule(hidden, 4, True).shapes(dim) == ((dim, hidden), (hidden, dim))


@pytest.mark.parametrize("dim, depth", [(64, 2), (128, 12)])
def test_a_fresh_continuum_memory_adds_as_much_as_a_feed_forward_layer(dim, depth):
    """That is, as an MLP of one level's width whose matrices start as this package's do. Once it added twelve times as
    much at a width of 64, twice a token's embedding, and hid what memories read."""
    config = dataclasses.replace(CONFIG, dim=dim, depth=depth, hidden_dim=4 * dim, head_dim=dim // 2, dtype="float32")
    layer, rng = ContinuumMemory(config, rngs=nnx.Rngs(0)), np.random.default_rng(0)
    x = rng.normal(size=(1, 64, dim)).astype(np.float32)
    hidden = level_width(config)
    first, last = 0.02 * rng.normal(size=(dim, hidden)), 0.02 / (2 * depth) ** 0.5 * rng.normal(size=(hidden, dim))
    plain = np.asarray(jax.nn.gelu(x @ first)) @ last
    layer.writes = False
    added = np.asarray(layer(jnp.asarray(x))[0])
    # A level's own answers have a root mean square of 0.65, sqrt(GELU_SQUARE), in place of 1.
    assert 0.5 < np.sqrt((added**2).mean() / (plain**2).mean()) < 0.8


@pytest.mark.parametrize("heads", [1, 4])
def test_half_of_the_heads_begin_as_induction_heads(heads):
    """In these the query of a token is nearest to the key of the next one far more often than one time in 15."""
    config = dataclasses.replace(CONFIG, dim=128, num_heads=heads, head_dim=128 // heads, dtype="float32")
    tokens = jax.random.normal(jax.random.key(1), (8, 16, 128), jnp.float32)

    def nearest(key_start):
        """[heads], the share of tokens whose query is nearest to the key that the next token is written with."""
        memory = dataclasses.replace(config.memory, key_start=key_start)
        layer = SelfReferentialMemory(dataclasses.replace(config, memory=memory), rngs=nnx.Rngs(0))
        start = layer.start()
        inputs, _ = layer._inputs(tokens, broadcast(start, 8), None, start)
        params = broadcast(layer.params(), 8)
        made = layer._retrieve(*memories_of((params, broadcast(start.memories.weights, 8)), slice(0, 1)), inputs.tokens)
        scores = jnp.einsum("bthd,bshd->bhts", inputs.queries, l2_normalize(made[:, 0]))
        found = np.argmax(np.asarray(scores)[:, :, :-1], axis=-1)
        return np.mean(found == np.arange(1, 16), axis=(0, 2))

    chosen, induction, random = max(1, heads // 2), nearest("induction"), nearest("random")
    assert induction[:chosen].min() > 0.5
    assert max([*induction[chosen:], *random]) < 0.2


@pytest.mark.parametrize("preset", ["titans", "omeganet", "gla", "moneta"])
def test_memories_that_need_more_than_they_make_are_refused(preset):
    with pytest.raises(ConfigError, match=f"^model.memory.preset is {preset}, whose memories need more than a key"):
        SelfReferentialMemory(configured(preset=preset), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "fields",
    [
        {"local_chunks": (2,), "shard": 4},
        {"caching": "gated"},
        {"log_linear_levels": 3},
        {"tie_keys": True},
        {"value_skip": True},
    ],
)
def test_fields_that_would_do_nothing_are_refused(fields):
    name = next(iter(fields))
    with pytest.raises(ConfigError, match=f"^model.memory.{name} is .*, which hope does not do"):
        SelfReferentialMemory(configured(preset="ttt_mlp", **fields), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("chunks", [(), (4, 6), (0, 4)])
def test_levels_whose_windows_do_not_fit_are_refused(chunks):
    model = configured(continuum_chunks=chunks)
    with pytest.raises(ConfigError, match=r"^model.memory.continuum_chunks is .*each a multiple of the one before"):
        validate(Config(model=model))
