"""The nine tasks of the papers' main tables by lm-evaluation-harness, from local files (Titans table 1, Miras table 2).

    titans evaluate RUN harness --data DATA        all whose files are there
    titans evaluate RUN piqa boolq --data DATA     these

Prompts, choices and scores are the harness's own: its built-in tasks, with the data set replaced by a file. It
needs the extra `eval`, and is imported only here. WikiText is measured twice: with the state carried through every
page, and in windows of 2,048 tokens with an empty one, as models of a bounded context are.
"""

from __future__ import annotations

import functools
import json
import logging
import lzma
import os
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from titans_jax.evaluation.documents import find_file, open_text
from titans_jax.evaluation.evaluators import EvaluationError, EvaluationOptions, Numbers, register_evaluator
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
    """What every document has."""
    metric: str
    """What the papers report: acc, acc_norm (by characters), perplexity, word_perplexity."""
    chance: float | None = None
    """Percent right by guessing."""
    task: str | None = None
    """The harness's name, where it is another."""
    changes: dict[str, Any] = field(default_factory=dict)
    """What the file calls otherwise than the harness's own data set."""
    split: str = "validation"
    window: int | None = None


_ARC = {"doc_to_target": "gold", "doc_to_choice": "choices"}
_ARC_FIELDS = ("question", "choices", "gold")
TASKS: dict[str, HarnessTask] = {
    "wikitext": HarnessTask("wikitext-2/wiki.test.raw", "wikitext", ("page",), "word_perplexity", split="test"),
    "wikitext_2k": HarnessTask(
        "wikitext-2/wiki.test.raw", "wikitext", ("page",), "word_perplexity", None, "wikitext", {}, "test", WINDOW
    ),
    "lambada_openai": HarnessTask("lambada/lambada_test.jsonl", "lambada", ("text",), "perplexity", split="test"),
    "piqa": HarnessTask("commonsense/piqa.val.jsonl", "piqa", ("goal", "sol1", "sol2", "label"), "acc", 50),
    "hellaswag": HarnessTask(
        "commonsense/hellaswag.val.jsonl", "hellaswag", ("ctx_a", "ctx_b", "activity_label", "endings", "label"),
        "acc_norm", 25,
    ),
    "winogrande": HarnessTask(
        "commonsense/winogrande_xl.val.jsonl", "winogrande", ("sentence", "option1", "option2", "answer"), "acc", 50
    ),
    "arc_easy": HarnessTask("commonsense/arc_easy.test.jsonl", "arc", _ARC_FIELDS, "acc", 25, None, _ARC, "test"),
    "arc_challenge": HarnessTask(
        "commonsense/arc_challenge.test.jsonl", "arc", _ARC_FIELDS, "acc_norm", 25, None, _ARC, "test"
    ),
    "social_iqa": HarnessTask(
        "commonsense/social_i_qa.val.jsonl", "siqa",
        ("context", "question", "answerA", "answerB", "answerC", "label"), "acc", 100 / 3,
    ),
    "boolq": HarnessTask(
        "commonsense/boolq.val.jsonl", "super_glue/boolq", ("passage", "question", "answer"), "acc", 50, None,
        {"doc_to_target": "{{answer|int}}"},
    ),
}  # fmt: skip
"""The nine tasks by the harness's names; WikiText twice. For BoolQ the majority's answer, yes, is right for 62 %."""


@register_evaluator()
def harness(run: Run, options: EvaluationOptions) -> Numbers:
    """The papers' nine tasks by lm-evaluation-harness: WikiText, LAMBADA, PIQA, HellaSwag, WinoGrande, ARC, SIQA, ..

    Reads the files of `options.data` that are there, the first `options.samples` documents of each (default all).
    Writes harness.csv, .json and .png into the run's folder, after every task.

    Raises:
      EvaluationError: lm-eval is not installed, no file is there, or the model's logits are not finite.
    """
    return measure(run, options, list(TASKS), "harness")


def measure(run: Run, options: EvaluationOptions, names: list[str], called: str) -> Numbers:
    """A row for each task; writes files `called` so."""
    model = _import_model()(run)
    console = Console(stderr=True)
    say = lambda sentence: console.print(f"titans: {sentence}", highlight=False, soft_wrap=True)  # noqa: E731
    rows: list[dict[str, Any]] = []
    left_out = []
    files = called if options.memory == "on" else f"{called}_{options.memory}"
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
            rows.append({"task": name} | run_task(model, name, documents, options.samples))
        except NotFiniteLogits as error:
            done = f"; the results of {', '.join(row['task'] for row in rows)} are kept" if rows else ""
            raise EvaluationError(f"{name}: {error}{done}") from error
        if model.long:
            say(f"{name}: {model.long:,} texts are longer than a row of training, {run.config.data.sequence_length:,} "
                "tokens; they are read all the same")  # fmt: skip
        if model.empty:
            left_out.append(f"{name}: {model.empty:,} answers have no text; none of them counts as the likeliest")
        _write(run, options, rows, left_out, files)
    for sentence in left_out if rows else left_out[1:]:
        say(sentence)
    if not rows:
        raise EvaluationError(left_out[0])
    return {"results": _table(rows)}


def _table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is printed of the rows: the metric that the papers report."""
    columns = {"task": "", "documents": 0, "metric": "", "score": 0.0, "chance": ""}
    return [{name: row.get(name, nothing) for name, nothing in columns.items()} for row in rows]


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


def run_task(model: Any, name: str, documents: list[dict[str, Any]], limit: int | None = None) -> dict[str, Any]:
    """What the harness finds of a model on these documents: {"documents", "metric", "score", "chance", "all"}, `all`
    being all of its metrics; shares in percent."""
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
    count = len(documents) if limit is None else min(limit, len(documents))
    chance = {} if task.chance is None else {"chance": task.chance}
    return {"documents": count, "metric": task.metric, "score": metrics[task.metric]} | chance | {"all": metrics}


@functools.cache
def _task_manager() -> Any:
    """It knows the folders of our tasks alone: to look through all of the harness takes seconds."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    folder = Path(lm_eval.__file__).parent / "tasks"
    return TaskManager(include_defaults=False, include_path=[str(folder / task.folder) for task in TASKS.values()])


def _write(run: Run, options: EvaluationOptions, rows: list[dict[str, Any]], left_out: list[str], files: str) -> None:
    header = {
        "step": run.step,
        "trained_on_rows_of": run.config.data.sequence_length,
        "tokenizer": run.config.data.tokenizer,
        "memory": options.memory,
        "documents": "all" if options.samples is None else f"the first {options.samples:,}",
    }
    save_json(header | {"left_out": left_out, "results": rows}, run.folder / f"{files}.json")
    columns = ("task", "documents", "metric", "score", "chance")
    save_csv([{name: row.get(name) for name in columns} for row in rows], run.folder / f"{files}.csv")
    draw(
        rows,
        ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in header.items()),
        run.folder / f"{files}.png",
    )


def draw(rows: list[dict[str, Any]], note: str, file: Path) -> None:
    """Bars of the tasks that are scored in percent, with what guessing scores."""
    shares = [row for row in rows if row["metric"].startswith("acc")]
    with figure(file, width=max(4, 1 + len(shares)), note=note) as axes:
        places = range(len(shares))
        axes.bar(places, [row["score"] for row in shares], width=0.6)
        axes.hlines([row["chance"] for row in shares], [x - 0.4 for x in places], [x + 0.4 for x in places], "black",
                    linestyle=":", label="guessing")  # fmt: skip
        axes.set_xticks(places, [row["task"].replace("_", "\n") for row in shares])
        axes.set(ylabel="right (%)", ylim=(0, 100))
        others = [f"{row['task']}: {row['score']:,.4g} {row['metric']}" for row in rows if row not in shares]
        axes.set_title("; ".join(others) or None, fontsize="small")
        if shares:
            axes.legend()


def _register(name: str) -> None:
    def evaluator(run: Run, options: EvaluationOptions) -> Numbers:
        return measure(run, options, [name], name)

    evaluator.__doc__ = f"{name} by lm-evaluation-harness, from {TASKS[name].file}: {TASKS[name].metric}."
    register_evaluator(name)(evaluator)


for _name in TASKS:
    _register(_name)
