"""Documents packed in one row, wherever they begin, equal each document alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small

from titans_jax.models import granularity


def pack(lengths, time, align=1):
    """One row: tokens, segment ids and the place of each document; documents begin at multiples of `align`."""
    rng, begin = np.random.default_rng(sum(lengths)), 0
    tokens, ids, places = np.zeros(time, np.int32), np.zeros(time, np.int32), []
    for number, length in enumerate(lengths):
        place = slice(begin, begin + length)
        tokens[place], ids[place] = rng.integers(0, small.VOCAB, length), number + 1
        places.append(place)
        begin = -(-place.stop // align) * align
    return tokens, ids, places


def assert_documents_alone(config, rows, tolerance=1e-10):
    """Rows packed together equal their documents alone; a document alone is a row padded at its end."""
    model, plain = small.build(config), small.build(dataclasses.replace(config, document_slack=0))
    tokens, ids = (jnp.stack([row[i] for row in rows]) for i in range(2))
    packed = np.array(small.forward_packed(model, tokens, ids))
    alone = [(row[0][place], packed[i, place]) for i, row in enumerate(rows) for place in row[2]]
    padded = np.zeros((len(alone), tokens.shape[1]), np.int32)
    for row, (document, _) in zip(padded, alone, strict=True):
        row[: len(document)] = document
    expected = np.array(small.forward(plain, jnp.asarray(padded)))
    assert np.isfinite(packed[np.array(ids) > 0]).all()
    for row, (document, actual) in zip(expected, alone, strict=True):
        np.testing.assert_allclose(actual, row[: len(document)], rtol=tolerance, atol=tolerance * abs(expected).max())


@pytest.mark.slow_but_for("mac")
@pytest.mark.parametrize("kind", small.KINDS)
def test_aligned_documents_need_no_slack(kind):
    with jax.enable_x64(True):
        config = small.config(kind)
        rows = [pack(lengths, 32, granularity(config)) for lengths in ([5, 9, 3], [8, 1, 7], [32], [16, 8])]
        assert_documents_alone(config, rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset, kind",
    [
        ("preconditioned_delta", "lmm"),
        ("preconditioned_delta", "mac"),
        ("mamba3", "lmm"),
        ("mamba3", "mac"),
        ("mamba3_mimo", "lmm"),
    ],
)
def test_documents_of_a_memory_with_a_state_of_the_layer_s_own(preset, kind):
    """Sums of squared keys, phases and the last token start anew, as what the persistent tokens left."""
    with jax.enable_x64(True):
        config = small.config(kind, memory={"preset": preset}, depth=1)
        rows = [pack(lengths, 32, granularity(config)) for lengths in ([5, 9, 3], [8, 1, 7])]
        assert_documents_alone(config, rows)


@pytest.mark.slow
@pytest.mark.parametrize("kind", small.KINDS)
def test_any_documents_fit_with_slack(kind):
    with jax.enable_x64(True):
        config = small.config(kind, document_slack=4 * small.SEGMENT)
        rows = [pack(lengths, 32) for lengths in ([5, 9, 3], [1, 1, 30], [32], [8, 7])]
        assert_documents_alone(config, rows)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["omeganet", "atlas"])
def test_documents_do_not_reach_into_each_other_s_windows(preset):
    """Each begins with the window and the momentum that the persistent tokens left, and shares its steps as alone."""
    with jax.enable_x64(True):
        config = small.config("lmm", memory={"preset": preset} | small.SHARED, depth=1)
        assert_documents_alone(config, [pack(lengths, 32, small.CHUNK) for lengths in ([5, 9, 3], [8, 1, 7], [32])])


@pytest.mark.slow
def test_packed_documents_in_float32():
    config = small.config("mac", dtype="float32", document_slack=4 * small.SEGMENT, memory={"max_step_size": 0.1})
    rows = [pack(lengths, 32) for lengths in ([5, 9, 3], [1, 1, 30], [32], [8, 7])]
    assert_documents_alone(config, rows, 1e-5)


@pytest.mark.slow
def test_a_row_that_does_not_fit_is_nan_and_no_other():
    tokens, ids, _ = pack([5, 9, 18], 32)
    good = pack([32], 32)
    tokens, ids = jnp.stack([tokens, good[0]]), jnp.stack([ids, good[1]])
    for slack in (0, small.CHUNK):
        model = small.build(small.config("lmm", dtype="float32", document_slack=slack))
        logits = small.forward_packed(model, tokens, ids)
        assert jnp.isnan(logits[0]).all() and jnp.isfinite(logits[1]).all()


@pytest.mark.slow
def test_a_document_does_not_see_another():
    """Changing one document changes no bit of another, before or behind it."""
    with jax.enable_x64(True):
        model = small.build(small.config("mac", "mal"))
        tokens, ids, places = pack([8, 11, 5], 32, small.SEGMENT)
        changed = tokens.copy()
        changed[places[1]] = (changed[places[1]] + 1) % small.VOCAB
        ids = jnp.asarray(ids)[None]
        before = np.array(small.forward_packed(model, jnp.asarray(tokens)[None], ids))[0]
        after = np.array(small.forward_packed(model, jnp.asarray(changed)[None], ids))[0]
        for place in (places[0], places[2]):
            np.testing.assert_array_equal(before[place], after[place])
        assert (before[places[1]] != after[places[1]]).any()
