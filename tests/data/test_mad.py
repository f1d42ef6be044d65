"""The six tasks of MAD: their sizes, what is asked, and that what is asked can be answered."""

import numpy as np
import pytest

from titans_jax.data import DataError
from titans_jax.data.mad import CHANGES, SETTINGS, MadSetting, mad_sequences, memorized, settings


def sequences(task, asked=True, count=60, seed=1, **fields):
    import dataclasses

    return mad_sequences(dataclasses.replace(SETTINGS[task], **fields), count, seed, asked)


def test_settings_are_those_of_mad():
    sizes = {task: (one.vocab_size, one.length, one.train_sequences) for task, one in SETTINGS.items()}
    assert sizes == {
        "in-context-recall": (16, 128, 12800), "fuzzy-in-context-recall": (16, 128, 12800),
        "noisy-in-context-recall": (32, 128, 12800), "memorization": (256, 32, 256), "compression": (16, 32, 12800),
        "selective-copying": (16, 256, 12800),
    }  # fmt: skip
    assert [len(settings(task)) for task in SETTINGS] == [11, 11, 14, 6, 11, 13]
    assert settings("noisy-in-context-recall")["noise 0.8"].noise == 0.8 and list(CHANGES) == list(SETTINGS)


@pytest.mark.parametrize("task", SETTINGS)
def test_a_seed_says_everything(task):
    one, same, other = (sequences(task, count=5, seed=seed) for seed in (1, 1, 2))
    setting = SETTINGS[task]
    assert one["tokens"].shape == one["targets"].shape == (5, setting.length)
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["tokens"], other["tokens"])
    assert one["tokens"].min() >= 0 and one["tokens"].max() < setting.vocab_size


@pytest.mark.parametrize("task", ["in-context-recall", "noisy-in-context-recall"])
def test_recall_asks_for_the_value_a_key_came_with_before(task):
    found = sequences(task)
    size = SETTINGS[task].vocab_size - 16 * (task != "in-context-recall")
    for tokens, targets in zip(found["tokens"], found["targets"], strict=True):
        known = {}
        for place in range(0, 128, 2):
            key, value = tokens[place : place + 2]
            if key >= size:  # noise
                assert value >= size and list(targets[place : place + 2]) == [-1, -1]
                continue
            assert key < size // 2 <= value < size
            assert list(targets[place : place + 2]) == [known.get(key, -1), -1]
            assert known.setdefault(key, value) == value
        assert targets[126] == tokens[127] >= 0  # the last pair is always a seen one


def test_a_share_of_pairs_is_noise():
    tokens = sequences("noisy-in-context-recall", count=300, noise=0.4)["tokens"]
    assert abs(np.mean(tokens[:, :-2:2] >= 16) - 0.4) < 0.02


def test_training_has_every_next_token():
    for task in ("in-context-recall", "noisy-in-context-recall", "fuzzy-in-context-recall"):
        found = sequences(task, asked=False)
        assert np.array_equal(found["targets"][:, :-1], found["tokens"][:, 1:])
        assert np.all(found["targets"][:, -1] == -1)


def test_fuzzy_keys_and_values_are_motifs():
    """Read back by hand: what is asked are whole values, after a key of three tokens that came before."""
    found = sequences("fuzzy-in-context-recall")
    for tokens, targets in zip(found["tokens"], found["targets"], strict=True):
        text = tokens[np.argmax(tokens != 15) :]
        asked = targets[len(tokens) - len(text) :]
        kinds = text >= 7
        starts = [0, *(np.flatnonzero(kinds[:-1] & ~kinds[1:]) + 1), len(text)]
        known = {}
        for first, end in zip(starts, starts[1:], strict=False):
            pair, split = text[first:end], first + int(np.argmax(kinds[first:end]))
            key, value = tuple(text[first:split]), tuple(text[split:end])
            assert len(key) == len(set(key)) == 3 and 1 <= len(value) == len(set(value)) <= 3 and 15 not in pair
            wanted = list(value) if key in known else [-1] * len(value)
            assert list(asked[first:end]) == [-1, -1, *wanted, -1]
            assert known.setdefault(key, value) == value
        assert np.any(asked >= 0) and asked[-2] == text[-1]  # the last pair is a seen one


def test_fuzzy_tokens_are_seven_keys_eight_values_and_padding():
    """The 15 tokens that are no padding, halved: keys 0 to 6, values 7 to 14; training pads are targets too."""
    found = sequences("fuzzy-in-context-recall", count=300)
    assert set(np.unique(found["targets"])) == {-1, *range(7, 15)}
    assert set(np.unique(found["tokens"])) == set(range(16)) and np.all(found["tokens"][:, -1] >= 7)
    assert 15 in sequences("fuzzy-in-context-recall", asked=False)["targets"]


@pytest.mark.parametrize("length", [18, 40, 128])
def test_the_last_fuzzy_pair_was_shown_anywhere_before(length):
    """Where its key is first shown is spread over the sequence, and no sequence is without it."""
    first = []
    for tokens, targets in zip(*sequences("fuzzy-in-context-recall", count=400, length=length).values(), strict=True):
        end = int(np.flatnonzero(tokens < 7)[-1]) + 1
        key, value = tokens[end - 3 : end], tokens[end:]
        pair = [*key, *value]
        shown = [at for at in range(end - 3) if list(tokens[at : at + len(pair)]) == pair]
        assert shown and list(targets[end - 1 : -1]) == list(value)
        first.append(shown[0])
    if length == 128:
        assert np.min(first) < 10 and np.max(first) > 100 and 30 < np.mean(first) < 70


def test_memorization_is_one_map_for_all():
    found, known = [sequences("memorization", seed=seed) for seed in (1, 2)], {}
    for tokens, targets in ((t, a) for one in found for t, a in zip(one["tokens"], one["targets"], strict=True)):
        assert np.all(tokens[1::2] == 255) and np.all(targets[::2] == -1)
        for key, value in zip(tokens[::2], targets[1::2], strict=True):
            assert key < 127 <= value < 255 and known.setdefault(key, value) == value
    assert len(known) == len(set(known.values())) == 127


@pytest.mark.parametrize("size", [17, 256, 8192])
def test_no_two_keys_are_memorized_with_one_value(size):
    values = memorized(size)
    assert len(set(values.tolist())) == len(values) == (size - 1) // 2
    assert values.min() >= (size - 1) // 2 and values.max() < size - 1


def test_the_memorized_map_is_that_of_mad():
    """Values of keys 0, 1, 2 and 5 that MAD's own generator (athms/mad-lab, 0f49a45, seed 12345) gives."""
    assert memorized(256)[[0, 1, 2, 5]].tolist() == [239, 241, 146, 213]
    assert memorized(8192)[[0, 1, 2, 5]].tolist() == [6733, 6223, 5379, 6125]


def test_compression_asks_all_back():
    found = sequences("compression")
    assert np.all(found["tokens"][:, -1] == 15) and np.all(found["tokens"][:, :-1] < 15)
    assert np.array_equal(found["targets"], found["tokens"])


def test_copying_asks_for_the_tokens_in_their_order():
    found = sequences("selective-copying")
    for tokens, targets in zip(found["tokens"], found["targets"], strict=True):
        read = tokens[:239]
        assert tokens[239] == 15 and np.all(tokens[240:] == 14) and np.all(targets[:240] == -1)
        assert np.array_equal(targets[240:], read[read < 14]) and len(targets[240:]) == 16
        assert read[-1] < 14  # every blank is before a token


def test_blanks_are_before_tokens_drawn_uniformly():
    """223 blanks for 16 tokens: as many before the first as before the last, 223 / 16 in the mean."""
    tokens = sequences("selective-copying", count=400)["tokens"][:, :239]
    before = [np.diff(np.flatnonzero(row < 14), prepend=-1) - 1 for row in tokens]
    means, error = np.mean(before, axis=0), np.sqrt(223 / 16 * 15 / 16 / 400)
    assert means.shape == (16,) and np.all(np.abs(means - 223 / 16) < 5 * error)


def test_sizes_that_hold_no_sequence_are_refused():
    with pytest.raises(DataError, match="length is 20; use at least 33 for selective-copying"):
        MadSetting("selective-copying", length=20)
    with pytest.raises(DataError, match="length is 17; use at least 18 for fuzzy-in-context-recall"):
        MadSetting("fuzzy-in-context-recall", length=17)
    with pytest.raises(DataError, match="vocab_size is 16; use at least 24"):
        MadSetting("noisy-in-context-recall")
    with pytest.raises(DataError, match="task is 'copy'; use in-context-recall, "):
        MadSetting("copy")
