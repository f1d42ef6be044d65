"""Memory Caching as a layer: against numpy token by token, streaming, documents, and a memory that is never written."""

import dataclasses
import sys
from pathlib import Path

import drawn_layers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_layers import PERSISTENT, close_to, kinds, layer_of, row, with_memory
from flax import nnx
from jax.extend.core import jaxprs_in_params

from titans_jax.config import MemoryConfig, ModelConfig
from titans_jax.layers import CachedMemory, NeuralMemory
from titans_jax.layers.cache_shares import Asked, shares_of
from titans_jax.layers.document_layout import find_documents
from titans_jax.memory.caching import Gated, Sparse

sys.path.append(str(Path(__file__).parents[1] / "models"))
from model_oracle import Model  # noqa: E402

CHUNK, SEGMENT, TIME, LENGTH = 2, 4, 18, 24
EXHAUSTIVE = [pytest.param(way, marks=pytest.mark.exhaustive) for way in ("residual", "average", "soup")]
EVERY_WAY = ["gated", "sparse(k=1)", *EXHAUSTIVE]
ONE_WAY = ["gated", pytest.param("sparse(k=1)", marks=pytest.mark.exhaustive), *EXHAUSTIVE]
"""Shares are tested one by one in tests/memory/test_caching.py."""
CONFIG = ModelConfig(
    pattern=("lmm",), dim=8, depth=1, num_heads=2, head_dim=4, num_persistent=3, dtype="float64",
    memory=MemoryConfig(chunk_size=CHUNK, expansion=2, step_unit="head_dim", max_step_size=0.1, cache_segment=SEGMENT),
)  # fmt: skip


def configured(caching, **fields):
    return with_memory(CONFIG, caching=caching, **fields)


def inputs(batch=2, time=TIME):
    return drawn_layers.inputs(batch, time)


def init_state(layer):
    return drawn_layers.init_state(layer, 2, LENGTH)


def in_pieces(layer, x, pieces, state=None):
    return drawn_layers.in_pieces(layer, x, pieces, init_state(layer) if state is None else state)


def recurrence(config, x, caching=""):
    """The numpy model's memory on rows x, with the parameters of this configuration's layer; caching None: without."""
    leaves = nnx.to_flat_state(nnx.state(layer_of(config)))
    params = {("memory", *path): np.array(leaf[...]) for path, leaf in leaves}
    params["persistent", "tokens"] = PERSISTENT
    model = Model(config if caching == "" else configured(caching), {})
    return np.stack([model.memory(params, np.array(one)) for one in x])


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("caching", EVERY_WAY)
def test_reads_equal_the_numpy_recurrence(caching):
    """Four whole segments and an open one, after persistent tokens."""
    config, x = configured(caching), inputs()
    expected = recurrence(config, x)
    close_to(row(layer_of(config), x), expected)
    without = recurrence(config, x, caching=None)
    np.testing.assert_allclose(without[:, :SEGMENT], expected[:, :SEGMENT], rtol=1e-12)  # nothing is kept yet
    assert abs(without - expected).max() > 1e-3


def test_scores_as_in_the_paper_equal_the_numpy_recurrence():
    config, x = configured("gated", cache_counted=False), inputs()
    expected = recurrence(config, x)
    close_to(row(layer_of(config), x), expected)
    assert abs(expected - recurrence(configured("gated"), x)).max() > 1e-3


def test_memories_of_equal_scores_weigh_as_much_together_as_the_running_one():
    """However many are read: 7, or 2 of them."""
    visible, asked = (
        jnp.ones((1, 1, 7), bool),
        Asked(*jnp.zeros((2, 1, 1, 8)), jnp.zeros((1, 7, 8)), jnp.zeros((1, 1, 8))),
    )
    for aggregation, read in ((Gated(), 7), (Sparse(2), 2)):
        shares = shares_of(aggregation, visible, asked, jnp.dtype("float64"), counted=True)[0, 0]
        np.testing.assert_allclose(np.sort(shares), [0] * (7 - read) + [0.5 / read] * read + [0.5], rtol=1e-12)
        printed = shares_of(aggregation, visible, asked, jnp.dtype("float64"), counted=False)[0, 0]
        np.testing.assert_allclose(np.max(printed), 1 / (read + 1), rtol=1e-12)


@pytest.mark.parametrize("caching", ["residual", pytest.param("gated", marks=pytest.mark.exhaustive)])
def test_segments_that_restart_equal_the_numpy_recurrence(caching):
    config = configured(caching, cache_restart=True)
    layer, x = layer_of(config), inputs()
    expected = recurrence(config, x)
    close_to(row(layer, x), expected)


@pytest.mark.parametrize("caching", ["residual", pytest.param("gated", marks=pytest.mark.exhaustive)])
def test_pieces_of_segments_that_restart_equal_the_whole(caching):
    layer, x = layer_of(configured(caching, cache_restart=True)), inputs()
    whole = row(layer, x)
    for pieces in ([6, 6, 6], [8, 8, 2], [1, 1, 1, 1, 6, 1, 6, 1]):
        found, _ = in_pieces(layer, x, pieces)
        close_to(found, whole)


@pytest.mark.parametrize("caching", ONE_WAY)
def test_the_gradient_is_the_difference_of_losses(caching):
    """Through caches, gates and the memory."""
    assert_slope(layer_of(configured(caching)), inputs(batch=1, time=12))


def assert_slope(layer, x):
    """The gradient is the difference of losses along a random direction of parameters and inputs, and zero nowhere."""
    graphdef, params = nnx.split(layer)
    rng, point = np.random.default_rng(5), (params, x)
    direction = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), point)
    loss = jax.jit(jax.value_and_grad(lambda point: jnp.sum(jnp.sin(nnx.merge(graphdef, point[0])(point[1])[0]))))
    leaves = jax.tree.leaves(loss(point)[1])
    assert all(np.isfinite(leaf).all() and np.any(leaf != 0) for leaf in leaves)
    slope = sum(float(jnp.vdot(g, d)) for g, d in zip(leaves, jax.tree.leaves(direction), strict=True))
    ahead, behind = (loss(jax.tree.map(lambda x, d: x + sign * 1e-5 * d, point, direction))[0] for sign in (1, -1))  # noqa: B023
    assert float(ahead - behind) / 2e-5 == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("caching", ["gated", "sparse(k=1)"])
def test_a_later_token_changes_no_earlier_read(caching):
    layer, x = layer_of(configured(caching)), inputs()
    before = np.array(row(layer, x))
    for t in (1, 6, 11):
        after = np.array(row(layer, x.at[:, t].add(1.0)))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).any(axis=(0, 2)).all()  # all later segments read what it wrote


@pytest.mark.parametrize("caching", ["sparse(k=1)", pytest.param("gated", marks=pytest.mark.exhaustive), *EXHAUSTIVE])
def test_pieces_equal_the_whole(caching):
    """Inside a segment, over borders token by token, from a border over several, and one by one."""
    layer, x = layer_of(configured(caching)), inputs()
    whole = row(layer, x)
    for pieces in ([3, 3, 1, 1, 7, 3], [7, 1, 7, 3]):
        assert sum(pieces) == TIME
        found, state = in_pieces(layer, x, pieces)
        close_to(found, whole)
    assert int(state.tokens) == TIME
    assert kinds(state) == kinds(init_state(layer))


OF_THEIR_OWN = ["omeganet", "atlas", "mamba3", "mamba3_mimo", "comba", "preconditioned_kimi"]
"""Presets whose layers carry more than weights from segment to segment, or read with other queries than projected."""


@pytest.mark.slow
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("preset", OF_THEIR_OWN)
def test_pieces_equal_the_whole_whatever_a_preset_carries(preset, restart):
    fields = {} if preset in ("omeganet", "atlas") else {"step_unit": "error", "max_step_size": 3.0}
    layer = layer_of(configured("gated", preset=preset, cache_restart=restart, **fields))
    x = inputs()
    whole = row(layer, x)
    found, _ = in_pieces(layer, x, [3, 1, 4, 1, 6, 3])
    close_to(found, whole, 1e-9)
    alone = row(layer, jnp.concatenate([x[:, :SEGMENT], x[:, :SEGMENT]], axis=1))  # in another segment, other answers
    assert abs(alone[:, SEGMENT:] - whole[:, :SEGMENT]).max() > 1e-3


def test_a_state_that_is_known_to_be_at_a_border():
    layer, x = layer_of(configured("sparse(k=1)")), inputs()
    first, state = in_pieces(layer, x, [7, 1])
    running = state.running._replace(memory=dataclasses.replace(state.running.memory, position=0))
    last, _ = jax.jit(lambda state: layer(x[:, 8:], state._replace(running=running))[:2])(state)
    whole = row(layer, x)
    found = jnp.concatenate([first, last], axis=1)
    close_to(found, whole)


def test_documents_keep_to_themselves():
    """Documents that begin with a segment equal themselves alone; padding between them changes nothing."""
    layer, x = layer_of(configured("gated")), inputs(batch=1, time=20)
    ids = jnp.asarray([1] * 6 + [0] * 2 + [2] * 9 + [0] * 3, jnp.int32)[None]
    packed = jax.jit(lambda x, ids: layer(x, documents=find_documents(ids), persistent=jnp.asarray(PERSISTENT))[0])
    found = packed(x, ids)
    for begin, end in ((0, 6), (8, 17)):
        alone = jnp.zeros_like(x).at[:, : end - begin].set(x[:, begin:end])
        alone = row(layer, jnp.concatenate([alone[:, :TIME]] * 2))[:1, : end - begin]
        close_to(found[:, begin:end], alone)
    padding = packed(x.at[:, 6:8].add(1.0), ids)
    np.testing.assert_array_equal(padding[0, ids[0] > 0], found[0, ids[0] > 0])
    misplaced = jnp.roll(ids, 2)
    assert jnp.isnan(packed(x, misplaced)).all()


def test_beyond_its_room_a_state_is_never_silently_wrong():
    layer, x = layer_of(configured("sparse(k=1)")), inputs(time=LENGTH)
    _, state = in_pieces(layer, x, [7, 7, 7, 3])
    beyond, _ = in_pieces(layer, x, [1], state)
    assert jnp.isnan(beyond).all()
    with pytest.raises(ValueError, match="x holds 25 tokens, and the state has room for 24"):
        layer(inputs(time=25), init_state(layer))
    with pytest.raises(ValueError, match="max_length is None"):
        layer.init_state(1)


@pytest.mark.parametrize("caching", ["gated", pytest.param("residual", marks=pytest.mark.exhaustive)])
def test_without_writes_every_kept_memory_is_the_start(caching):
    """Shares that sum to 1 then read what a layer without caches reads, and the norm behind takes the sum of equal
    answers back, where nothing else is added to them: what writing is worth is measured against the same model."""
    fields = {"value_skip": False} if caching == "residual" else {}
    layer, x = layer_of(configured(caching, **fields)), inputs()
    cached, plain = nnx.merge(*nnx.split(layer)), nnx.merge(*nnx.split(layer_of(configured(None, **fields))))
    cached.writes = plain.writes = False
    nnx.update(plain, nnx.filter_state(nnx.state(layer), lambda path, _: "score" not in path))
    without = row(plain, x)
    tolerance = 1e-10 if caching == "gated" else 1e-4  # the norm's epsilon
    close_to(row(cached, x), without, tolerance)
    assert abs(row(layer, x) - without).max() > 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize("caching", ["gated", "soup"])
def test_pieces_without_writes_equal_the_whole_and_no_memory_moves(caching):
    layer, x = nnx.merge(*nnx.split(layer_of(configured(caching)))), inputs()
    layer.writes = False
    found, state = in_pieces(layer, x, [6, 6, 6])
    whole = row(layer, x)
    close_to(found, whole)
    start = init_state(layer).running.memory.weights
    jax.tree.map(np.testing.assert_array_equal, state.running.memory.weights, start)


def test_the_average_needs_no_parameters():
    """A layer that was trained without caches reads by it: the same tree of parameters."""
    plain, cached = layer_of(CONFIG), layer_of(configured("average"))
    assert type(plain) is NeuralMemory and type(cached) is CachedMemory
    shapes = lambda layer: jax.tree.map(lambda leaf: leaf.shape, nnx.to_pure_dict(nnx.state(layer)))  # noqa: E731
    assert shapes(plain) == shapes(cached)


def test_no_gradient_puts_zeros_between_tokens():
    """The compiler of libtpu 0.0.40 ends itself at the gradient of a slice with a step, for heads of 64 and more."""
    layer = layer_of(configured("gated"))
    pending, pads = [jax.make_jaxpr(jax.grad(lambda x: jnp.sum(row(layer, x))))(inputs()).jaxpr], []
    while pending:
        for equation in pending.pop().eqns:
            pads += [equation.params["padding_config"]] if equation.primitive.name == "pad" else []
            pending += jaxprs_in_params(equation.params)
    assert pads and all(interior == 0 for config in pads for *_, interior in config)
