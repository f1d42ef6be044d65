"""Needles in a haystack: whether a model still finds a sentence in a text far longer than its training rows.

    titans evaluate RUN niah --length 16384 --samples 100      S-NIAH-1, 2 and 3 of RULER, at 1K, 2K, .. 16K tokens
    titans evaluate RUN ruler --text essays.txt                RULER's thirteen tasks, and their mean

Prompts are read in pieces by the chunked form, several side by side. Answers are decoded greedily and scored by RULER's
string_match_all (`ruler_tasks` has it, and the differences from RULER).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titans_jax.data import sets
from titans_jax.evaluation.asking import Answer, Asking, Question, mean_of_tasks
from titans_jax.evaluation.documents import read_documents
from titans_jax.evaluation.evaluators import EvaluationError, EvaluationOptions, Numbers, register_evaluator
from titans_jax.evaluation.needles import ADJECTIVES, NOUNS, Essay
from titans_jax.evaluation.paragraphs import PARAGRAPH_TASKS, read_task
from titans_jax.evaluation.ruler_tasks import TASKS, RulerTask, make_sample, score
from titans_jax.plots import panels

if TYPE_CHECKING:
    from titans_jax.training import Run

SHORTEST = 1024
SAMPLES = 500
DEPTH_BINS = 10
ESSAYS = "haystack/nonfiction.jsonl"
"""The essays, in the folder of data sets."""
S_NIAH = ("niah_single_1", "niah_single_2", "niah_single_3")
PUBLISHED_LENGTHS = (2048, 4096, 8192, 16384)
PUBLISHED = {
    "lmm": ((99.8, 98.4, 98.2, 96.2), (100.0, 99.8, 93.4, 80.2), (90.4, 89.4, 85.8, 80.6)),
    "mac": ((99.2, 98.8, 99.0, 98.4), (99.6, 98.2, 97.6, 97.4), (98.2, 98.2, 95.6, 95.2)),
    "mag": ((99.4, 98.0, 97.4, 97.4), (99.2, 98.8, 97.2, 98.6), (98.0, 98.0, 90.2, 88.2)),
    "mal": ((98.8, 98.6, 98.8, 97.8), (99.8, 98.1, 96.8, 96.4), (98.0, 97.4, 92.0, 90.4)),
}
"""Percent of S-NIAH-1, 2 and 3 at these lengths, by block: arXiv 2501.00663, table 2."""
PUBLISHED_TEXTS = (
    "published Titans and Gated DeltaNet numbers are of RULER before June 2025, whose contexts fall short by up to 500 "
    "words; own words, own essays"
)


@register_evaluator()
def niah(run: Run, options: EvaluationOptions) -> Numbers:
    """RULER's S-NIAH-1, 2 and 3: percent of samples whose value is found, at 1,024, 2,048, .. `options.length` tokens.

    Reads `options.samples` samples of each (default 500). Essays are `options.text`, or haystack/nonfiction.jsonl of
    `options.data`, or, where that is not there, the run's validation documents. The table also has the numbers of the
    Titans paper for the first block of the run's pattern that is in the paper, else for lmm. Writes niah.csv, niah.json
    with every answer and niah.png, accuracy over length and depth, into the run's folder.

    Raises:
      EvaluationError: the text cannot be read, the length is less than 1,024, or the model's logits are not finite.
    """
    return measure(run, options, {name: TASKS[name] for name in S_NIAH}, "niah")


@register_evaluator()
def ruler(run: Run, options: EvaluationOptions) -> Numbers:
    """RULER's thirteen tasks, as `niah`, and at every length the mean of those whose questions fit it.

    qa_1 and qa_2 read SQuAD and HotpotQA from `options.data`; where these are missing, the mean is without them, and a
    line says so. Writes ruler.csv, .json and .png.
    """
    tasks, left_out = dict(TASKS), []
    for name in PARAGRAPH_TASKS:
        try:
            tasks[name] = read_task(options.data, name)
        except EvaluationError as error:
            left_out.append(f"{name}: {error}")
    numbers = measure(run, options, tasks, "ruler", left_out)
    return numbers | {"mean": mean_of_tasks(numbers)}


def measure(
    run: Run, options: EvaluationOptions, tasks: dict[str, RulerTask], name: str, left_out: Sequence[str] = ()
) -> Numbers:
    """The table of each task by its name, a row for every length that a question fits; writes files called `name`.

    left_out: sentences on tasks that cannot be asked.
    """
    if options.length < SHORTEST:
        raise EvaluationError(f"length is {options.length:,}; use at least {SHORTEST:,}")
    lengths = [SHORTEST << power for power in range((options.length // SHORTEST).bit_length())]
    file = options.text or sets.find_file(options.data, ESSAYS)
    essay = read_essay(run, file, None if options.text else "text")

    def make(task: str, length: int, number: int) -> Question:
        kind = tasks[task]
        sample = make_sample(kind, essay, lambda text: 1 + len(run.tokenizer.encode(text)), length, number)
        right = lambda said: score(sample.answers, said, sample.one_is_enough)  # noqa: E731
        return Question(sample.prompt, sample.answers, sample.depth, kind.generated, right)

    block = next((block for block in run.config.model.pattern if block in PUBLISHED), "lmm")
    column = f"titans_{block}"

    def published(task: str, length: int) -> dict[str, float | str]:
        if task not in S_NIAH:
            return {}
        numbers = dict(zip(PUBLISHED_LENGTHS, PUBLISHED[block][S_NIAH.index(task)], strict=True))
        return {column: numbers.get(length, "")}

    header = {
        "essays": str(file or "the run's validation documents"),
        "words": f"{len(ADJECTIVES)} adjectives x {len(NOUNS)} nouns of titans_jax",
        "sentences": "titans_jax's own rule, not nltk's Punkt",
        "drawn_by": "task, length and number of a question, whose text is as long as fits",
        "published": f"{column} is table 2 of arXiv 2501.00663, of models trained on 4,096 tokens; {PUBLISHED_TEXTS}",
    }
    samples = options.samples or SAMPLES
    asking = Asking(name, list(tasks), lengths, samples, make, header, draw, left_out, published)
    return asking.measure(run, options)


def read_essay(run: Run, file: Path | None, text_field: str | None = None) -> Essay:
    """The text that needles are hidden in.

    Raises:
      EvaluationError: it cannot be read, or has no words.
    """
    text = " ".join(read_documents(run, file, text_field))
    try:
        return Essay(text)
    except ValueError as error:
        raise EvaluationError(f"text is {str(file)!r}, which cannot be used: {error}") from error


def draw(answers: list[Answer], note: str, file: Path) -> None:
    """A panel per task: accuracy over length and depth, white where there was no needle; over length alone for tasks
    without depths."""
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
