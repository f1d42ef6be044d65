"""Finding documents in segment ids, and rearranging rows so that documents are aligned."""

import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax.layers.document_layout import aligned, find_documents, gather, relay, scatter

IDS = jnp.array([[3, 3, 3, 1, 1, 0, 0, 2, 2, 2, 0], [0, 0, 5, 5, 5, 5, 6, 6, 6, 6, 6]], jnp.int32)


def test_find_documents():
    documents = find_documents(IDS)
    np.testing.assert_array_equal(np.flatnonzero(documents.starts[0]), [0, 3, 7])
    np.testing.assert_array_equal(np.flatnonzero(documents.starts[1]), [2, 6])
    np.testing.assert_array_equal(documents.positions[0], [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3])
    np.testing.assert_array_equal(documents.index[0], [1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3])
    np.testing.assert_array_equal(documents.mask, IDS != 0)


def test_aligned():
    np.testing.assert_array_equal(aligned(find_documents(IDS), 1), [True, True])
    np.testing.assert_array_equal(aligned(find_documents(IDS), 2), [False, True])


@pytest.mark.parametrize("granularity", [1, 4])
def test_relay_aligns_every_document_and_brings_it_back(granularity):
    length, tokens = 20, jnp.arange(22, dtype=jnp.int32).reshape(2, 11) + 100
    layout = relay(find_documents(IDS), granularity, length)
    assert layout.fits.all()
    moved = find_documents(scatter(layout, find_documents(IDS).index + 1, length))
    assert aligned(moved, granularity).all()
    rows = scatter(layout, tokens, length)
    np.testing.assert_array_equal(rows[0, :3], tokens[0, :3])
    second = 4 if granularity == 4 else 3
    np.testing.assert_array_equal(rows[0, second : second + 2], tokens[0, 3:5])
    back = gather(layout, rows[..., None])[..., 0]
    np.testing.assert_array_equal(np.where(IDS != 0, back, 0), np.where(IDS != 0, tokens, 0))


def test_relay_tells_rows_that_do_not_fit():
    np.testing.assert_array_equal(relay(find_documents(IDS), 4, 10).fits, [False, True])  # it ends in slot 10
