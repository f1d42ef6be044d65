import json
import threading
from itertools import islice

import numpy as np
import pytest

from titans_jax.config import DataConfig
from titans_jax.data import load_tokenizer, train_batches, validation_batches

TOKENIZER = load_tokenizer("byte")
# 20 of these 30 documents are to train on. With their border they are 33 tokens: 40 full rows of 16, and 20 single
# tokens in two more (41.25 rows as a stream), so that a batch of 4 straddles the epochs.
TEXTS = ["".join(np.random.default_rng(number).choice(list("abcdefgh"), 32)) for number in range(30)]
ROWS_AN_EPOCH = 42


@pytest.fixture
def batches(text_config):
    """A function that makes iterators over the same files, closed when the test ends."""
    made = []
    config = text_config(TEXTS)

    def make(process_index=0, process_count=1, **fields):
        fields = {**vars(config), **fields}
        made.append(
            train_batches(DataConfig(**fields), TOKENIZER, process_index=process_index, process_count=process_count)
        )
        return made[-1]

    yield make
    for iterator in made:
        iterator.close()


def assert_equal(batch, other):
    assert batch.keys() == other.keys() == {"tokens", "targets", "segment_ids"}
    for name in batch:
        np.testing.assert_array_equal(batch[name], other[name])


def together(parts):
    """The global batch of the parts of all processes, as jax.make_array_from_process_local_data lays it out."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def rows_of(batches):
    return [row.tobytes() for batch in batches for row in batch["tokens"]]


def test_batches_have_the_promised_form(batches):
    iterator = batches()
    batch = next(iterator)
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        name: ((4, 16), np.dtype(np.int32)) for name in ("tokens", "targets", "segment_ids")
    }
    assert iterator.statistics.num_rows == ROWS_AN_EPOCH


def test_an_epoch_has_every_row_once_in_an_order_of_its_own(batches):
    rows = rows_of(islice(batches(batch_size=2), 2 * ROWS_AN_EPOCH // 2))
    first, second = rows[:ROWS_AN_EPOCH], rows[ROWS_AN_EPOCH:]
    assert len(set(first)) == ROWS_AN_EPOCH
    assert set(first) == set(second) and first != second
    other_seed = rows_of(islice(batches(batch_size=2, seed=1), ROWS_AN_EPOCH // 2))
    assert set(other_seed) == set(first) and other_seed != first


def test_the_same_fields_give_the_same_batches(batches):
    for batch, other in zip(islice(batches(), 15), islice(batches(), 15), strict=True):
        assert_equal(batch, other)


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("position", [0, 1, 9, 10, 11, 25])
def test_a_restored_iterator_continues_bit_for_bit(batches, packing, position):
    whole = list(islice(batches(packing=packing), position + 12))
    iterator = batches(packing=packing)
    for _ in range(position):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    assert state == {"next_row": 4 * position}
    fresh = batches(packing=packing)
    next(fresh)  # has read ahead from the beginning, which set_state must forget
    fresh.set_state(state)
    assert fresh.get_state() == state
    for batch, other in zip(whole[position:], fresh, strict=False):
        assert_equal(batch, other)


def test_the_state_counts_batches_handed_out_not_those_read_ahead(batches, monkeypatch):
    iterator = batches()
    read, done = [], threading.Event()
    original = iterator._read

    def count(first_row):
        read.append(first_row)
        if len(read) >= 3:
            done.set()
        return original(first_row)

    monkeypatch.setattr(iterator, "_read", count)
    iterator.set_state({"next_row": 0})
    next(iterator)
    assert done.wait(timeout=20)
    assert iterator.get_state() == {"next_row": 4}


@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_the_batches_of_one(batches, count):
    parts = [batches(process, count) for process in range(count)]
    for batch, *shares in zip(islice(batches(), 15), *parts, strict=False):
        assert all(share["tokens"].shape == (4 // count, 16) for share in shares)
        assert_equal(batch, together(shares))


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (4, 2)])
def test_the_state_does_not_depend_on_the_number_of_processes(batches, before, after):
    whole = list(islice(batches(), 17))
    saving = [batches(process, before) for process in range(before)]
    for _ in range(9):
        for iterator in saving:
            next(iterator)
    states = [iterator.get_state() for iterator in saving]
    assert all(state == states[0] for state in states)
    restoring = [batches(process, after) for process in range(after)]
    for iterator in restoring:
        iterator.set_state(states[0])
    for batch, *shares in zip(whole[9:], *restoring, strict=False):
        assert_equal(batch, together(shares))


def test_another_batch_size_continues_with_the_same_rows(batches):
    rows = rows_of(islice(batches(), 14))
    iterator = batches(batch_size=8)
    iterator.set_state({"next_row": 12})
    assert rows_of(islice(iterator, 5)) == rows[12:52]


def test_a_closed_iterator_leaves_no_thread(batches):
    before = set(threading.enumerate())
    iterator = batches()
    next(iterator)
    started = set(threading.enumerate()) - before
    assert started
    iterator.close()
    for thread in started:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize("state", [None, {}, {"next_row": -1}, {"next_row": "4"}])
def test_a_wrong_position_is_refused(batches, refused, state):
    with refused("data position", "next_row"):
        batches().set_state(state)


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_validation_sees_every_token_once_and_can_be_repeated(text_config, packing, batch_size):
    validation = validation_batches(text_config(TEXTS, packing=packing, batch_size=batch_size), TOKENIZER)
    first, second = list(validation), list(validation)
    assert len(first) == len(validation) == -(-validation.statistics.num_rows // batch_size)
    for batch, other in zip(first, second, strict=True):
        assert_equal(batch, other)
    targets = np.concatenate([batch["targets"].ravel() for batch in first])
    expected = [token for text in TEXTS[2::3] for token in [*text.encode(), 256]]
    assert sorted(targets[targets >= 0]) == sorted(expected)
    assert validation.statistics.num_tokens == len(expected)


def test_the_first_validation_batches_are_a_sample_that_no_seed_changes(text_config):
    config = text_config(["x" * 400, "x" * 400, "a" * 400 + "b" * 400], packing="stream")
    first = next(iter(validation_batches(config, TOKENIZER)))
    assert {ord("a"), ord("b")} <= set(first["tokens"].ravel().tolist())  # in the order of the text, a alone
    assert_equal(first, next(iter(validation_batches(DataConfig(**{**vars(config), "seed": 1}), TOKENIZER))))


def test_validation_is_shared_by_processes(text_config):
    config = text_config(TEXTS)
    shares = [validation_batches(config, TOKENIZER, process_index=process, process_count=2) for process in range(2)]
    for batch, *parts in zip(validation_batches(config, TOKENIZER), *shares, strict=True):
        assert_equal(batch, together(parts))


def test_statistics(text_config):
    statistics = validation_batches(text_config(["x", "y", "ééé", "x", "y", ""]), TOKENIZER).statistics
    assert (statistics.num_documents, statistics.num_bytes, statistics.num_tokens) == (1, 6, 7)
    assert (statistics.bytes_per_token, statistics.padding) == (6 / 7, 9 / 16)
    assert "7 tokens" in str(statistics)


def test_real_books_with_a_real_tokenizer(shared_data):
    """shared/data/README.md: the 6 validation books are 1.56 M tokens."""
    tokenizer = load_tokenizer(str(shared_data / "tokenizers/mistral-v1/tokenizer.model"))
    path = str(shared_data / "books/valid.jsonl.xz")
    config = DataConfig(source="jsonl", path=path, validation_path=path, sequence_length=2048, packing="documents")
    validation = validation_batches(config, tokenizer, align=64)
    assert validation.statistics.num_documents == 6
    assert validation.statistics.num_tokens == pytest.approx(1.56e6, abs=5e3)
    assert 3.5 < validation.statistics.bytes_per_token < 4.2
    assert validation.statistics.padding < 0.01
    assert sum(np.count_nonzero(batch["targets"] >= 0) for batch in validation) == validation.statistics.num_tokens


def test_the_default_needs_nothing():
    iterator = train_batches(DataConfig(), TOKENIZER)
    assert iterator.statistics.num_bytes > 5e6
    batch = next(iterator)
    iterator.close()
    assert "\n" in TOKENIZER.decode(batch["tokens"][0])
    inside = (batch["segment_ids"][:, :-1] == batch["segment_ids"][:, 1:]) & (batch["segment_ids"][:, 1:] > 0)
    assert inside.mean() > 0.9
    np.testing.assert_array_equal(batch["targets"][:, :-1][inside], batch["tokens"][:, 1:][inside])


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"batch_size": 6}, ["data.batch_size=6", "4 processes", "multiple of 4"]),
        ({"batch_size": 0}, ["data.batch_size=0"]),
        ({"batch_size": 64}, ["data.batch_size=64", f"{ROWS_AN_EPOCH} rows", "data.path"]),
        ({"seed": -1}, ["data.seed=-1", "use 0 to"]),
        ({"sequence_length": 0}, ["data.sequence_length=0"]),
        ({"packing": "none"}, ["data.packing='none'"]),
    ],
)
def test_wrong_fields_are_refused(batches, refused, fields, words):
    with refused(*words):
        batches(process_count=4, **fields)


def test_empty_documents_are_refused(text_config, refused):
    config = text_config(["", "", "validation"])
    with refused("train documents", "data.path", "no text"):
        train_batches(config, TOKENIZER)


def test_no_validation_documents_are_refused(text_config, refused):
    with refused("data.validation_every=50", "from 2 to 5"):
        validation_batches(text_config(list("abcde"), validation_every=50), TOKENIZER)
