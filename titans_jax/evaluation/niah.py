"""Needles in a haystack: what a model still finds of a sentence in a text far longer than its rows.

    titans evaluate RUN niah --length 16384 --samples 100      S-NIAH-1, 2 and 3 of RULER, at 1K, 2K, .. 16K tokens
    titans evaluate RUN ruler --text essays.txt                all eight needle tasks, and their mean

Prompts are read in pieces by the chunked form, answers are the most likely tokens, 128 of them, and count by RULER's
string_match_all (see `needles`, also for what differs from RULER).
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import track

from titans_jax.evaluation.documents import read_documents
from titans_jax.evaluation.evaluators import EvaluationError, EvaluationOptions, Numbers, register_evaluator
from titans_jax.evaluation.needles import ADJECTIVES, GENERATED, NOUNS, TASKS, Essay, make_sample, score
from titans_jax.inference import Generator, Sampling
from titans_jax.plots import panels, save_csv, save_json

if TYPE_CHECKING:
    from titans_jax.training import Run

SHORTEST = 1024
SAMPLES = 500
DEPTH_BINS = 10


@dataclasses.dataclass(frozen=True)
class Answer:
    """One sample: which, where its needle stood (0 to 1 of the prompt), what was said, and how much of it was right."""

    task: str
    length: int
    seed: int
    depth: float
    answers: tuple[str, ...]
    said: str
    accuracy: float


@register_evaluator()
def niah(run: Run, options: EvaluationOptions) -> Numbers:
    """RULER's S-NIAH-1, 2 and 3: percent of samples whose value is found, at 1,024, 2,048, .. `options.length` tokens.

    Reads `options.samples` samples of each (default 500). Essays are `options.text`, or the run's validation documents.
    Writes niah.csv, niah.json with every answer and niah.png, accuracy over length and depth, into the run's folder.

    Raises:
      EvaluationError: the text cannot be read, or the length is less than 1,024.
    """
    return measure(run, options, list(TASKS)[:3], "niah")


@register_evaluator()
def ruler(run: Run, options: EvaluationOptions) -> Numbers:
    """All eight needle tasks of RULER, as `niah`, and their mean at every length; writes ruler.csv, .json and .png."""
    numbers = measure(run, options, list(TASKS), "ruler")
    rows = zip(*(numbers[name] for name in TASKS), strict=True)
    mean = [{**row[0], "accuracy": float(np.mean([each["accuracy"] for each in row]))} for row in rows]
    return numbers | {"mean": mean}


def measure(run: Run, options: EvaluationOptions, tasks: list[str], name: str) -> Numbers:
    """The table of each task by its name, a row per length; writes files called `name`."""
    if options.length < SHORTEST:
        raise EvaluationError(f"length is {options.length:,}; use at least {SHORTEST:,}")
    lengths = [SHORTEST << power for power in range((options.length // SHORTEST).bit_length())]
    essay, samples = read_essay(run, options.text), range(options.samples or SAMPLES)
    generator = Generator(run.graphdef, run.tokenizer, Sampling(temperature=0))
    asked = track(list(itertools.product(lengths, tasks, samples)), name, console=Console(stderr=True), transient=True)
    answers = [ask(run, generator, essay, task, length, seed) for length, task, seed in asked]
    numbers: Numbers = {task: _table([each for each in answers if each.task == task], lengths) for task in tasks}
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
    save_json(header | {"answers": answers}, run.folder / f"{files}.json")
    save_csv([{"task": task, **row} for task in tasks for row in numbers[task]], run.folder / f"{files}.csv")
    note = ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in header.items())
    draw(answers, note, run.folder / f"{files}.png")
    return numbers


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


def ask(run: Run, generator: Generator, essay: Essay, task: str, length: int, seed: int) -> Answer:
    """What the model says to one sample, which is the same for all models of a tokenizer.

    Raises:
      EvaluationError: the length leaves no room for a question.
    """
    try:
        sample = make_sample(TASKS[task], essay, lambda text: 1 + len(run.tokenizer.encode(text)), length, seed)
    except ValueError as error:
        raise EvaluationError(f"{task}: {error}; use a larger length") from error
    said = "".join(generator.stream(run.params, sample.prompt, GENERATED))
    return Answer(task, length, seed, round(sample.depth, 4), sample.answers, said, score(sample.answers, said))


def _table(answers: list[Answer], lengths: list[int]) -> list[dict[str, float]]:
    rows = []
    for length in lengths:
        right = [answer.accuracy for answer in answers if answer.length == length]
        rows.append({"length": length, "samples": len(right), "accuracy": round(100 * float(np.mean(right)), 2)})
    return rows


def draw(answers: list[Answer], note: str, file: Path) -> None:
    """A panel per task: accuracy over length and depth; white where no needle stood."""
    tasks, lengths = (list(dict.fromkeys(getattr(each, name) for each in answers)) for name in ("task", "length"))
    rows = -(-len(tasks) // 4)
    with panels(file, len(tasks), 3.4 * min(len(tasks), 4), 3.4 * rows, note=note) as axes_of_tasks:
        for axes, task in zip(axes_of_tasks, tasks, strict=True):
            cells = np.full((DEPTH_BINS, len(lengths)), np.nan)
            for row, column in np.ndindex(cells.shape):
                right = [
                    answer.accuracy
                    for answer in answers
                    if (answer.task, answer.length) == (task, lengths[column])
                    and min(int(answer.depth * DEPTH_BINS), DEPTH_BINS - 1) == row
                ]
                cells[row, column] = np.mean(right) if right else np.nan
            image = axes.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto", extent=(0, len(lengths), 100, 0))
            axes.set_xticks(np.arange(len(lengths)) + 0.5, [f"{length // 1024}K" for length in lengths])
            axes.set(title=task, xlabel="tokens", ylabel="depth of the needle (%)")
        axes.figure.colorbar(image, ax=axes_of_tasks, label="accuracy")
