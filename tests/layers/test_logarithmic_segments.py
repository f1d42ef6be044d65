"""Memory Caching with logarithmic segments as a layer: against numpy token by token, streaming, documents, slots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_cached_memory import PERSISTENT, assert_slope, configured, in_pieces, inputs, layer_of, recurrence, row

from titans_jax.layers import CachedMemory
from titans_jax.layers.document_layout import find_documents

SEGMENT, TIME, MOST = 2, 27, 20
"""14 segments, the last one open; states that are followed to their 20th end."""
EXHAUSTIVE = [pytest.param(way, marks=pytest.mark.exhaustive) for way in ("residual", "average", "soup")]


def logarithmic(caching, **fields):
    return configured(caching, cache_segment=SEGMENT, cache_segmentation="logarithmic", **fields)


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


def assert_same(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10 * abs(expected).max())


def start(layer, length):
    return jax.jit(lambda layer: layer.init_state(2, jnp.asarray(PERSISTENT), length))(layer)


@pytest.mark.parametrize("caching", ["gated", "soup", "sparse(k=1)", *EXHAUSTIVE[:2]])
def test_reads_equal_the_numpy_recurrence(caching):
    """After persistent tokens; and three memories of 13 are not what thirteen are."""
    config, x = logarithmic(caching), inputs(time=TIME)
    expected = recurrence(config, x)
    assert_same(row(layer_of(config), x), expected)
    constant = configured(caching, cache_segment=SEGMENT)
    every = recurrence(constant, x)
    np.testing.assert_allclose(
        every[:, : 2 * SEGMENT], expected[:, : 2 * SEGMENT], rtol=1e-12
    )  # 0 and 1 are all there is
    assert abs(every - expected)[:, 2 * SEGMENT :].max() > 1e-3


@pytest.mark.parametrize("caching", ["gated", pytest.param("soup", marks=pytest.mark.exhaustive)])
def test_the_gradient_is_the_difference_of_losses(caching):
    """Over 7 segments."""
    assert_slope(layer_of(logarithmic(caching)), inputs(batch=1, time=14))


@pytest.mark.parametrize("caching", ["gated", "sparse(k=1)"])
def test_a_later_token_changes_no_earlier_read(caching):
    layer, x = layer_of(logarithmic(caching)), inputs(time=TIME)
    before = np.array(row(layer, x))
    for t in (1, 6, 15, 26):
        after = np.array(row(layer, x.at[:, t].add(1.0)))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).any(axis=(0, 2)).all()


@pytest.mark.parametrize("caching", ["sparse(k=1)", pytest.param("gated", marks=pytest.mark.exhaustive), *EXHAUSTIVE])
def test_pieces_equal_the_whole(caching):
    """All at once, token by token, and from a border and from inside a segment over several."""
    layer, x = layer_of(logarithmic(caching)), inputs(time=TIME)
    whole = row(layer, x)
    for pieces in ([TIME], [1] * TIME, [6, 9, 1, 9, 1, 1], [9, 9, 9]):
        assert sum(pieces) == TIME
        found, state = in_pieces(layer, x, pieces, start(layer, TIME))
        assert_same(found, whole)
    assert int(state.tokens) == TIME
    same = lambda leaf: (leaf.shape, leaf.dtype)  # noqa: E731
    assert jax.tree.map(same, state) == jax.tree.map(same, start(layer, TIME))


@functools.cache
def every_end():
    """Inputs of 20 segments, and the weights at their ends by a layer that keeps all of them."""
    x, layer = inputs(time=SEGMENT * MOST), layer_of(configured("gated", cache_segment=SEGMENT))
    return x, in_pieces(layer, x, [SEGMENT * MOST], start(layer, SEGMENT * MOST + 1))[1].kept


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [[SEGMENT] * MOST, [1, 1, 24, 14]], ids=["segments", "several"])
def test_slots_hold_the_ends_of_the_binary_expansion(pieces):
    """The memory at end e = 2^j (2 i + 1) is in slot j, with the mean of the 2^j segments before e. What it was at
    every end is that of a layer which keeps them all, and the mean is taken of the inputs."""
    x, ends = every_end()
    layer, read, checked = layer_of(logarithmic("gated")), 0, []
    state = start(layer, SEGMENT * MOST + 1)
    for size in pieces:
        _, state = in_pieces(layer, x[:, read : read + size], [size], state)
        read += size
        segments = read // SEGMENT
        for slot in range(5):
            if segments // 2**slot % 2 and read % SEGMENT == 0:
                end = segments // 2**slot * 2**slot
                for found, expected in zip(state.kept, ends, strict=True):
                    assert_same(found[:, slot], expected[:, end - 1])
                mean = np.array(x)[:, SEGMENT * (end - 2**slot) : SEGMENT * end].mean(axis=1)
                assert_same(state.pools.means[:, slot], mean)
                checked.append((segments, end))
    assert {(13, 8), (13, 12), (13, 13), (20, 16), (20, 20)} <= set(checked)


def test_a_state_has_logarithmically_many_slots():
    layer = layer_of(logarithmic("gated"))
    for length, slots in [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (TIME, 4), (1 << 20, 19)]:
        state = jax.eval_shape(lambda length=length: layer.init_state(2, None, length))
        assert {leaf.shape[1] for leaf in (*state.kept, state.pools.means)} == {slots}
    state = start(layer, 8)
    _, state = in_pieces(layer, inputs(time=8), [8], state)
    beyond, _ = in_pieces(layer, inputs(time=1), [1], state)
    assert jnp.isnan(beyond).all()
    with pytest.raises(ValueError, match="x holds 9 tokens, and the state has room for 8"):
        layer(inputs(time=9), start(layer, 8))


def test_documents_keep_to_themselves():
    """Whose own lengths are cut, wherever in a row they are; padding between them changes nothing."""
    layer, lengths, x = layer_of(logarithmic("gated")), {0: 7, 8: 13, 22: 5}, inputs(batch=1, time=TIME)
    ids = np.zeros((1, TIME), np.int32)
    for number, (begin, length) in enumerate(lengths.items(), 1):
        ids[0, begin : begin + length] = number
    packed = jax.jit(lambda x, ids: layer(x, documents=find_documents(ids), persistent=jnp.asarray(PERSISTENT))[0])
    found = packed(x, jnp.asarray(ids))
    for begin, length in lengths.items():
        alone = jnp.zeros((2, TIME, x.shape[-1])).at[:, :length].set(x[:, begin : begin + length])
        assert_same(found[:, begin : begin + length], row(layer, alone)[:1, :length])
    padding = packed(x.at[:, jnp.asarray(ids[0] == 0)].add(1.0), jnp.asarray(ids))
    np.testing.assert_array_equal(padding[0, ids[0] > 0], found[0, ids[0] > 0])
    assert jnp.isnan(packed(x, jnp.roll(jnp.asarray(ids), 1))).all()


@pytest.mark.exhaustive
def test_pieces_without_writes_equal_the_whole():
    layer, x = nnx.merge(*nnx.split(layer_of(logarithmic("gated")))), inputs(time=TIME)
    layer.writes = False
    found, _ = in_pieces(layer, x, [6, 9, 1, 9, 1, 1], start(layer, TIME))
    assert_same(found, row(layer, x))


def test_it_has_the_parameters_of_constant_segments():
    """So that a trained model is read with either."""
    cut, every = layer_of(logarithmic("gated")), layer_of(configured("gated"))
    assert type(cut) is CachedMemory
    shapes = lambda layer: jax.tree.map(lambda leaf: leaf.shape, nnx.to_pure_dict(nnx.state(layer)))  # noqa: E731
    assert shapes(cut) == shapes(every)
