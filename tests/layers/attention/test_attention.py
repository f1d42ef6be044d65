"""Attention against a dense masked softmax in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from titans_jax.config import ModelConfig
from titans_jax.layers.attention import Attention, KeyValues, rotate, xla
from titans_jax.layers.attention.xla import blocked_attention
from titans_jax.layers.document_layout import find_documents

BATCH, HEADS, HEAD_DIM = 2, 2, 4
CONFIG = ModelConfig(dim=8, num_heads=HEADS, head_dim=HEAD_DIM, depth=1, dtype="float64")


def dense(queries, keys, values, prefix_keys, prefix_values, visible):
    """softmax over [prefix | keys where visible[b, t, s]], query by query."""
    out = np.zeros_like(queries)
    for b, t, h in np.ndindex(queries.shape[:3]):
        seen = np.flatnonzero(visible[b, t])
        rows = np.concatenate([prefix_keys[:, h], keys[b, seen, h]])
        logits = rows @ queries[b, t, h] / np.sqrt(queries.shape[-1])
        weights = np.exp(logits - logits.max())
        out[b, t, h] = weights / weights.sum() @ np.concatenate([prefix_values[:, h], values[b, seen, h]])
    return out


def dense_mask(time, window, documents=None):
    """token t sees s in (t - window, t] of its own document."""
    t, s = np.arange(time)[:, None], np.arange(time)[None]
    mask = np.broadcast_to((s <= t) & (t - s < (window or time)), (BATCH, time, time))
    return mask if documents is None else mask & (documents[:, :, None] == documents[:, None])


def rows(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("block", [4, 64])
@pytest.mark.parametrize("window", [1, 4, 5, 9, None])
@pytest.mark.parametrize("time", [1, 13])
@pytest.mark.parametrize("num_prefix", [0, 3])
def test_equals_dense_attention(time, window, block, num_prefix):
    with jax.enable_x64(True):
        q, k, v = (rows(i, BATCH, time, HEADS, HEAD_DIM) for i in range(3))
        prefix = [rows(3 + i, num_prefix, HEADS, HEAD_DIM) for i in range(2)]
        y = blocked_attention(
            *map(jnp.array, (q,)),
            KeyValues(jnp.array(k), jnp.array(v)),
            KeyValues(*map(jnp.array, prefix)),
            window,
            block=block,
        )
        np.testing.assert_allclose(y, dense(q, k, v, *prefix, dense_mask(time, window)), atol=1e-12)


@pytest.mark.parametrize("shards", [1, 2])
def test_one_query_equals_dense_attention(shards, monkeypatch):
    """With heads side by side, and by head as where heads are on several devices; a prefix of all rows, two parts."""
    monkeypatch.setattr(xla, "head_shards", lambda: shards)
    with jax.enable_x64(True):
        q, prefix = rows(0, BATCH, 1, HEADS, HEAD_DIM), [rows(1 + i, 3, HEADS, HEAD_DIM) for i in range(2)]
        k, v = (rows(3 + i, BATCH, 9, HEADS, HEAD_DIM) for i in range(2))
        seen = np.random.default_rng(5).random((BATCH, 1, 9)) < 0.5
        parts = [KeyValues(jnp.array(k[:, cut]), jnp.array(v[:, cut])) for cut in (slice(0, 4), slice(4, 9))]
        visible = np.concatenate([np.ones((BATCH, 3), bool), seen[:, 0]], axis=1)
        y = xla.attend_once(jnp.array(q), (KeyValues(*map(jnp.array, prefix)), *parts), jnp.array(visible))
        np.testing.assert_allclose(y, dense(q, k, v, *prefix, seen), atol=1e-12)


@pytest.mark.parametrize("window", [1, 5, None])
def test_equals_jax_local_window_size(window):
    q, k, v = (jnp.array(rows(i, BATCH, 16, HEADS, HEAD_DIM), jnp.float32) for i in range(3))
    none = jnp.zeros((0, HEADS, HEAD_DIM))
    y = blocked_attention(q, KeyValues(k, v), KeyValues(none, none), window, block=4)
    local = None if window is None else (window - 1, 0)
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local)
    np.testing.assert_allclose(y, expected, atol=1e-6)


@pytest.mark.parametrize("window", [3, 7, None])
def test_documents_are_separate(window):
    ids = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 0], [1, 2, 2, 0, 0, 3, 3, 3, 3, 3, 3, 3, 3]])
    with jax.enable_x64(True):
        documents = find_documents(jnp.array(ids, jnp.int32))
        q, k, v = (rows(i, BATCH, 13, HEADS, HEAD_DIM) for i in range(3))
        prefix = [rows(3 + i, 2, HEADS, HEAD_DIM) for i in range(2)]
        y = blocked_attention(
            jnp.array(q),
            KeyValues(jnp.array(k), jnp.array(v)),
            KeyValues(*map(jnp.array, prefix)),
            window,
            documents=documents.index,
            block=4,
        )
        expected = dense(q, k, v, *prefix, dense_mask(13, window, ids))
        np.testing.assert_allclose(np.array(y)[ids > 0], expected[ids > 0], atol=1e-12)


def test_history_comes_before_the_queries():
    """The last rows of a sequence, given the rows before them as history of which only the last exist."""
    with jax.enable_x64(True):
        q, k, v = (rows(i, BATCH, 13, HEADS, HEAD_DIM) for i in range(3))
        none = np.zeros((0, HEADS, HEAD_DIM))
        for seen, window in [(4, 5), (2, 5), (4, 3), (0, None), (4, None)]:
            y = blocked_attention(
                jnp.array(q[:, 4:]),
                KeyValues(jnp.array(k), jnp.array(v)),
                KeyValues(jnp.array(none), jnp.array(none)),
                window,
                history_seen=seen,
                block=4,
            )
            visible = dense_mask(13, window) & (np.arange(13) >= 4 - seen)
            np.testing.assert_allclose(y, dense(q[:, 4:], k, v, none, none, visible[:, 4:]), atol=1e-12)


def test_scores_of_a_long_sequence_are_never_formed():
    time, window = 8192, 128
    q = jax.ShapeDtypeStruct((1, time, 1, 8), jnp.float32)
    none = jnp.zeros((0, 1, 8))

    def loss(q, window):
        return jnp.sum(blocked_attention(q, KeyValues(q, q), KeyValues(none, none), window))

    for window in (128, None):
        compiled = jax.jit(jax.grad(loss), static_argnums=1).lower(q, window).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < time * time  # a quarter of one [time, time] in float32


@pytest.mark.slow_but_for("split1-3", "split2-None")
@pytest.mark.parametrize("window", [3, 6, None])
@pytest.mark.parametrize("split", [[1] * 13, [13], [4, 9], [1, 6, 1, 5], [11, 2]])
def test_layer_extends_as_it_reads_whole(window, split):
    with jax.enable_x64(True):
        layer = Attention(CONFIG, window, rngs=nnx.Rngs(0))
        x, persistent = jnp.array(rows(0, BATCH, 13, 8)), jnp.array(rows(1, 3, 8))
        whole, _ = layer(x, persistent=persistent)
        state, parts, start = layer.init_state(BATCH, 16, persistent), [], 0
        for size in split:
            y, state = layer(x[:, start : start + size], state)
            parts.append(y)
            start += size
        np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=1e-12)


def test_layer_equals_dense_layer():
    """Projections, rotary positions and scale, with the rotation written as complex numbers."""
    with jax.enable_x64(True):
        layer = Attention(CONFIG, 4, rngs=nnx.Rngs(0))
        x, persistent = rows(0, BATCH, 9, 8), rows(1, 3, 8)

        def turned(module, x, positions):
            y = (x @ np.array(module.kernel[...])).reshape(*x.shape[:-1], HEADS, HEAD_DIM)
            if positions is None:
                return y
            pairs = y[..., :2] + 1j * y[..., 2:]
            pairs = pairs * np.exp(1j * positions[:, None, None] * CONFIG.rope_theta ** np.array([0.0, -0.5]))
            return np.concatenate([pairs.real, pairs.imag], axis=-1)

        time = np.arange(9)
        y = dense(
            turned(layer.query, x, time),
            turned(layer.key, x, time),
            turned(layer.value, x, None),
            turned(layer.key, persistent, None),
            turned(layer.value, persistent, None),
            dense_mask(9, 4),
        )
        expected = y.reshape(BATCH, 9, 8) @ np.array(layer.output.kernel[...])
        np.testing.assert_allclose(layer(jnp.array(x), persistent=jnp.array(persistent))[0], expected, atol=1e-12)


def test_rotary_scores_depend_on_distance_only():
    q, k = (jnp.array(rows(i, 1, HEADS, HEAD_DIM), jnp.float32) for i in range(2))

    def score(i, j):
        turn = lambda x, p: rotate(x, jnp.array([p], jnp.int32), 100.0)  # noqa: E731
        return jnp.sum(turn(q, i) * turn(k, j))

    np.testing.assert_allclose(score(7, 3), score(104, 100), rtol=1e-5)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3
    # Far away parts of up to 2^10 are multiplied by rates in float32: errors of 2e-4 radians.
    for far in (4092, (1 << 20) - 1, 1 << 24, (1 << 30) + 5):
        np.testing.assert_allclose(score(far + 7, far + 3), score(7, 3), rtol=2e-3)


def test_a_window_sees_the_same_after_twenty_million_tokens():
    """In float32, which has no number between 2^24 and 2^24 + 2."""
    config = ModelConfig(dim=8, num_heads=HEADS, head_dim=HEAD_DIM, depth=1, dtype="float32")
    layer, x = Attention(config, 4, rngs=nnx.Rngs(0)), jnp.array(rows(0, 1, 12, 8), jnp.float32)
    layer.query.kernel[...], layer.key.kernel[...] = (jnp.array(rows(i, 8, 8), jnp.float32) for i in range(2))
    state = layer.init_state(1, None)
    near, _ = layer(x, state)
    far, _ = layer(x, state._replace(position=jnp.int32(20_000_001)))
    np.testing.assert_allclose(far[:, 3:], near[:, 3:], atol=1e-3 * abs(near).max())


def test_full_attention_needs_room():
    layer = Attention(ModelConfig(dim=8, num_heads=2, head_dim=4, depth=1, dtype="float32"), None, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="max_length is None"):
        layer.init_state(1, None)
    x = jnp.ones((1, 3, 8))
    y, state = layer(x, layer.init_state(1, 4))
    assert jnp.all(jnp.isfinite(y))
    assert jnp.all(jnp.isnan(layer(x, state)[0]))  # a fifth and sixth token in a cache of four
