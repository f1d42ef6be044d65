import resource
from collections import Counter

import numpy as np
import pytest

from titans_jax.data import DataError, load_tokenizer, pack, packing, tokenize

BORDER = 256
TOKENIZER = load_tokenizer("byte")


def random_texts(seed, count=40, longest=60):
    """Documents of 0 to `longest` letters, mostly short."""
    rng = np.random.default_rng(seed)
    lengths = (longest * rng.random(count) ** 2).astype(int)
    return ["".join(rng.choice(list("abcdefgh"), length)) for length in lengths]


def segments(rows):
    """(row, position, tokens, targets) of every segment, found from the segment ids alone."""
    for row in range(len(rows)):
        ids = rows[row]["segment_ids"]
        for segment in range(1, ids.max() + 1):
            (places,) = np.nonzero(ids == segment)
            yield row, places[0], rows[row]["tokens"][places].tolist(), rows[row]["targets"][places].tolist()


def test_two_documents_by_hand():
    corpus = tokenize(["abc", "", "de"], TOKENIZER)
    a, b, c, d, e = b"abcde"

    stream = pack(corpus, sequence_length=4, packing="stream")
    assert [rows["tokens"].tolist() for rows in stream] == [[BORDER, a, b, c], [BORDER, d, e, 0]]
    assert [rows["targets"].tolist() for rows in stream] == [[a, b, c, BORDER], [d, e, BORDER, -1]]
    assert [rows["segment_ids"].tolist() for rows in stream] == [[1, 1, 1, 1], [1, 1, 1, 0]]

    (row,) = pack(corpus, sequence_length=8, packing="documents")
    assert row["tokens"].tolist() == [BORDER, a, b, c, BORDER, d, e, 0]
    assert row["targets"].tolist() == [a, b, c, BORDER, d, e, BORDER, -1]
    assert row["segment_ids"].tolist() == [1, 1, 1, 1, 2, 2, 2, 0]

    (row,) = pack(corpus, sequence_length=9, packing="documents", align=3)
    assert row["tokens"].tolist() == [BORDER, a, b, c, 0, 0, BORDER, d, e]
    assert row["targets"].tolist() == [a, b, c, BORDER, -1, -1, d, e, BORDER]
    assert row["segment_ids"].tolist() == [1, 1, 1, 1, 0, 0, 2, 2, 2]

    rows = pack(corpus, sequence_length=3, packing="documents")
    pieces = [(tokens, targets) for _, _, tokens, targets in segments(rows)]
    assert sorted(pieces) == sorted([([BORDER, a, b], [a, b, c]), ([c], [BORDER]), ([BORDER, d, e], [d, e, BORDER])])


def test_many_tokens_are_kept_in_a_file(monkeypatch):
    texts = random_texts(seed=0)
    expected = tokenize(texts, TOKENIZER)
    assert not isinstance(expected.tokens, np.memmap)
    monkeypatch.setattr(packing, "IN_MEMORY", 8)
    corpus = tokenize(texts, TOKENIZER)
    assert isinstance(corpus.tokens, np.memmap)
    np.testing.assert_array_equal(corpus.tokens, expected.tokens)
    assert corpus.fingerprint() == expected.fingerprint()


def test_no_room_for_many_tokens_is_told(monkeypatch):
    """A limit on the size of files stands for the full disk."""
    monkeypatch.setattr(packing, "IN_MEMORY", 8)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(DataError, match="cannot be written .*TMPDIR"):
            tokenize(random_texts(seed=0), TOKENIZER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("sequence_length, align", [(1, 1), (16, 1), (16, 4), (16, 16), (16, 64), (13, 5), (500, 8)])
def test_every_token_is_predicted_once_from_what_precedes_it(packing, sequence_length, align):
    texts = random_texts(seed=sequence_length + align)
    rows = pack(tokenize(texts, TOKENIZER), sequence_length=sequence_length, packing=packing, align=align)
    found = Counter()
    for row in rows:
        assert all(array.shape == (sequence_length,) and array.dtype == np.int32 for array in row.values())
        assert ((row["segment_ids"] == 0) == (row["targets"] == -1)).all()
        assert (row["tokens"][row["segment_ids"] == 0] == 0).all()
        found.update(zip(row["tokens"].tolist(), row["targets"].tolist(), strict=True))
    del found[0, -1]
    expected = Counter()
    for text in filter(None, texts):
        expected.update(zip([BORDER, *text.encode()], [*text.encode(), BORDER], strict=True))
    assert found == expected


@pytest.mark.parametrize("sequence_length, align", [(1, 1), (16, 1), (16, 4), (16, 16), (16, 64), (13, 5), (500, 8)])
def test_documents_are_whole_aligned_segments(sequence_length, align):
    texts = [text for text in random_texts(seed=sequence_length * align) if text]
    rows = pack(tokenize(texts, TOKENIZER), sequence_length=sequence_length, packing="documents", align=align)
    expected = Counter()
    for text in texts:
        inputs = [BORDER, *text.encode()]
        pieces = [inputs[i : i + sequence_length] for i in range(0, len(inputs), sequence_length)]
        expected.update(map(tuple, pieces))
    found = list(segments(rows))
    assert Counter(tuple(tokens) for _, _, tokens, _ in found) == expected
    for _, position, tokens, targets in found:
        assert position % align == 0
        assert targets[:-1] == tokens[1:]
    for row in rows:  # segments count 1, 2, ... from the left
        ids = row["segment_ids"][row["segment_ids"] > 0]
        assert row["segment_ids"][0] == 1 and set(np.diff(ids).tolist()) <= {0, 1}


def test_rows_are_filled():
    """Best fit opens a row only where no other has room, so no two rows are half empty, and few places are lost."""
    rows = pack(tokenize(random_texts(seed=0, count=400), TOKENIZER), sequence_length=64, packing="documents")
    filled = [np.count_nonzero(row["segment_ids"]) / 64 for row in rows]
    assert sum(share <= 0.5 for share in filled) <= 1
    assert np.mean(filled) > 0.95


def test_a_stream_is_one_segment_a_row_and_padded_at_its_end_only():
    rows = pack(tokenize(random_texts(seed=1), TOKENIZER), sequence_length=16, packing="stream")
    assert len(rows) > 5
    assert all((row["segment_ids"] == 1).all() for row in list(rows)[:-1])
    assert set(rows[len(rows) - 1]["segment_ids"].tolist()) <= {0, 1}


def test_rows_have_random_access_and_an_end():
    rows = pack(tokenize(random_texts(seed=2), TOKENIZER), sequence_length=16, packing="documents")
    for index in (3, 0, len(rows) - 1):
        assert all(np.array_equal(rows[index][name], list(rows)[index][name]) for name in rows[0])
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_tokens_are_kept_in_two_bytes_where_they_fit():
    assert tokenize(["text"], TOKENIZER).tokens.dtype == np.uint16


def test_counts():
    corpus = tokenize(["é", "", "ab"], TOKENIZER)
    assert (corpus.num_bytes, corpus.separators.tolist()) == (4, [0, 3, 6])


def test_wrong_fields_are_refused(refused):
    corpus = tokenize(["text"], TOKENIZER)
    with refused("data.packing='rows'", "'stream'"):
        pack(corpus, sequence_length=4, packing="rows")
    with refused("data.sequence_length=0", "1 or more"):
        pack(corpus, sequence_length=0, packing="stream")
    with pytest.raises(ValueError, match="align=0"):
        pack(corpus, sequence_length=4, packing="documents", align=0)
