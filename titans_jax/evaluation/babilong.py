"""BABILong: questions on bAbI facts that are scattered over novels (arXiv 2406.10149), asked with worked examples.

    titans evaluate RUN babilong --data DATA --length 131072    qa1 to qa5 at 0K (facts alone), 1K, 2K, .. 128K

Facts and questions are bAbI's test files (en-10k), the background the novels of `books/valid.jsonl` or `--text`.
An answer is 20 tokens of greedy decoding, scored by BABILong's compare_answers (`babi` has it, and the differences from
BABILong). Lengths are in tokens of the model's own tokenizer, the published ones in GPT-2's.
"""

from __future__ import annotations

import functools
import random
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from titans_jax.data import Tokenizer
from titans_jax.evaluation import babi
from titans_jax.evaluation.asking import Answer, Asking, Question, mean_of_tasks
from titans_jax.evaluation.documents import find_file, read_documents
from titans_jax.evaluation.evaluators import EvaluationError, EvaluationOptions, Numbers, register_evaluator
from titans_jax.plots import figure

if TYPE_CHECKING:
    from titans_jax.training import Run

ARCHIVE, BOOKS = "babi/tasks_1-20_v1-2.en-10k.tar", "books/valid.jsonl"
SHORTEST, SAMPLES = 1024, 100
TASKS = tuple(babi.LABELS)
PUBLISHED_LENGTHS = "the published ones are 1,000 x 2^k tokens of GPT-2's tokenizer"


@register_evaluator()
def babilong(run: Run, options: EvaluationOptions) -> Numbers:
    """BABILong qa1 to qa5: percent of right answers, with facts alone and in novels, to `options.length` tokens.

    Reads `options.samples` questions of each (default 100). Writes babilong.csv, .json with every answer and .png. The
    tables say how many stories a length has room for, and how many facts these have.

    Raises:
      EvaluationError: a file is missing or cannot be read, or the model's logits are not finite.
    """
    stories = {task: read_task(options.data, task) for task in TASKS}
    books = options.text or find_file(options.data, BOOKS)
    try:
        background = babi.Background(read_documents(run, books, None if options.text else "text"), run.tokenizer)
    except ValueError as error:
        raise EvaluationError(f"{books}: {error}") from error
    questions = Questions(stories, background, run.tokenizer)
    header = {
        "lengths": f"{SHORTEST:,} x 2^k tokens of {run.config.data.tokenizer}; {PUBLISHED_LENGTHS}",
        "facts": f"the test files of {find_file(options.data, ARCHIVE)}; the published ones are of the train files",
        "stories": "those with at most (length - 300) / 8 facts, as published, whose facts have room",
        "books": str(books),
        "sentences": "titans_jax's own rule, not nltk's Punkt",
    }
    lengths = [0] + [SHORTEST << power for power in range((options.length // SHORTEST).bit_length())]
    samples = options.samples or SAMPLES
    asking = Asking("babilong", TASKS, lengths, samples, questions.ask, header, draw, columns=questions.describe)
    numbers = asking.measure(run, options)
    return numbers | {"mean": mean_of_tasks(numbers)}


class Questions:
    """The questions of the tasks at every length, always the same."""

    def __init__(self, stories: Mapping[str, Sequence[babi.Story]], background: babi.Background, tokenizer: Tokenizer):
        self._stories, self._background, self._tokenizer = stories, background, tokenizer
        self._room = functools.cache(self._room)
        self._fitting = functools.cache(self._fitting)

    def ask(self, task: str, length: int, number: int) -> Question:
        """Question `number` of a task in a prompt that has `length` tokens with its answer; 0 is the facts alone.

        Stories come in an order that is drawn for every task and length, and are repeated where there are too few.

        Raises:
          ValueError: no story fits the length.
        """
        fitting = self._fitting(task, length)
        if not fitting:
            raise ValueError(f"length is {length:,} tokens, too few for the facts of its stories; use a larger length")
        story, chance = fitting[number % len(fitting)], random.Random(f"{task} {length} {number}")
        prompt = babi.ask(task, " ".join(story.facts), story.question)
        if length:
            prompt = self._hide(chance, task, length, story)
        right = lambda said: float(babi.is_right(task, story, said))  # noqa: E731
        return Question(prompt, (story.answer,), None, babi.GENERATED, right)

    def describe(self, task: str, length: int) -> dict[str, float]:
        """How many stories of a task have room in a length, of how many, and how many facts they have on average."""
        fitting = self._fitting(task, length)
        facts = round(float(np.mean([len(story.facts) for story in fitting])), 1)
        return {"stories_that_fit": len(fitting), "of_stories": len(self._stories[task]), "mean_facts": facts}

    def _fitting(self, task: str, length: int) -> list[babi.Story]:
        fitting = [story for story in self._stories[task] if not length or self._fits(task, length, story)]
        random.Random(f"{task} {length}").shuffle(fitting)
        return fitting

    def _fits(self, task: str, length: int, story: babi.Story) -> bool:
        """As in BABILong the question counts as a fact; unlike there, facts may have more tokens than 8 each."""
        few = len(story.facts) + 1 <= (length - babi.ROOM) // babi.TOKENS_OF_A_FACT
        tokens = self._background.size(story.facts) + babi.SHORTEST_SENTENCE
        return few and tokens <= self._room(task, length, story.question)

    def _hide(self, chance: random.Random, task: str, length: int, story: babi.Story) -> str:
        room = self._room(task, length, story.question)
        while True:
            prompt = babi.ask(task, self._background.hide(chance, story.facts, room), story.question)
            # The context's first word, which has no blank before it, may have more tokens than after a blank.
            if self._tokens(prompt) <= length:
                return prompt
            room -= 1

    def _room(self, task: str, length: int, question: str) -> int:
        """Tokens of the context: as in BABILong, or fewer where the words around it and the answer need more room."""
        return length - max(babi.ROOM, self._tokens(babi.ask(task, "", question)))

    def _tokens(self, prompt: str) -> int:
        """Tokens of a prompt with its answer, and the token in front of both."""
        return 1 + len(self._tokenizer.encode(prompt)) + babi.GENERATED


def read_task(folder: Path, task: str, split: Literal["train", "test"] = "test") -> list[babi.Story]:
    """The stories of a task's file, without the last one, which BABILong never asks.

    Where the archive has several such files, the one of en-10k is read.

    Raises:
      EvaluationError: the archive is missing, damaged or without the file.
    """
    archive = find_file(folder, ARCHIVE)
    try:
        with tarfile.open(archive) as files:
            found = [each for each in files if f"/{task}_" in each.name and each.name.endswith(f"_{split}.txt")]
            if not found:
                raise EvaluationError(f"{archive} has no {split} file of {task}; fetch it again")
            member = max(found, key=lambda each: "/en-10k/" in each.name)
            return babi.read_stories(files.extractfile(member).read().decode())[:-1]
    except (OSError, EOFError, tarfile.TarError, ValueError) as error:
        if isinstance(error, EvaluationError):
            raise
        raise EvaluationError(f"{archive} cannot be read ({str(error).splitlines()[0]}); fetch it again") from error


def draw(answers: list[Answer], note: str, file: Path) -> None:
    """Accuracy of every task at every length, as colours and numbers."""
    tasks, lengths = (list(dict.fromkeys(getattr(each, name) for each in answers)) for name in ("task", "length"))
    cells = np.full((len(tasks), len(lengths)), np.nan)
    for row, column in np.ndindex(cells.shape):
        own = (tasks[row], lengths[column])
        right = [answer.accuracy for answer in answers if (answer.task, answer.length) == own]
        cells[row, column] = 100 * np.mean(right) if right else np.nan
    with figure(file, width=1.5 + 0.8 * len(lengths), height=3.2, note=note) as axes:
        axes.imshow(cells, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
        for (row, column), value in np.ndenumerate(cells):
            if np.isfinite(value):
                axes.text(column, row, f"{value:.0f}", ha="center", va="center")
        axes.set_xticks(range(len(lengths)), [f"{length // 1024}K" for length in lengths])
        axes.set_yticks(range(len(tasks)), tasks)
        axes.set(xlabel="tokens", title="right (%)")
