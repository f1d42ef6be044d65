"""Questions with known answers about texts of growing length: asked side by side, scored, and kept in tables and files.

RULER and BABILong share this module. Their tasks make the questions; here these are put to the model in groups that are
read side by side, and the answers so far are kept when a later question fails.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import track

from titans_jax.evaluation.evaluators import EvaluationError, EvaluationOptions, Numbers
from titans_jax.evaluation.results import Table, file_of, header_of, note_of
from titans_jax.inference import Generator, NotFiniteLogits, Sampling
from titans_jax.plots import save_csv, save_json

if TYPE_CHECKING:
    from titans_jax.training import Run

SIDE_BY_SIDE = 16
"""Questions that are read at a time."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt that ends where the answer begins, the right answers, and a score for a given answer, from 0 to 1.

    depth: the place of the answer in the text, from 0 to 1, if it has one. generated: tokens to generate.
    """

    prompt: str
    answers: tuple[str, ...]
    depth: float | None
    generated: int
    score: Callable[[str], float]


@dataclasses.dataclass(frozen=True)
class Answer:
    """The model's answer (`said`) to question number `seed` of a task and length, and its score (`accuracy`)."""

    task: str
    length: int
    seed: int
    depth: float | None
    answers: tuple[str, ...]
    said: str
    accuracy: float


@dataclasses.dataclass(frozen=True)
class Asking:
    """An evaluation by questions.

    name: name of its files. make: (task, length, number) -> the question; raises ValueError, with one sentence, where
    the question does not fit the length. header: what a reader of the numbers must know. draw: (answers, note, file)
    draws the picture. left_out: sentences on tasks that are not asked at any length. columns: (task, length) -> further
    columns of the table.
    """

    name: str
    tasks: Sequence[str]
    lengths: Sequence[int]
    samples: int
    make: Callable[[str, int, int], Question]
    header: dict[str, Any]
    draw: Callable[..., None]
    left_out: Sequence[str] = ()
    columns: Callable[[str, int], dict[str, float | str]] = lambda task, length: {}

    def measure(self, run: Run, options: EvaluationOptions) -> Numbers:
        """The table of each task by its name, a row for every length that its questions fit.

        Writes <name>.csv, .json with every answer, and .png, into the run's folder, each with the header.

        Raises:
          EvaluationError: the model's logits are not finite, or no question fits.
        """
        console, answers = Console(stderr=True), []
        left_out: dict[tuple[str, int], str] = {}
        failure = None
        cells = itertools.product(self.lengths, self.tasks, range(0, self.samples, SIDE_BY_SIDE))
        parts = len(self.lengths) * len(self.tasks) * -(-self.samples // SIDE_BY_SIDE)
        generator = Generator(run.graphdef, run.tokenizer, Sampling(temperature=0))
        try:
            for length, task, first in track(cells, self.name, parts, console=console, transient=True):
                if (task, length) in left_out:
                    continue
                try:
                    answers += self._ask(run, generator, task, length, first)
                except _NoRoom as error:
                    left_out[task, length] = f"{task}: {error}"
        except NotFiniteLogits as error:
            failure = error
        # Where a question does not fit, its task is left out at this length: the answers before it would be a biased
        # sample, of questions short enough to fit.
        kept = [each for each in answers if (each.task, each.length) not in left_out]
        if not kept:
            raise EvaluationError(f"{self.name}: {failure or next(iter(left_out.values()))}") from failure
        header = header_of(run, options) | self.header
        numbers: Numbers = {}
        for task in self.tasks:
            if rows := self._rows([each for each in kept if each.task == task], header["trained_on_rows_of"]):
                numbers[task] = Table(rows, header)
        sentences = [*self.left_out, *left_out.values()]
        self._write(file_of(run, options, self.name), header, kept, numbers, sentences)
        for sentence in sentences:
            console.print(f"titans: left out: {sentence}", highlight=False, soft_wrap=True)
        if failure:
            where = f"the {len(answers):,} answers before are in {self.name}.json"
            raise EvaluationError(f"{self.name}: {failure}; {where}") from failure
        return numbers

    def _ask(self, run: Run, generator: Generator, task: str, length: int, first: int) -> Iterator[Answer]:
        numbers = range(first, min(first + SIDE_BY_SIDE, self.samples))
        try:
            questions = [self.make(task, length, number) for number in numbers]
        except ValueError as error:
            raise _NoRoom(str(error)) from error
        prompts = [question.prompt for question in questions]
        said = generator.complete(run.params, prompts, questions[0].generated)
        for number, question, text in zip(numbers, questions, said, strict=True):
            depth = None if question.depth is None else round(question.depth, 4)
            yield Answer(task, length, number, depth, question.answers, text, question.score(text))

    def _rows(self, answers: list[Answer], trained_on: int) -> list[dict[str, float | str]]:
        rows = []
        for length in dict.fromkeys(answer.length for answer in answers):
            right = [answer.accuracy for answer in answers if answer.length == length]
            accuracy = round(100 * float(np.mean(right)), 2)
            row = {"length": length, "trained_on_rows_of": trained_on, "samples": len(right), "accuracy": accuracy}
            rows.append(row | self.columns(answers[0].task, length))
        return rows

    def _write(
        self, file: Path, header: dict[str, Any], answers: list[Answer], numbers: Numbers, left_out: list[str]
    ) -> None:
        without = {"left_out": left_out} if left_out else {}
        save_json(header | without | {"tables": numbers, "answers": answers}, file.with_suffix(".json"))
        # The header is repeated in every row, so that rows of several files can be joined in one table.
        rows = [{"task": task} | row | header for task in numbers for row in numbers[task]]
        empty = {column: "" for row in rows for column in row}
        save_csv([empty | row for row in rows], file.with_suffix(".csv"))
        self.draw(answers, note_of(header), file.with_suffix(".png"))


def mean_of_tasks(numbers: Numbers) -> list[dict[str, float | str]]:
    """At every length, the mean accuracy over the tasks whose questions fit it, and how many these are."""
    rows = [row for table in numbers.values() for row in table]
    mean = []
    for length in sorted({row["length"] for row in rows}):
        some = [row for row in rows if row["length"] == length]
        accuracy = float(np.mean([row["accuracy"] for row in some]))
        trained_on = some[0]["trained_on_rows_of"]
        mean.append({"length": length, "trained_on_rows_of": trained_on, "tasks": len(some), "accuracy": accuracy})
    return mean


class _NoRoom(Exception):
    pass
