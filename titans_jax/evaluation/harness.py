"""The nine tasks of the papers' main tables by lm-evaluation-harness, from local files (Titans table 1, Miras table 2).

    titans evaluate RUN harness --data DATA        all tasks whose files are there
    titans evaluate RUN piqa boolq --data DATA     these tasks

Prompts, choices and scores are the harness's own: its built-in tasks, with the data set replaced by a file. The harness
needs the extra `eval`, and is imported only here. WikiText is measured twice: with the state carried through every
page, and with an empty state at every window of 2,048 tokens, as for models of a bounded context. For the harness's
other tasks, and its data sets from the network, use its own command line with a run as the model (`lm_eval_model`).
"""

from __future__ import annotations

import functools
import json
import logging
import lzma
import math
import os
import tempfile
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from titans_jax.evaluation.documents import find_file, open_text
from titans_jax.evaluation.evaluators import EvaluationError, EvaluationOptions, Numbers, register_evaluator
from titans_jax.evaluation.results import Table, file_of, header_of, note_of
from titans_jax.inference import NotFiniteLogits
from titans_jax.plots import figure, save_csv, save_json

if TYPE_CHECKING:
    from titans_jax.training import Run

WINDOW = 2048


@dataclass(frozen=True)
class HarnessTask:
    """One of the harness's tasks, read from a file."""

    file: str
    """Path in the folder of data sets; the file may be compressed (.gz, .xz)."""
    folder: str
    """The folder of the task's description, below the harness's `tasks`."""
    fields: tuple[str, ...]
    """Fields that every document must have; in tasks with a `chance` the last one is the label."""
    metrics: tuple[str, ...]
    """Metrics that the papers report, one row of the table each: acc, acc_norm (by characters), perplexity,
    word_perplexity, bits_per_byte."""
    chance: float | None = None
    """Percent right by guessing."""
    task: str | None = None
    """The harness's name of the task, where it differs."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Settings of the harness's task to replace where the file names fields differently from its own data set."""
    split: str = "validation"
    window: int | None = None


_WIKITEXT = ("wikitext-2/wiki.test.raw", "wikitext", ("page",), ("word_perplexity", "bits_per_byte"))
_ARC = {"doc_to_target": "gold", "doc_to_choice": "choices"}
_ARC_FIELDS = ("question", "choices", "gold")
TASKS: dict[str, HarnessTask] = {
    "wikitext": HarnessTask(*_WIKITEXT, split="test"),
    "wikitext_2k": HarnessTask(*_WIKITEXT, task="wikitext", split="test", window=WINDOW),
    "lambada_openai": HarnessTask(
        "lambada/lambada_test.jsonl", "lambada", ("text",), ("perplexity", "acc"), split="test"
    ),
    "piqa": HarnessTask(
        "commonsense/piqa.val.jsonl", "piqa", ("goal", "sol1", "sol2", "label"), ("acc", "acc_norm"), 50
    ),
    "hellaswag": HarnessTask(
        "commonsense/hellaswag.val.jsonl", "hellaswag", ("ctx_a", "ctx_b", "activity_label", "endings", "label"),
        ("acc_norm",), 25,
    ),
    "winogrande": HarnessTask(
        "commonsense/winogrande_xl.val.jsonl", "winogrande", ("sentence", "option1", "option2", "answer"), ("acc",), 50
    ),
    "arc_easy": HarnessTask(
        "commonsense/arc_easy.test.jsonl", "arc", _ARC_FIELDS, ("acc",), 25, changes=_ARC, split="test"
    ),
    "arc_challenge": HarnessTask(
        "commonsense/arc_challenge.test.jsonl", "arc", _ARC_FIELDS, ("acc_norm",), 25, changes=_ARC, split="test"
    ),
    "social_iqa": HarnessTask(
        "commonsense/social_i_qa.val.jsonl", "siqa",
        ("context", "question", "answerA", "answerB", "answerC", "label"), ("acc",), 100 / 3,
    ),
    "boolq": HarnessTask(
        "commonsense/boolq.val.jsonl", "super_glue/boolq", ("passage", "question", "answer"), ("acc",), 50,
        changes={"doc_to_target": "{{answer|int}}"},
    ),
}  # fmt: skip
"""The nine tasks by the harness's names; WikiText twice."""

SHOWN = ("task", "documents", "metric", "score", "chance", "majority")
"""Columns of the table that is printed; the files have the task's file and split too."""


@register_evaluator()
def harness(run: Run, options: EvaluationOptions) -> Numbers:
    """The papers' nine tasks by lm-evaluation-harness: WikiText, LAMBADA, PIQA, HellaSwag, WinoGrande, ARC, SIQA, ..

    Reads the files of `options.data` that are there, the first `options.samples` documents of each (default all).
    Writes harness.csv, .json (with all of the harness's metrics) and .png into the run's folder, after every task.

    Raises:
      EvaluationError: lm-eval is not installed, no file is there, or the model's logits are not finite.
    """
    return measure(run, options, list(TASKS), "harness")


def measure(run: Run, options: EvaluationOptions, names: list[str], called: str) -> Numbers:
    """A row for each task and metric; writes files named `called`."""
    model = _import_model()(run)
    console = Console(stderr=True)
    say = lambda sentence: console.print(f"titans: {sentence}", highlight=False, soft_wrap=True)  # noqa: E731
    rows: list[dict[str, Any]] = []
    every: dict[str, dict[str, float]] = {}
    left_out = []
    documents = "all" if options.samples is None else f"the first {options.samples:,}"
    header = header_of(run, options) | {"documents": documents}
    for name in names:
        try:
            file = find_file(options.data, TASKS[name].file)
            documents, bad = read_documents(file, TASKS[name])
        except EvaluationError as error:
            left_out.append(f"{name}: {error}")
            continue
        left_out += [f"{name}: {bad}"] * bool(bad)
        model.window, model.long, model.empty = TASKS[name].window, 0, 0
        try:
            found, every[name] = run_task(model, name, documents, options.samples)
        except NotFiniteLogits as error:
            done = f"; the results of {', '.join(every)} are kept" if rows else ""
            raise EvaluationError(f"{name}: {error}{done}") from error
        rows += [{"task": name, "file": str(file)} | row for row in found]
        if model.long:
            say(f"{name}: {model.long:,} texts are longer than a row of training, {run.config.data.sequence_length:,} "
                "tokens; they are read all the same")  # fmt: skip
        if model.empty:
            left_out.append(f"{name}: {model.empty:,} answers have no text; none of them counts as the likeliest")
        _write(file_of(run, options, called), header, rows, every, left_out)
    for sentence in left_out if rows else left_out[1:]:
        say(sentence)
    if not rows:
        raise EvaluationError(left_out[0])
    table = [{name: "" if row[name] is None else row[name] for name in SHOWN} for row in rows]
    return {"results": Table(table, header)}


def _import_model() -> Any:
    """The model class. Imported late and without warnings: lm-eval, pandas and others take seconds to import, and their
    warnings do not concern the user."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import datasets

            from titans_jax.evaluation.lm_eval_model import TitansLM
    except ImportError as error:
        raise EvaluationError(
            f"lm-evaluation-harness cannot be imported ({error}): pip install 'titans-jax[eval]'"
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()  # of reading a local file
    return TitansLM


def read_documents(file: Path, task: HarnessTask) -> tuple[list[dict[str, Any]], str]:
    """The documents of a task's file, and a sentence on those that lack a field, if any do.

    Raises:
      EvaluationError: it cannot be read, or has no document with the fields.
    """
    try:
        with open_text(file) as lines:
            if task.fields == ("page",):
                return [{"page": page} for page in wikitext_pages(lines.read())], ""
            found = [json.loads(line) for line in lines if line.strip()]
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise EvaluationError(f"{file} cannot be read ({error}); fetch it again") from error
    missing = [next((name for name in task.fields if name not in document), None) for document in found]
    good = [document for document, name in zip(found, missing, strict=True) if name is None]
    bad = [(number, name) for number, name in enumerate(missing, 1) if name is not None]
    if not good:
        raise EvaluationError(f"{file} has no document with the fields {', '.join(task.fields)}")
    number, name = bad[0] if bad else (0, "")
    return (
        good,
        f"{len(bad):,} of {len(found):,} documents left out, the first, {number}, has no {name!r}" if bad else "",
    )


def wikitext_pages(text: str) -> list[str]:
    """The pages of WikiText's raw text: each begins with a heading of the first level, " = Title = "."""
    pages: list[list[str]] = [[]]
    for line in text.split("\n"):
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if heading.startswith("= ") and heading.endswith(" ="):
            pages.append([])
        pages[-1].append(line)
    return ["\n".join(page) for page in pages if "".join(page).strip()]


def run_task(
    model: Any, name: str, documents: list[dict[str, Any]], limit: int | None = None
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The harness's results for a model on the first `limit` documents: a row for each metric of the papers, and all of
    the harness's metrics; accuracies in percent.

    A row has the split, the number of documents, the metric, its score, and the scores of guessing ("chance") and of
    always answering with the most frequent label ("majority"), which are None for a perplexity.
    """
    import lm_eval

    task = TASKS[name]
    inner = task.task or name
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = Path(folder) / "documents.jsonl"
        file.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
        config = {
            "task": inner,
            "dataset_path": "json",
            "dataset_name": None,
            **{
                f"{split}_split": split if split == task.split else None for split in ("training", "validation", "test")
            },
            "dataset_kwargs": {"data_files": {task.split: str(file)}, "cache_dir": folder},
        }
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=[{"group": "local", "task": [config | task.changes]}],
            task_manager=_task_manager(),
            num_fewshot=0,
            limit=limit,
            bootstrap_iters=0,
            log_samples=False,
        )
    metrics = {
        key.split(",")[0]: float(value)
        for key, value in found["results"][inner].items()
        if isinstance(value, float) and "stderr" not in key
    }
    metrics = {key: 100 * value if key.startswith("acc") else value for key, value in metrics.items()}
    known = documents[:limit]
    majority = None if task.chance is None else share_of_most(document[task.fields[-1]] for document in known)
    rows = []
    for metric in task.metrics:
        row = {"split": task.split, "documents": len(known), "metric": metric, "score": metrics[metric]}
        beside = (task.chance, majority) if metric.startswith("acc") else (None, None)
        rows.append(row | dict(zip(("chance", "majority"), beside, strict=True)))
    return rows, metrics


def share_of_most(labels: Iterable[Any]) -> float:
    """The share of the most frequent label, in percent."""
    counts = Counter(labels)
    return 100 * max(counts.values()) / counts.total()


@functools.cache
def _task_manager() -> Any:
    """A task manager for the folders of our tasks only: to look through all of the harness's takes seconds."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    folder = Path(lm_eval.__file__).parent / "tasks"
    return TaskManager(include_defaults=False, include_path=[str(folder / task.folder) for task in TASKS.values()])


def _write(
    file: Path,
    header: dict[str, Any],
    rows: list[dict[str, Any]],
    every: dict[str, dict[str, float]],
    left_out: list[str],
) -> None:
    """Write the rows as `file`.csv and .png, and the rows with all of the harness's metrics as .json."""
    save_json(header | {"left_out": left_out, "results": rows, "all": every}, file.with_suffix(".json"))
    # The header is repeated in every row, whose own documents are those of its task.
    save_csv([row | header | row for row in rows], file.with_suffix(".csv"))
    draw(rows, note_of(header), file.with_suffix(".png"))


def draw(rows: list[dict[str, Any]], note: str, file: Path) -> None:
    """Bars of the scores in percent, with lines for the scores of guessing and of the most frequent label."""
    shares = [row for row in rows if row["metric"].startswith("acc")]
    with figure(file, width=max(4, 1 + len(shares)), note=note) as axes:
        places = range(len(shares))
        axes.bar(places, [row["score"] for row in shares], width=0.6)
        left, right = [place - 0.4 for place in places], [place + 0.4 for place in places]
        for name, style, words in (("chance", "--", "guessing"), ("majority", ":", "the most frequent label")):
            known = [math.nan if row[name] is None else row[name] for row in shares]
            axes.hlines(known, left, right, "black", linestyle=style, label=words)
        axes.set_xticks(places, [f"{row['task']}\n{row['metric']}".replace("_", "\n") for row in shares])
        axes.set(ylabel="right (%)", ylim=(0, 100))
        others = [f"{row['task']}: {row['score']:,.4g} {row['metric']}" for row in rows if row not in shares]
        axes.set_title(textwrap.fill("; ".join(others), 60) or None, fontsize="small")
        if shares:
            axes.legend(fontsize="small")


def _register(name: str) -> None:
    def evaluator(run: Run, options: EvaluationOptions) -> Numbers:
        return measure(run, options, [name], name)

    evaluator.__doc__ = (
        f"{name} by lm-evaluation-harness, from {TASKS[name].file}: {' and '.join(TASKS[name].metrics)}."
    )
    register_evaluator(name)(evaluator)


for _name in TASKS:
    _register(_name)
