"""Associative recall: what a sequence holds, where it asks, and that nothing else is asked."""

import numpy as np
import pytest

from titans_jax.data import DataError
from titans_jax.data.recall import BLANK, RecallTask, recall_sequences

TASK = RecallTask(num_pairs=5, sequence_length=40, vocab_size=32)
COUNT = 300


@pytest.fixture(scope="module")
def sequences():
    return recall_sequences(TASK, COUNT, seed=3)


def test_every_key_is_asked_once_and_its_answer_was_shown(sequences):
    for tokens, targets in zip(sequences["tokens"], sequences["targets"], strict=True):
        shown = {}
        for key, value in zip(tokens[:10:2], tokens[1:10:2], strict=True):
            assert key not in shown
            shown[int(key)] = int(value)
        asked = [(int(tokens[t]), int(targets[t])) for t in range(40) if targets[t] != -1]
        assert sorted(asked) == sorted(shown.items())
        assert len(set(shown.values())) == 5


def test_keys_values_and_the_blank_are_different_tokens(sequences):
    tokens = sequences["tokens"]
    keys, values = set(tokens[:, 0:10:2].flat), set(tokens[:, 1:10:2].flat)
    assert keys == set(range(1, 16)) and values == set(range(16, 32))  # all of them occur
    assert set(TASK.keys) == keys and set(TASK.values) == values and BLANK not in keys | values
    assert set(tokens[:, 10:].flat) <= keys | {BLANK}  # an answer is never read


def test_only_queries_have_a_target(sequences):
    tokens, targets = sequences["tokens"], sequences["targets"]
    assert tokens.shape == targets.shape == (COUNT, 40)
    assert tokens.dtype == targets.dtype == np.int32
    assert np.all(targets[:, :10] == -1)
    assert np.array_equal(targets[:, 10:] != -1, tokens[:, 10:] != BLANK)
    assert np.all(targets[:, 11::2] == -1)  # a query is followed by the place of its answer
    assert np.all(np.sum(targets != -1, axis=1) == 5)


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_gaps_follow_the_power_law(power):
    task = RecallTask(num_pairs=1, sequence_length=18, vocab_size=8, power=power)
    count = 20_000
    _, places = np.nonzero(recall_sequences(task, count, seed=0)["targets"] != -1)
    observed = np.bincount((places - 2) // 2, minlength=8) / count
    expected = np.arange(1, 9) ** (power - 1.0)
    expected /= expected.sum()
    assert np.all(np.abs(observed - expected) < 5 * np.sqrt(expected / count))


def test_slots_are_drawn_one_after_another():
    """The order of two queries, against the law of drawing without replacement worked out by hand."""
    task = RecallTask(num_pairs=2, sequence_length=8, vocab_size=8, power=0.01)  # two slots, both taken
    sequences = recall_sequences(task, 20_000, seed=1)
    first_asked_first = np.mean(sequences["tokens"][:, 4] == sequences["tokens"][:, 0])
    assert abs(first_asked_first - 1 / (1 + 2**-0.99)) < 0.02


def test_a_seed_says_everything():
    one, same, other = (recall_sequences(TASK, 20, seed) for seed in (0, 0, 1))
    for name in ("tokens", "targets"):
        assert np.array_equal(one[name], same[name])
        assert not np.array_equal(one[name], other[name])
    rows = {row.tobytes() for row in one["tokens"]}
    assert rows.isdisjoint(row.tobytes() for row in other["tokens"])


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((0, 32, 32), "num_pairs is 0; use at least 1"),
        ((5, 19, 32), "sequence_length is 19; use at least 20"),
        ((5, 21, 32), "sequence_length is 21; use an even number, such as 22"),
        ((5, 20, 11), "vocab_size is 11; use at least 12"),
        ((5, 20, 12, 0.0), "power is 0.0; use a positive number"),
    ],
)
def test_sizes_that_hold_no_sequence_are_refused(sizes, message):
    with pytest.raises(DataError, match=message):
        RecallTask(*sizes)


@pytest.mark.parametrize("sizes", [(5, 20, 12), (5, 22, 13), (1, 4, 4)])
def test_the_smallest_sizes_work(sizes):
    assert np.all(np.sum(recall_sequences(RecallTask(*sizes), 7, 0)["targets"] != -1, axis=1) == sizes[0])
