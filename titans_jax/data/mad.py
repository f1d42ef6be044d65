"""The six synthetic tasks of MAD (Poli et al., arXiv 2403.17844): recall, plain, fuzzy and noisy; memorization;
compression; selective copying.

    sequences = mad_sequences(SETTINGS["fuzzy-in-context-recall"], count=100, seed=1, asked=True)

`SETTINGS` has the baseline of every task; `CHANGES` has the values that MAD varies from it, one at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from titans_jax.data.errors import DataError

MAP_SEED = 12345
"""Seed of the map from keys to values that memorization asks for."""


@dataclass(frozen=True)
class MadSetting:
    """One task at one difficulty."""

    task: str
    vocab_size: int = 16
    length: int = 128
    train_sequences: int = 12800
    copies: int = 16
    """Selective copying: how many tokens are copied."""
    noise: float = 0.2
    """Noisy recall: the share of pairs that are noise."""
    noise_tokens: int = 16
    """Noisy recall: how many tokens of the vocabulary are noise."""
    motif: int = 3
    """Fuzzy recall: the greatest length of a key or value, in tokens."""

    def __post_init__(self) -> None:
        if self.task not in GENERATORS:
            raise DataError(f"task is {self.task!r}; use {', '.join(GENERATORS)}")
        if self.length < self.shortest:
            raise DataError(f"length is {self.length}; use at least {self.shortest} for {self.task}")
        small = 8 + self.noise_tokens * (self.task == "noisy-in-context-recall")
        if self.vocab_size < small:
            raise DataError(f"vocab_size is {self.vocab_size}; use at least {small} for {self.task}")

    @property
    def shortest(self) -> int:
        """The least length: selective copying has its tokens twice and one token between; fuzzy recall has three of its
        longest pairs; the other tasks have two pairs of tokens."""
        return {"selective-copying": 2 * self.copies + 1, "fuzzy-in-context-recall": 6 * self.motif}.get(self.task, 4)


Generator = np.random.Generator


def mad_sequences(setting: MadSetting, count: int, seed: int, asked: bool) -> dict[str, np.ndarray]:
    """`count` sequences; the same seed gives the same ones.

    asked: True for evaluation: targets only where an answer is wanted, and all keys of fuzzy recall at their greatest
    length. False for training as in MAD: in the three recall tasks every next token is a target, padding too.

    Returns:
      {"tokens", "targets"}, int32 [count, length]; -1 is no target.
    """
    generator = np.random.default_rng(seed)
    rows = [GENERATORS[setting.task](setting, generator, asked) for _ in range(count)]
    tokens, targets = (np.array(part, np.int32).reshape(count, setting.length) for part in zip(*rows, strict=True))
    return {"tokens": tokens, "targets": targets}


Row = tuple[list[int], list[int]]


def in_context_recall(setting: MadSetting, generator: Generator, asked: bool) -> Row:
    """Keys in the lower half of the vocabulary, values in the upper; a value is asked for if its key came before."""
    return _pairs(setting, generator, asked, setting.vocab_size, 0.0)


def noisy_recall(setting: MadSetting, generator: Generator, asked: bool) -> Row:
    """In-context recall with pairs of noise tokens (the last of the vocabulary) in between."""
    return _pairs(setting, generator, asked, setting.vocab_size - setting.noise_tokens, setting.noise)


def _pairs(setting: MadSetting, generator: Generator, asked: bool, vocabulary: int, noise: float) -> Row:
    half, pairs, known = vocabulary // 2, setting.length // 2, {}
    tokens, targets = [], []
    keys, values = generator.integers(half, size=pairs), generator.integers(half, vocabulary, size=pairs)
    noisy = generator.random(pairs) < noise
    for number in range(pairs):
        last = number == pairs - 1
        if noisy[number] and not last:
            tokens += generator.integers(vocabulary, setting.vocab_size, size=2).tolist()
            targets += [-1, -1]
            continue
        # The last key is one that was shown before.
        key = int(generator.choice(list(known))) if last and known else int(keys[number])
        targets += [known.get(key, -1), -1]
        tokens += [key, known.setdefault(key, int(values[number]))]
    tokens, targets = tokens + [0] * (setting.length % 2), targets + [-1] * (setting.length % 2)
    return tokens, targets if asked else [*tokens[1:], -1]


def fuzzy_recall(setting: MadSetting, generator: Generator, asked: bool) -> Row:
    """Keys and values are motifs of one to `motif` different tokens; padding, the last token, is on the left.

    Keys are of the lower half of the other tokens, values of the upper. The last pair was shown before.
    """
    pad = setting.vocab_size - 1
    tokens, targets, shown = [], [], set()

    def draw(first: int, end: int, longest: bool) -> tuple[int, ...]:
        size = setting.motif if longest else generator.integers(1, setting.motif + 1)
        return tuple((first + generator.permutation(end - first)[:size]).tolist())

    def add(key: tuple[int, ...], value: tuple[int, ...]) -> None:
        # The target for a token stands at the token before it.
        targets.extend([-1] * (len(key) - 1) + (list(value) if key in shown else [-1] * len(value)) + [-1])
        tokens.extend(key + value)
        shown.add(key)

    last = draw(0, pad // 2, asked)
    values = {last: draw(pad // 2, pad, False)}
    room = setting.length - len(last) - len(values[last]) - 2 * setting.motif
    # The first pair at or after this place is the last pair: even the longest pair before it leaves room for it.
    place = generator.integers(room - 2 * setting.motif + 1)
    while len(tokens) < room:
        key = last if last not in shown and len(tokens) >= place else draw(0, pad // 2, asked)
        if key not in values:
            values[key] = draw(pad // 2, pad, False)
        add(key, values[key])
    add(last, values[last])
    fill = setting.length - len(tokens)
    tokens, targets = [pad] * fill + tokens, [-1] * fill + targets
    return tokens, targets if asked else [*tokens[1:], -1]


def memorization(setting: MadSetting, generator: Generator, asked: bool) -> Row:
    """Key, insert token (the last), key, insert token, ...: the value of a map that no sequence shows."""
    insert, values = setting.vocab_size - 1, memorized(setting.vocab_size)
    keys = generator.integers(len(values), size=setting.length // 2)
    tokens, targets = np.full(setting.length, insert), np.full(setting.length, -1)
    tokens[: 2 * len(keys) : 2], targets[1 : 2 * len(keys) : 2] = keys, values[keys]
    return tokens.tolist(), targets.tolist()


@functools.lru_cache(maxsize=8)
def memorized(vocab_size: int) -> np.ndarray:
    """The value of each key 0, 1, ... of memorization, no two the same: int64 [(vocab_size - 1) // 2].

    This is MAD's map: the keys, and the tokens after them as values, are both shuffled and then paired in order; one
    value may be left over.
    """
    generator, half = np.random.default_rng(MAP_SEED), (vocab_size - 1) // 2
    keys, values = list(range(half)), list(range(half, vocab_size - 1))
    generator.shuffle(keys)
    generator.shuffle(values)
    found = np.empty(half, np.int64)
    found[keys] = values[:half]
    return found


def compression(setting: MadSetting, generator: Generator, asked: bool) -> Row:
    """Random tokens, then the compress token (the last of the vocabulary); all of them are targets, this one too."""
    last = setting.vocab_size - 1
    tokens = [*generator.integers(last, size=setting.length - 1).tolist(), last]
    return tokens, tokens


def selective_copying(setting: MadSetting, generator: Generator, asked: bool) -> Row:
    """Tokens with blanks before them, the copy token, and as many blanks to fill in as there were tokens.

    Each blank is inserted before a token that is drawn uniformly, so that no blank stands right before the copy token.
    """
    blank, copy = setting.vocab_size - 2, setting.vocab_size - 1
    wanted = generator.integers(blank, size=setting.copies)
    blanks = setting.length - 2 * setting.copies - 1
    read = np.insert(wanted, generator.integers(setting.copies, size=blanks), blank)
    tokens = [*read.tolist(), copy, *[blank] * setting.copies]
    return tokens, [-1] * (len(read) + 1) + wanted.tolist()


GENERATORS: dict[str, Callable[[MadSetting, Generator, bool], Row]] = {
    "in-context-recall": in_context_recall,
    "fuzzy-in-context-recall": fuzzy_recall,
    "noisy-in-context-recall": noisy_recall,
    "memorization": memorization,
    "compression": compression,
    "selective-copying": selective_copying,
}
"""A row of tokens and targets, by task."""

SETTINGS = {
    "in-context-recall": MadSetting("in-context-recall"),
    "fuzzy-in-context-recall": MadSetting("fuzzy-in-context-recall"),
    "noisy-in-context-recall": MadSetting("noisy-in-context-recall", vocab_size=32),
    "memorization": MadSetting("memorization", vocab_size=256, length=32, train_sequences=256),
    "compression": MadSetting("compression", length=32),
    "selective-copying": MadSetting("selective-copying", length=256),
}
"""The baseline of every task."""

_LESS = {"train_sequences": (6400, 3200, 1600, 800)}
_RECALL = {"vocab_size": (32, 64, 128), "length": (256, 512, 1024), **_LESS}

CHANGES: dict[str, dict[str, tuple]] = {
    "in-context-recall": _RECALL,
    "fuzzy-in-context-recall": _RECALL,
    "noisy-in-context-recall": {**_RECALL, "vocab_size": (48, 80, 144), "noise": (0.4, 0.6, 0.8)},
    "memorization": {"vocab_size": (512, 1024, 2048, 4096, 8192)},
    "compression": {"vocab_size": (32, 64, 128), "length": (64, 128, 256), **_LESS},
    "selective-copying": {"copies": (32, 64, 96), "length": (512, 1024), "vocab_size": (32, 64, 128), **_LESS},
}
"""By task, the fields of the baseline that are varied, one value at a time."""


def settings(task: str) -> dict[str, MadSetting]:
    """The baseline of a task and its changes, by name: "baseline", "length 256", ..."""
    changed = {
        f"{field.replace('_', ' ')} {value:g}": dataclasses.replace(SETTINGS[task], **{field: value})
        for field, values in CHANGES[task].items()
        for value in values
    }
    return {"baseline": SETTINGS[task]} | changed
