"""Measuring: tasks one after another, each result kept as soon as it is there.

`evaluations.jsonl` in a run's folder has a line for every task that was ever measured: the checkpoint's step, the
options, and the numbers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_jax.config import registered
from titans_jax.data import sets
from titans_jax.evaluation import harness
from titans_jax.evaluation.evaluators import (
    EVALUATORS,
    EvaluationError,
    EvaluationOptions,
    Evaluator,
    Numbers,
    kept_once,
    on_all_devices,
)
from titans_jax.sharding.processes import told_if_lost

if TYPE_CHECKING:
    from titans_jax.training import Run

HISTORY = "evaluations.jsonl"


def evaluators_of(tasks: Iterable[str], field: str = "tasks") -> dict[str, Evaluator]:
    """The evaluators with these names, which the configuration field `field` lists.

    Raises:
      ConfigError: there is no evaluator of a name.
    """
    return {task: registered(EVALUATORS, field, task) for task in tasks}


def sets_of(task: str) -> tuple[str, ...]:
    """The data sets (`titans_jax.data.sets`) that a task reads if they are there."""
    several = {
        "babilong": ("babi", "books"),
        "niah": ("haystack",),
        "ruler": ("haystack", "squad", "hotpotqa"),
        "wikitext_2k": ("wikitext",),
        "harness": tuple(harness.TASKS),
    }
    names = several.get(task, (task,))
    return tuple(name for name in names if name in sets.SETS)


def measure(run: Run, evaluators: Mapping[str, Evaluator], options: EvaluationOptions) -> Numbers:
    """The results of all evaluators, with the task in front of their names where there are several.

    Each is appended to `evaluations.jsonl` before the next begins. Runs on all devices of all processes, and every
    process must call it.

    Raises:
      EvaluationError: a task cannot be measured; the message says where the results of the earlier ones are. Or the
        run's folder cannot be written to, before anything is measured.
      ProcessLost: another process has died.
    """
    if run.folder.is_dir() and not os.access(run.folder, os.W_OK):
        raise EvaluationError(f"run is {str(run.folder)!r}, where results cannot be written; use a copy of the folder")
    numbers: Numbers = {}
    after_loss = f"what was measured before is in {run.folder / HISTORY}; run the same commands again"
    with told_if_lost(after_loss), on_all_devices(run) as spread:
        for task, evaluator in evaluators.items():
            try:
                found = measure_one(spread, task, evaluator, options)
            except EvaluationError as error:
                done = list(evaluators)[: list(evaluators).index(task)]
                kept = f"; the results of {', '.join(done)} are in {run.folder / HISTORY}" if done else ""
                raise EvaluationError(f"{error}{kept}") from error
            prefix = f"{task}/" if len(evaluators) > 1 else ""
            numbers |= {prefix + name: value for name, value in found.items()}
    return numbers


def measure_one(run: Run, task: str, evaluator: Evaluator, options: EvaluationOptions) -> Numbers:
    """The results of one evaluator, appended to `evaluations.jsonl`; runs where the run's parameters are."""
    start = time.perf_counter()
    with kept_once(run) as kept:
        found = evaluator(kept, options)
        remember(kept, task, options, found, time.perf_counter() - start)
    return found


def remember(run: Run, task: str, options: EvaluationOptions, numbers: Numbers, seconds: float) -> None:
    """Append one task's results to the run's `evaluations.jsonl`; numbers that are not finite are null."""
    asked = {
        f.name: value
        for f in dataclasses.fields(options)
        if (value := getattr(options, f.name)) != f.default and value is not None
    }
    line = {"step": run.step, "task": task, "options": asked, "seconds": round(seconds, 1), "results": numbers}
    run.folder.mkdir(parents=True, exist_ok=True)
    history = run.folder / HISTORY
    # A line that a crash or a full disk has cut off must not swallow this one.
    cut_off = history.exists() and history.read_bytes()[-1:] not in (b"", b"\n")
    with history.open("a", encoding="utf-8") as file:
        file.write("\n" * cut_off + json.dumps(_plain(line)) + "\n")


def describe(task: str, numbers: Numbers) -> str:
    """A task's numbers in a line; for a table, the result of its last row and that row's first column."""
    parts = []
    for name, value in numbers.items():
        if isinstance(value, list):
            last = {key: each for key, each in value[-1].items() if each != ""}
            number = next((key for key in ("accuracy", "score", "gain") if key in last), list(last)[-1])
            parts.append(f"{name} {last[number]:,.4g} ({list(last)[0]} {list(last.values())[0]})")
        else:
            parts.append(f"{name} {value:,.4g}")
    return f"{task}: {', '.join(parts)}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
