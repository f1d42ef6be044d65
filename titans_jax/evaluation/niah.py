"""Needles in a haystack: what a model still finds of a sentence in a text far longer than its rows.

    titans evaluate RUN niah --length 16384 --samples 100      S-NIAH-1, 2 and 3 of RULER, at 1K, 2K, .. 16K tokens
    titans evaluate RUN ruler --text essays.txt                eleven of RULER's thirteen tasks, and their mean

Prompts are read in pieces by the chunked form, several side by side; answers are the most likely tokens and count by
RULER's string_match_all (see `ruler_tasks`, also for what differs from RULER).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import track

from titans_jax.evaluation.documents import read_documents
from titans_jax.evaluation.evaluators import EvaluationError, EvaluationOptions, Numbers, register_evaluator
from titans_jax.evaluation.needles import ADJECTIVES, NOUNS, Essay
from titans_jax.evaluation.ruler_tasks import TASKS, Sample, make_sample, score
from titans_jax.inference import Generator, NotFiniteLogits, Sampling
from titans_jax.plots import panels, save_csv, save_json

if TYPE_CHECKING:
    from titans_jax.training import Run

SHORTEST = 1024
SAMPLES = 500
DEPTH_BINS = 10
SIDE_BY_SIDE = 16
"""Prompts that are read at a time."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """One sample: which, where its needle stood (0 to 1 of the prompt; None without one), what was said, and how much
    of it was right."""

    task: str
    length: int
    seed: int
    depth: float | None
    answers: tuple[str, ...]
    said: str
    accuracy: float


@register_evaluator()
def niah(run: Run, options: EvaluationOptions) -> Numbers:
    """RULER's S-NIAH-1, 2 and 3: percent of samples whose value is found, at 1,024, 2,048, .. `options.length` tokens.

    Reads `options.samples` samples of each (default 500). Essays are `options.text`, or the run's validation documents.
    Writes niah.csv, niah.json with every answer and niah.png, accuracy over length and depth, into the run's folder.

    Raises:
      EvaluationError: the text cannot be read, the length is less than 1,024, or the model's logits are not finite.
    """
    return measure(run, options, list(TASKS)[:3], "niah")


@register_evaluator()
def ruler(run: Run, options: EvaluationOptions) -> Numbers:
    """Eleven tasks of RULER, as `niah`, and at every length the mean of those whose questions fit it.

    Writes ruler.csv, .json and .png. RULER's qa_1 and qa_2 are not there: they read SQuAD and HotpotQA.
    """
    numbers = measure(run, options, list(TASKS), "ruler")
    rows = [row for name in TASKS if name in numbers for row in numbers[name]]
    mean = []
    for length in sorted({row["length"] for row in rows}):
        right = [row["accuracy"] for row in rows if row["length"] == length]
        mean.append({"length": length, "tasks": len(right), "accuracy": float(np.mean(right))})
    return numbers | {"mean": mean}


def measure(run: Run, options: EvaluationOptions, tasks: list[str], name: str) -> Numbers:
    """The table of each task by its name, a row for every length that a question fits; writes files called `name`."""
    if options.length < SHORTEST:
        raise EvaluationError(f"length is {options.length:,}; use at least {SHORTEST:,}")
    lengths = [SHORTEST << power for power in range((options.length // SHORTEST).bit_length())]
    questions = Questions(run, options)
    console = Console(stderr=True)
    generator = Generator(run.graphdef, run.tokenizer, Sampling(temperature=0))
    answers: list[Answer] = []
    failure = None
    asked = itertools.product(lengths, tasks, range(0, questions.samples, SIDE_BY_SIDE))
    parts = len(lengths) * len(tasks) * -(-questions.samples // SIDE_BY_SIDE)
    try:
        for length, task, first in track(asked, name, parts, console=console, transient=True):
            answers += questions.ask(generator, task, length, first)
    except NotFiniteLogits as error:
        failure = error
    if not answers:
        raise EvaluationError(f"{name}: {failure or next(iter(questions.left_out.values()))}") from failure
    numbers: Numbers = {}
    for task in tasks:
        if table := _table([each for each in answers if each.task == task]):
            numbers[task] = table
    _write(run, options, answers, numbers, questions.left_out, name)
    for sentence in questions.left_out.values():
        console.print(f"titans: left out: {sentence}", highlight=False, soft_wrap=True)
    if failure:
        raise EvaluationError(f"{name}: {failure}; the {len(answers):,} answers before are in {name}.json") from failure
    return numbers


class Questions:
    """The samples of one evaluation, the same for all models of a tokenizer."""

    def __init__(self, run: Run, options: EvaluationOptions):
        self._run, self.samples = run, options.samples or SAMPLES
        self._essay = read_essay(run, options.text)
        self.left_out: dict[tuple[str, int], str] = {}
        """Sentences, by task and length, on what does not fit a length."""

    def ask(self, generator: Generator, task: str, length: int, first: int) -> Iterator[Answer]:
        """What the model says to `SIDE_BY_SIDE` samples from number `first` on; to none that are left out.

        Raises:
          NotFiniteLogits: it says nothing.
        """
        seeds = range(first, min(first + SIDE_BY_SIDE, self.samples))
        if (task, length) in self.left_out:
            return
        try:
            samples = [self.make(task, length, seed) for seed in seeds]
        except ValueError as error:
            self.left_out[task, length] = f"{task}: {error}; use a larger length"
            return
        prompts = [sample.prompt for sample in samples]
        said = generator.complete(self._run.params, prompts, TASKS[task].generated)
        for seed, sample, text in zip(seeds, samples, said, strict=True):
            depth = None if sample.depth is None else round(sample.depth, 4)
            yield Answer(task, length, seed, depth, sample.answers, text, score(sample.answers, text))

    def make(self, task: str, length: int, seed: int) -> Sample:
        """One sample; raises ValueError where a length leaves no room for it."""
        return make_sample(TASKS[task], self._essay, self._count_tokens, length, seed)

    def _count_tokens(self, text: str) -> int:
        return 1 + len(self._run.tokenizer.encode(text))


def read_essay(run: Run, file: Path | None) -> Essay:
    """The text that needles are hidden in.

    Raises:
      EvaluationError: it cannot be read, or has no words.
    """
    text = " ".join(read_documents(run, file))
    try:
        return Essay(text)
    except ValueError as error:
        raise EvaluationError(f"text is {str(file)!r}, which cannot be used: {error}") from error


def _write(
    run: Run,
    options: EvaluationOptions,
    answers: list[Answer],
    numbers: Numbers,
    left_out: dict[tuple[str, int], str],
    name: str,
) -> None:
    files = name if options.memory == "on" else f"{name}_{options.memory}"
    header = {
        "step": run.step,
        "trained_on_rows_of": run.config.data.sequence_length,
        "tokenizer": run.config.data.tokenizer,
        "essays": str(options.text or "the run's validation documents"),
        "words": f"{len(ADJECTIVES)} adjectives x {len(NOUNS)} nouns of titans_jax",
        "sentences": "titans_jax's own rule",
        "memory": options.memory,
    }
    without = {"left_out": list(left_out.values())} if left_out else {}
    save_json(header | without | {"answers": answers}, run.folder / f"{files}.json")
    save_csv([{"task": task, **row} for task in numbers for row in numbers[task]], run.folder / f"{files}.csv")
    note = ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in header.items())
    draw(answers, note, run.folder / f"{files}.png")


def _table(answers: list[Answer]) -> list[dict[str, float]]:
    rows = []
    for length in dict.fromkeys(answer.length for answer in answers):
        right = [answer.accuracy for answer in answers if answer.length == length]
        rows.append({"length": length, "samples": len(right), "accuracy": round(100 * float(np.mean(right)), 2)})
    return rows


def draw(answers: list[Answer], note: str, file: Path) -> None:
    """A panel per task: accuracy over length and depth, white where no needle stood; over length where none has a
    place."""
    tasks, lengths = (list(dict.fromkeys(getattr(each, name) for each in answers)) for name in ("task", "length"))
    rows = -(-len(tasks) // 4)
    with panels(file, len(tasks), 3.4 * min(len(tasks), 4), 3.4 * rows, note=note) as axes_of_tasks:
        for axes, task in zip(axes_of_tasks, tasks, strict=True):
            bins = DEPTH_BINS if any(answer.depth is not None for answer in answers if answer.task == task) else 1
            cells = np.full((bins, len(lengths)), np.nan)
            for row, column in np.ndindex(cells.shape):
                right = [
                    answer.accuracy
                    for answer in answers
                    if (answer.task, answer.length) == (task, lengths[column])
                    and min(int((answer.depth or 0) * bins), bins - 1) == row
                ]
                cells[row, column] = np.mean(right) if right else np.nan
            image = axes.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto", extent=(0, len(lengths), 100, 0))
            axes.set_xticks(np.arange(len(lengths)) + 0.5, [f"{length // 1024}K" for length in lengths])
            axes.set(title=task, xlabel="tokens")
            axes.set(ylabel="depth of the needle (%)") if bins > 1 else axes.set(yticks=[])
        axes.figure.colorbar(image, ax=axes_of_tasks, label="accuracy")
