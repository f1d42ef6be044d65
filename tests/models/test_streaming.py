"""Reading in pieces, whatever the pieces, equals reading at once; and the state does not grow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small

from titans_jax.models import cycles_apart

CHUNKS = [1, small.CHUNK - 1, small.CHUNK, small.CHUNK + 1, small.SEGMENT + 1]
PROMPTS = {
    "mac": [*CHUNKS, small.SEGMENT - 1, small.SEGMENT],
    "lmm": CHUNKS,
    "mag": [*CHUNKS, small.WINDOW],
    "mal": CHUNKS,
    "attention": [1, 5],
    "window": [1, small.WINDOW - 1, small.WINDOW, small.WINDOW + 1],
    "retrofit": [*CHUNKS, small.WINDOW],
    "mamba": [1, 3, small.TIME],
    "samba": [1, 3, small.TIME],
}


def read_in_pieces(model, tokens, pieces):
    """Logits of tokens read in pieces of these sizes and then one by one."""
    batch, time = tokens.shape
    pieces = [*pieces, *[1] * (time - sum(pieces))]
    state, logits, begin = small.init_state(model, batch), [], 0
    for size in pieces:
        piece, state = small.extend(model, tokens[:, begin : begin + size], state)
        logits.append(piece)
        begin += size
    return jnp.concatenate(logits, axis=1)


def assert_same(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * abs(expected).max())


@pytest.mark.slow_but_for("lmm", "window", "mamba")
@pytest.mark.parametrize("kind", small.KINDS)
def test_prompt_then_tokens_equals_the_whole(kind):
    """Prompts that end before, on and after the borders of chunk, window and segment, in float64."""
    with jax.enable_x64(True):
        model, tokens = small.build(small.config(kind)), small.tokens()
        whole = small.forward(model, tokens)
        for prompt in PROMPTS[kind]:
            assert_same(read_in_pieces(model, tokens, [prompt]), whole, 1e-9)


@pytest.mark.slow_but_for("window")
@pytest.mark.parametrize("kind", small.KINDS)
def test_windows_of_whole_segments_known_to_be_that_equal_the_whole(kind):
    """Two windows and a half one; the state is one that any call goes on from, without another compilation."""
    read = jax.jit(lambda model, tokens, state: model.extend(tokens, state, closed=True))
    with jax.enable_x64(True):
        model, tokens = small.build(small.config(kind)), small.tokens(time=24)
        whole, state, logits = small.forward(model, tokens), small.init_state(model, 2), []
        for start in (0, 8, 16):
            piece, state = read(model, tokens[:, start : start + 8 - (start == 16) * 3], state)
            logits.append(piece)
        last, _ = small.extend(model, tokens[:, 21:], state)
        assert_same(jnp.concatenate([*logits, last], axis=1), whole, 1e-9)
        assert read._cache_size() == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", small.KINDS)
def test_pieces_from_the_middle_of_a_chunk_equal_the_whole(kind):
    with jax.enable_x64(True):
        model, tokens = small.build(small.config(kind)), small.tokens()
        whole = small.forward(model, tokens)
        assert_same(read_in_pieces(model, tokens, [5, 4, 7]), whole, 1e-9)
        assert_same(read_in_pieces(model, tokens, [8, 5, 3, 1]), whole, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lmm", "mac"])
def test_steps_are_shared_across_pieces(kind):
    with jax.enable_x64(True):
        model, tokens = small.build(small.config(kind, memory=small.SHARED)), small.tokens()
        whole = small.forward(model, tokens)
        alone = small.build(small.config(kind, memory=small.SHARED | {"share_steps": False}))
        assert abs(small.forward(alone, tokens) - whole).max() > 1e-6
        assert_same(read_in_pieces(model, tokens, [5, 4, 7]), whole, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", small.KINDS)
def test_decoding_equals_training_forward_in_float32(kind):
    # Steps of at most 0.1 / head_dim: with 1 / head_dim and heads of 8 the recurrence itself is so ill-conditioned that
    # float32 token by token is 1e-3 off float64.
    config = small.config(kind, dtype="float32", memory={"max_step_size": 0.1})
    model, tokens = small.build(config), small.tokens()
    assert_same(read_in_pieces(model, tokens, [5]), small.forward(model, tokens), 1e-4)


@pytest.mark.slow
def test_a_hybrid_pattern_streams():
    with jax.enable_x64(True):
        model, tokens = small.build(small.config("lmm", "window", depth=4)), small.tokens()
        assert_same(read_in_pieces(model, tokens, [5]), small.forward(model, tokens), 1e-9)


@pytest.mark.slow_but_for("lmm", "mac")
@pytest.mark.parametrize("kind", small.KINDS)
def test_unrolled_blocks_read_on_alike(kind):
    """After a prompt that the stacked blocks read, and with states of the same size from step to step."""
    step = jax.jit(lambda model, token, state: model.extend(token, state))
    with jax.enable_x64(True):
        model, tokens = small.build(small.config(kind, depth=2)), small.tokens()
        unrolled, whole = model.unrolled(), small.forward(model, tokens)
        _, state = small.extend(model, tokens[:, :5], small.init_state(model, len(tokens)))
        state, logits = cycles_apart(state), []
        assert jax.tree.structure(state) == jax.tree.structure(unrolled.init_state(len(tokens), small.MAX_LENGTH))
        for token in tokens.T[5:]:
            piece, state = step(unrolled, token[:, None], state)
            logits.append(piece)
        assert_same(jnp.concatenate(logits, axis=1), whole[:, 5:], 1e-9)
        assert step._cache_size() == 1


@pytest.mark.parametrize("kind", small.KINDS)
def test_state_has_one_size(kind):
    """After a long text the state has the shapes it had before the first token."""
    model = small.build(small.config(kind, dtype="float32"))
    empty = jax.eval_shape(lambda: model.init_state(2, small.MAX_LENGTH))
    after = jax.eval_shape(lambda: model.extend(small.tokens(time=1000), model.init_state(2, small.MAX_LENGTH))[1])
    assert jax.tree.map(lambda x: (x.shape, x.dtype), empty) == jax.tree.map(lambda x: (x.shape, x.dtype), after)
    if kind != "attention":
        assert empty == jax.eval_shape(lambda: model.init_state(2))


@pytest.mark.slow
def test_rows_of_a_state_are_independent():
    with jax.enable_x64(True):
        model, tokens = small.build(small.config("mac")), small.tokens()
        both = read_in_pieces(model, tokens, [5])
        swapped = read_in_pieces(model, tokens[::-1], [5])
        np.testing.assert_array_equal(both, swapped[::-1])


def test_full_attention_asks_for_max_length():
    model = small.build(small.config("attention", dtype="float32"))
    with pytest.raises(ValueError, match="max_length is None"):
        model.init_state(1)


def test_extend_refuses_no_tokens():
    model = small.build(small.config("lmm", dtype="float32"))
    with pytest.raises(ValueError, match=r"tokens has shape \[2, 0\]"):
        model.extend(small.tokens(time=0), small.init_state(model, 2))
