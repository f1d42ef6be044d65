"""BABILong: questions on bAbI facts that are scattered over novels (arXiv 2406.10149), asked with worked examples.

    titans evaluate RUN babilong --data DATA --length 131072    qa1 to qa5 at 0K (facts alone), 1K, 2K, .. 128K

Facts and questions are bAbI's test files (en-10k), the background the novels of `books/valid.jsonl` or `--text`.
Answers are the 20 most likely tokens and count by BABILong's compare_answers (see `babi`, also for what differs).
Lengths are in tokens of the model's own tokenizer, the published ones in GPT-2's.
"""

from __future__ import annotations

import random
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

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


@register_evaluator()
def babilong(run: Run, options: EvaluationOptions) -> Numbers:
    """BABILong qa1 to qa5: percent of right answers, with facts alone and in novels, to `options.length` tokens.

    Reads `options.samples` questions of each (default 100). Writes babilong.csv, .json with every answer and .png.

    Raises:
      EvaluationError: a file is missing or cannot be read, or the model's logits are not finite.
    """
    stories = {task: read_task(options.data, task) for task in TASKS}
    books = options.text or find_file(options.data, BOOKS)
    try:
        background = babi.Background(read_documents(run, books), run.tokenizer)
    except ValueError as error:
        raise EvaluationError(f"{books}: {error}") from error

    def make(task: str, length: int, number: int) -> Question:
        chance = random.Random(f"{task} {length} {number}")
        context, fitting = length - babi.ROOM, stories[task]
        if length:  # as BABILong, of stories with few facts for the length only
            fitting = [story for story in fitting if len(story.facts) < length // 8]
        for _ in range(100):
            story = chance.choice(fitting)
            try:
                text = background.hide(chance, story.facts, context) if length else " ".join(story.facts)
            except ValueError:
                continue
            right = lambda said: float(babi.is_right(task, story, said))  # noqa: E731, B023
            return Question(babi.ask(task, text, story.question), (story.answer,), None, babi.GENERATED, right)
        raise ValueError(f"length is {length:,} tokens, too few for the facts of its stories; use a larger length")

    lengths = [0] + [SHORTEST << power for power in range((options.length // SHORTEST).bit_length())]
    header = {"books": str(books), "facts": str(find_file(options.data, ARCHIVE)), "sentences": "titans_jax's own rule"}
    asking = Asking("babilong", TASKS, lengths, options.samples or SAMPLES, make, header, draw)
    numbers = asking.measure(run, options)
    return numbers | {"mean": mean_of_tasks(numbers)}


def read_task(folder: Path, task: str, split: Literal["train", "test"] = "test") -> list[babi.Story]:
    """The stories of a task's file, but for the last, which BABILong never asks.

    That of en-10k, where the archive has several.

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
