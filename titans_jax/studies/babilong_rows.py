"""The rows of `titans study babilong`: the stories and books of each part, the tokens of a sample, and its score.

    asked = questions("../shared/data", "words", "qa1", "train")
    sample = asked.draw(random.Random(0), length=512)

A sample is the tokens of a context, of the question, GEN, of the answer, and the end of the text (arXiv 2406.10149).
"""

from __future__ import annotations

import collections
import functools
import hashlib
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from titans_jax import data
from titans_jax.config import ConfigError, DataConfig
from titans_jax.evaluation.babi import Background, Story
from titans_jax.evaluation.babilong import BOOKS, read_task
from titans_jax.evaluation.documents import find_file
from titans_jax.models.loss import Batch

MARGIN = 20
"""Tokens by which a sample is shorter than its row."""
FACTS = 5
"""The facts of a story take at most one in this many of a row's tokens."""
WORDS = "words"
"""Name of the tokenizer of whole words."""
MOST_WORDS = 2046
"""Words of this tokenizer; with the unknown word and the end of the text, it has 2,048 tokens."""
OF_A_BOOK = 1 << 16
"""Characters at the beginning of each book in which frequent words are counted."""

Part = Literal["train", "validation", "test"]


class WordTokenizer:
    """Words and signs as tokens: those of `first`, and the most frequent ones of `texts`; all others are one token.

    It is a `titans_jax.data.Tokenizer`, except that decoding puts a blank between any two tokens.
    """

    def __init__(self, first: Iterable[str], texts: Iterable[str], most: int = MOST_WORDS):
        known = dict.fromkeys(word for text in first for word in split_words(text))
        counts = collections.Counter(word for text in texts for word in split_words(text))
        others = (word for word, _ in counts.most_common() if word not in known)
        self._words = [*known, *(word for word, _ in zip(others, range(most - len(known)), strict=False)), "\ufffd"]
        self._ids = {word: number for number, word in enumerate(self._words)}
        self.vocab_size = len(self._words) + 1
        self.bos_id = self.eos_id = len(self._words)

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer`."""
        unknown = len(self._words) - 1
        return np.array([self._ids.get(word, unknown) for word in split_words(text)], np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer`."""
        return " ".join(self._words[number] for number in map(int, ids) if number < self.eos_id)


def split_words(text: str) -> list[str]:
    """Runs of letters and digits, and every sign that is no blank."""
    return re.findall(r"\w+|[^\w\s]", text)


class Sample(NamedTuple):
    """A question with its answer. tokens: int32 [time], the answer included. gen: the place of GEN."""

    tokens: np.ndarray
    gen: int
    answer: str


class Questions:
    """Stories of one part of the data, and the novels that their facts are hidden in."""

    def __init__(self, stories: Sequence[Story], background: Background, tokenizer: data.Tokenizer):
        self.stories, self._background, self._tokenizer = stories, background, tokenizer
        self._exams: dict[tuple[int, int], list[Sample]] = {}
        size = functools.cache(lambda text: len(tokenizer.encode(text)))
        self._facts = np.array([background.size(story.facts) for story in stories])
        self._asked = np.array([size(story.question) + size(story.answer) + 2 for story in stories])

    @property
    def shortest(self) -> int:
        """Tokens of the shortest row that has room for a story."""
        return int(np.min(np.maximum(FACTS * self._facts, self._facts + self._asked + MARGIN)))

    def fitting(self, length: int) -> np.ndarray:
        """Numbers of the stories that fit rows of `length` tokens, with facts in at most a fifth of them."""
        room = self._facts + self._asked + MARGIN <= length
        return np.flatnonzero(room & (FACTS * self._facts <= length))

    def draw(self, chance: random.Random, length: int, number: int | None = None) -> Sample:
        """A sample for a row of `length` tokens: of the story with this number, or of a random one that fits."""
        number = int(chance.choice(self.fitting(length))) if number is None else number
        story = self.stories[number]
        room = length - MARGIN - int(self._asked[number])
        return sample_of(self._tokenizer, self._background.hide(chance, story.facts, room), story)

    def examined(self, length: int, count: int) -> list[int]:
        """Numbers of `count` stories that fit, always the same; stories are repeated where there are too few."""
        fitting = self.fitting(length).tolist()
        order = random.Random(f"stories {length} {count}").sample(fitting, len(fitting))
        return [order[number % len(order)] for number in range(count)]

    def exam(self, length: int, count: int) -> list[Sample]:
        """The samples of the stories of `examined`, always the same."""
        if (length, count) not in self._exams:
            chance = random.Random(f"novels {length} {count}")
            self._exams[length, count] = [self.draw(chance, length, each) for each in self.examined(length, count)]
        return self._exams[length, count]


def sample_of(tokenizer: data.Tokenizer, context: str, story: Story) -> Sample:
    """Context, question, GEN (the first token of this word), answer and the end of the text, as tokens."""
    gen = tokenizer.encode("GEN")[:1]
    parts = [tokenizer.encode(context), tokenizer.encode(story.question), gen, tokenizer.encode(story.answer)]
    tokens = np.concatenate([*parts, [tokenizer.eos_id]]).astype(np.int32)
    return Sample(tokens, len(parts[0]) + len(parts[1]), story.answer)


def batch_of(samples: Sequence[Sample], length: int) -> Batch:
    """Samples as rows of `length` tokens, whose only targets are the answer and the end of the text, after GEN.

    The rest of a row is filled with the end of the text; it has no targets.
    """
    tokens = np.full((len(samples), length), samples[0].tokens[-1], np.int32)
    targets = np.full_like(tokens, -1)
    for row, sample in enumerate(samples):
        end = len(sample.tokens)
        tokens[row, :end] = sample.tokens
        targets[row, sample.gen : end - 1] = sample.tokens[sample.gen + 1 :]
    return {"tokens": tokens, "targets": targets, "segment_ids": None}


def is_exact(tokenizer: data.Tokenizer, said: Sequence[int], answer: str) -> bool:
    """Whether a model's tokens `said` are exactly the answer, letter by letter, up to the end of the text."""
    said = [int(token) for token in said]
    return tokenizer.eos_id in said and tokenizer.decode(said[: said.index(tokenizer.eos_id)]).strip() == answer


@functools.lru_cache(maxsize=16)
def questions(folder: str, tokenizer: str, task: str, part: Part) -> Questions:
    """The questions of a task, read once for all models.

    Raises:
      EvaluationError, DataError, ConfigError: a file is missing or cannot be used.
    """
    novels = books(folder, "test" if part == "test" else "train")
    known = tokenizer_of(folder, tokenizer, task)
    try:
        return Questions(stories(folder, task)[part], Background(novels, known), known)
    except ValueError as error:
        raise ConfigError(f"folder is {folder!r}: {error}") from error


@functools.lru_cache(maxsize=16)
def stories(folder: str, task: str) -> dict[Part, list[Story]]:
    """A task's stories: its test file for the test, the last tenth of its train file for validation, the rest to train.

    Questions about one course of events stay in one part. Validation leaves out stories of the test, and training those
    of both.

    Raises:
      EvaluationError: see `read_task`. ConfigError: a part would be empty.
    """
    test = read_task(Path(folder), task, "test")
    events: list[list[Story]] = []
    for story in read_task(Path(folder), task, "train"):
        before = events[-1][-1].facts if events else None
        if before is None or story.facts[: len(before)] != before:
            events.append([])
        events[-1].append(story)
    cut = len(events) - max(len(events) // 10, 1)
    train, validation = ([story for event in some for story in event] for some in (events[:cut], events[cut:]))
    validation = without(validation, test)
    train = without(train, test + validation)
    if not (train and validation and test):
        raise ConfigError(f"folder is {folder!r}, whose {task} has too few stories; use bAbI's own files")
    return {"train": train, "validation": validation, "test": test}


def without(some: list[Story], others: list[Story]) -> list[Story]:
    """The stories of `some` that are not among `others`."""
    known = set(others)
    return [story for story in some if story not in known]


@functools.lru_cache(maxsize=4)
def books(folder: str, part: Literal["train", "test"]) -> list[str]:
    """The novels of books/valid.jsonl for the test, and all others of books/ for training and validation.

    Raises:
      EvaluationError, DataError: there are none.
    """
    valid = find_file(Path(folder), BOOKS)
    config = DataConfig(source="jsonl", path=str(valid.parent), validation_path=str(valid))
    return list(data.open_documents(config, "validation" if part == "test" else "train"))


@functools.lru_cache(maxsize=16)
def fingerprint(folder: str, task: str) -> str:
    """16 hexadecimal digits that change with any story of a task and with any novel."""
    digest = hashlib.sha256(repr(stories(folder, task)).encode())
    for part in ("train", "test"):
        for novel in books(folder, part):
            digest.update(novel.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=8)
def tokenizer_of(folder: str, name: str, task: str) -> data.Tokenizer:
    """The tokenizer of this name; "words" has the words of a task's training stories and frequent ones of the novels.

    Raises:
      EvaluationError, DataError: a file is missing.
    """
    if name != WORDS:
        return data.load_tokenizer(name)
    told = (text for story in stories(folder, task)["train"] for text in (*story.facts, story.question, story.answer))
    return WordTokenizer(["GEN", *dict.fromkeys(told)], (text[:OF_A_BOOK] for text in books(folder, "train")))
