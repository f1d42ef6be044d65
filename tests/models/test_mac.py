"""MAC: its attention as a kernel, and what its memory is given."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from flax import nnx
from test_packed_documents import assert_documents_alone, pack

from tests.slopes import assert_slope_is_the_difference
from titans_jax.config import ConfigError, memory_rule
from titans_jax.layers.attention.segment_pallas import fused_segment_attention
from titans_jax.models import check_model, granularity, mac, without_writes


@pytest.mark.slow
def test_attention_as_a_kernel_changes_nothing(monkeypatch):
    """In interpret mode. Three segments, the last one short; padding up to a border, and a second document."""
    model, tokens = small.build(small.config("mac", depth=1, dtype="float32")), small.tokens(time=22)
    ids = jnp.array([[1] * 5 + [0] * 3 + [2] * 14, [1] * 22], jnp.int32)

    def forward():
        return np.array(jax.jit(lambda tokens, ids: model(tokens, ids))(tokens, ids))[np.array(ids) > 0]

    plain, seen = forward(), []

    def attention(queries, context, prefix, index):
        assert index == 0  # known before it runs, as the kernel needs it
        seen.append([rows.shape[1] for rows in jax.tree.leaves((queries, context, prefix))])
        return fused_segment_attention(queries, context, prefix)

    monkeypatch.setattr(mac, "segment_attention", attention)
    np.testing.assert_allclose(forward(), plain, rtol=1e-4, atol=1e-4 * np.abs(plain).max())
    assert seen == [[size] * 5 + [3, 3] for size in (small.SEGMENT, 22 % small.SEGMENT)]


@pytest.mark.slow
def test_written_with_a_residual_around_the_attention():
    """Reading in pieces equals reading at once, and no token changes what is before it."""
    with jax.enable_x64(True):
        model, tokens = small.build(small.config("mac", depth=1, mac_write="residual")), small.tokens()
        whole = small.forward(model, tokens)
        state, parts = small.init_state(model, len(tokens)), []
        for begin, end in ((0, 5), (5, small.SEGMENT + 1), (small.SEGMENT + 1, tokens.shape[1])):
            logits, state = small.extend(model, tokens[:, begin:end], state)
            parts.append(logits)
        np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-9, atol=1e-9 * abs(whole).max())
        changed = small.forward(model, tokens.at[:, 11].add(1) % small.VOCAB)
        np.testing.assert_array_equal(changed[:, :11], whole[:, :11])
        assert not np.array_equal(changed[:, 12:], whole[:, 12:])


LONG_TERM = {"depth": 1, "mac_long_term": 3}


@pytest.mark.slow_but_for("True")
@pytest.mark.parametrize("writes", [True, False])
def test_long_term_tokens_in_pieces_equal_the_whole(writes):
    """Pieces that end inside, at and behind a segment, then token by token; without writes too. No token changes a bit
    of what is before it, in its own segment or another."""
    with jax.enable_x64(True):
        model, tokens = small.build(small.config("mac", **LONG_TERM)), small.tokens()
        if not writes:
            graphdef, params = nnx.split(model)
            model = nnx.merge(without_writes(graphdef), params)
        whole = small.forward(model, tokens)
        for borders in ([0, 5, small.SEGMENT + 1, small.TIME - 1, small.TIME], [0, small.SEGMENT, *range(9, 20)]):
            state, parts = small.init_state(model, len(tokens)), []
            for begin, end in itertools.pairwise(borders):
                logits, state = small.extend(model, tokens[:, begin:end], state)
                parts.append(logits)
            np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-9, atol=1e-9 * abs(whole).max())
        for changed in (6, 11):
            other = small.forward(model, tokens.at[:, changed].add(1) % small.VOCAB)
            np.testing.assert_array_equal(other[:, :changed], whole[:, :changed])
            assert not np.array_equal(other[:, changed + 1 :], whole[:, changed + 1 :])


def test_long_term_tokens_of_packed_documents():
    """Each document's first segment reads the memory of a sequence's start."""
    with jax.enable_x64(True):
        config = small.config("mac", **LONG_TERM)
        rows = [pack(lengths, 32, granularity(config)) for lengths in ([5, 9, 3], [8, 1, 7])]
        assert_documents_alone(config, rows)


def test_long_term_tokens_are_differentiable():
    """The slope of the loss is its difference, and every slow parameter has a gradient."""
    with jax.enable_x64(True):
        model, tokens = small.build(small.config("mac", **LONG_TERM)), small.tokens(batch=1)
        graphdef, params = nnx.split(model)
        # Linear in the logits, so that it is as smooth as the model.
        weights = jnp.asarray(np.random.default_rng(1).normal(size=(1, small.TIME, small.VOCAB)))
        program = jax.jit(
            jax.value_and_grad(lambda params: jnp.vdot(weights, nnx.merge(graphdef, params)(tokens)) / small.TIME)
        )
        _, gradient = program(params)
        for path, leaf in nnx.to_flat_state(gradient):
            assert np.isfinite(leaf[...]).all() and np.abs(leaf[...]).max() > 0, path
        assert_slope_is_the_difference(program, params, np.random.default_rng(0))


@pytest.mark.exhaustive  # test_attention_as_a_kernel_changes_nothing sees the kernel
@pytest.mark.slow
def test_long_term_tokens_by_the_attention_s_kernel(monkeypatch):
    """In interpret mode, values and gradients: x is the only context, and h stands behind P."""
    model, tokens = small.build(small.config("mac", **LONG_TERM, dtype="float32")), small.tokens(batch=1, time=13)
    graphdef, params = nnx.split(model)

    def program():
        return jax.jit(jax.value_and_grad(lambda params: jnp.sum(jnp.sin(nnx.merge(graphdef, params)(tokens)))))(params)

    plain, seen = program(), []

    def attention(queries, context, prefix, index):
        seen.append([rows.shape[1] for rows in jax.tree.leaves((queries, context, prefix))])
        return fused_segment_attention(queries, context, prefix)

    monkeypatch.setattr(mac, "segment_attention", attention)
    for a, b in zip(jax.tree.leaves(program()), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4 * np.abs(b).max())
    assert seen == [[size] * 3 + [6, 6] for size in (small.SEGMENT, 13 % small.SEGMENT)]


def test_segments_hold_whole_chunks_of_a_preset_with_chunks_of_its_own(monkeypatch):
    """Where the memory's chunk is not that of the configuration, the two would part at a segment's start."""
    monkeypatch.setattr(mac, "memory_rule", lambda config: dataclasses.replace(memory_rule(config), chunk_size=8))
    model = small.config("mac")
    model = dataclasses.replace(model, segment=12, memory=dataclasses.replace(model.memory, chunk_size=4))
    with pytest.raises(ConfigError, match="^model.segment is 12; use a multiple of model.memory.chunk_size 8, such as"):
        check_model(model)
    check_model(dataclasses.replace(model, segment=16))
