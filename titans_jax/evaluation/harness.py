"""The nine tasks of the papers' main tables by lm-evaluation-harness, from local files (Titans table 1, Miras table 2).

    titans evaluate RUN harness --data DATA        all whose files are there
    titans evaluate RUN piqa boolq --data DATA     these

Prompts, choices and scores are the harness's own: its built-in tasks, with the data set replaced by a file. It
needs the extra `eval`, and is imported only here. WikiText is measured twice: with the state carried through every
page, and in windows of 2,048 tokens with an empty one, as models of a bounded context are. The harness's other tasks,
and its data sets from the network, are for its own command line, which `lm_eval_model` has with a run as its model.
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
    """In the folder of the data sets; packed (.gz, .xz) or not."""
    folder: str
    """Where the harness keeps the task's description, in its `tasks`."""
    fields: tuple[str, ...]
    """What every document has; of a task that has a chance the last is the label."""
    metrics: tuple[str, ...]
    """What the papers report, a row of the table each: acc, acc_norm (by characters), perplexity, word_perplexity,
    bits_per_byte."""
    chance: float | None = None
    """Percent right by guessing."""
    task: str | None = None
    """The harness's name, where it is another."""
    changes: dict[str, Any] = field(default_factory=dict)
    """What the file calls otherwise than the harness's own data set."""
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
    """A row for each task and metric; writes files `called` so."""
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
    """The model class; lm-eval, pandas and the like cost seconds, and warn of what is none of the user's business."""
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
    """What the harness finds of a model on the first `limit` documents: a row for each metric of the papers, and all
    of the harness's metrics; shares in percent.

    A row has the split, how many documents, the metric, its score, and, None for a perplexity, what guessing scores and
    what the most frequent label would score as the answer to all of them.
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
    """How many of the labels, in percent, are the most frequent one."""
    counts = Counter(labels)
    return 100 * max(counts.values()) / counts.total()


@functools.cache
def _task_manager() -> Any:
    """It knows the folders of our tasks alone: to look through all of the harness takes seconds."""
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
    """Write the rows as `file`.csv and .png, and these with all of the harness's metrics as .json."""
    save_json(header | {"left_out": left_out, "results": rows, "all": every}, file.with_suffix(".json"))
    save_csv(rows, file.with_suffix(".csv"))
    draw(rows, note_of(header), file.with_suffix(".png"))


def draw(rows: list[dict[str, Any]], note: str, file: Path) -> None:
    """Bars of what is scored in percent, with what guessing and what the most frequent label score."""
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
