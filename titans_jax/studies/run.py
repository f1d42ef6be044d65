"""`titans study NAME`: train the cells that are not finished yet, then write the study's table and figure."""

from __future__ import annotations

import dataclasses
import functools
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from titans_jax import plots, sharding
from titans_jax.config import ConfigError, import_file, registered
from titans_jax.config.command_line import parse
from titans_jax.errors import TitansError
from titans_jax.models import check_model
from titans_jax.studies.models import same_size, state_floats
from titans_jax.studies.progress import StudyProgress
from titans_jax.studies.results import Result, ResultsFile, finite_numbers
from titans_jax.studies.study import STUDIES, Cell, Study, StudyOptions
from titans_jax.studies.table import baselines_of, csv_rows, make_rows, number_words, terminal_table
from titans_jax.training.fit import fit
from titans_jax.training.run import count_params

MOST_SEEDS = 10_000
"""The most models of a row: a study lists them all before the first is trained."""


class StudyError(TitansError, RuntimeError):
    """Cells of a study could not be run; the others are finished and in its table."""

    exit_code = 1


@dataclass(frozen=True)
class Plan:
    """A study that can run: its options, its cells and its output folder. command: the command line as typed."""

    name: str
    study: Study
    options: StudyOptions
    cells: list[Cell]
    folder: Path
    command: str


def find_study(name: str) -> str:
    """The name of a registered study; for FILE.py or FILE.py:NAME, of the one that the file registers.

    Raises:
      ConfigError: there is none.
    """
    file, _, one = name.partition(".py")
    if not name.endswith(".py") and not one.startswith(":"):
        registered(STUDIES, "NAME", name)
        return name
    path = Path(f"{file}.py")
    if not path.is_file():
        raise ConfigError(f"NAME is {name}, and {path} is no file; use a file that registers a study, or one by name")
    module = import_file(path)
    own = [known for known, study in STUDIES.items() if study.__module__ == module.__name__]
    if one:
        own = [known for known in own if known == one[1:]]
    if len(own) != 1:
        raise ConfigError(
            f"{name} registers {', '.join(own) or 'no such study'}; use {file}.py:NAME with the name of one that "
            "@register_study adds there"
        )
    return own[0]


def make_plan(name: str, arguments: list[str]) -> Plan:
    """The plan for `titans study NAME` with these arguments, completely checked; nothing is compiled or written.

    Raises:
      ConfigError, DataError: one sentence with the field, its value and what would work.
    """
    said, name = name, find_study(name)
    study, program = STUDIES[name](), f"titans study {said}"
    options = parse(program, study.options, arguments)
    options = parse(program, study.options, arguments, study.defaults(options))
    if not 1 <= options.seeds <= MOST_SEEDS:
        raise ConfigError(f"seeds is {options.seeds}; use 1 to {MOST_SEEDS}")
    cells = checked_cells(study, options)
    folder = Path(options.output or f"runs/study_{name}")
    return Plan(name, study, options, cells, folder, shlex.join(["titans", "study", said, *arguments]))


def checked_cells(study: Study, options: StudyOptions) -> list[Cell]:
    """The models to train, checked against their tasks, and made equally large where the options say so.

    Raises:
      ConfigError, DataError: something cannot work, in one sentence.
    """
    cells = study.cells(options)
    for task, model in dict.fromkeys((cell.task, cell.model) for cell in cells):
        task.check(model)
        check_model(model)
    if not options.equal_parameters:
        return cells
    sized = same_size(cell.model for cell in cells)
    return [dataclasses.replace(cell, model=sized[cell.model]) for cell in cells]


def run(plan: Plan, console: Console | None = None) -> None:
    """Train and measure the cells that are not finished, and write the table.

    Raises:
      StudyError: some cells failed; the table says which.
    """
    console = console or Console()
    sharding.use_cores(functools.reduce(math.gcd, (cell.task.batch_size for cell in plan.cells)))
    results = ResultsFile(plan.folder / "results.jsonl")
    # A model that two rows of a table share is trained once.
    different = {str(cell.identity): cell for cell in plan.cells}
    waiting = [cell for cell in different.values() if not results.finished(cell)]
    console.print(
        f"{plan.name}: {len(different)} models, {len(different) - len(waiting)} of them finished before, on "
        f"{sharding.machine()}; {plan.study.notes(plan.options)}"
    )
    with StudyProgress(console, sum(map(steps_of, waiting))) as progress:
        for number, cell in enumerate(waiting):
            progress.model(label_words(cell), sum(map(steps_of, waiting[:number])))
            result = run_cell(cell, progress.step)
            results.add(cell, result)
            console.print(result_words(cell, result))
    write(plan, results, console)
    failed = sum(results.get(cell).status == "failed" for cell in different.values())
    if failed:
        raise StudyError(
            f"{failed} of {len(different)} models of {plan.name} failed, as {results.file} says of each; the same "
            "command tries them again"
        )


def run_cell(cell: Cell, after_step: Callable[[], None] = lambda: None) -> Result:
    """Train one model and measure it. An error becomes part of the result, unless it is one that ends the process."""
    sizes = {"parameters": count_params(cell.model)}
    sizes["state_floats"] = state_floats(cell.model, cell.task.sequence_length)
    histories, params = [], None
    try:
        for task in cell.task.trainings():
            batches = task.batches(cell.seed)
            start = params if histories else task.start(cell.model, cell.seed)
            try:
                graphdef, params, history = fit(
                    cell.model, task.optimizer, batches, task.steps, cell.seed, after_step, task.selection(), start
                )
            finally:
                batches.close()
            histories.append(history)
        numbers, finite = finite_numbers(cell.task.measure(graphdef, params))
    except Exception as error:  # noqa: BLE001  (one model that does not fit must not cost the others)
        return Result("failed", **sizes, error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    status = "finite" if finite and all(history.finite for history in histories) else "not finite"
    tokens, seconds = (sum(getattr(history, name) for history in histories) for name in ("tokens", "seconds"))
    tokens += cell.task.tokens_before
    return Result(status, **sizes, tokens=tokens, seconds=seconds, numbers=numbers)


def steps_of(cell: Cell) -> int:
    """The most training steps of a cell, for the progress bar."""
    return sum(task.steps for task in cell.task.trainings())


def write(plan: Plan, results: ResultsFile, console: Console) -> None:
    """Print the table; write NAME.csv, NAME.json and NAME.png, with the command in each."""
    study, options = plan.study, plan.options
    rows = study.finish(options, make_rows([(cell, results.get(cell)) for cell in plan.cells]))
    columns, baselines = study.columns(options), baselines_of(plan.cells) + study.published(options)
    console.print(terminal_table(rows, columns, baselines))
    plots.save_csv(csv_rows(rows, columns, baselines, plan.command), plan.folder / f"{plan.name}.csv")
    plots.save_json(
        {
            "command": plan.command,
            "machine": sharding.machine(),
            "options": dataclasses.asdict(options),
            "baselines": [{"what": words, **numbers} for words, numbers in baselines],
            "rows": [row_json(row) for row in rows],
            "models": [
                {**cell.labels, "task": cell.task.name, "seed": cell.seed, **dataclasses.asdict(results.get(cell))}
                for cell in plan.cells
            ],
        },
        plan.folder / f"{plan.name}.json",
    )
    study.draw(options, rows, plan.folder / f"{plan.name}.png", plan.command)
    console.print(f"saved {plan.folder}")


def row_json(row: Any) -> dict[str, Any]:
    """A row with mean and standard deviation of every number over seeds."""
    numbers = {}
    for name, values in row.numbers.items():
        of_lists = any(isinstance(value, list) for value in values)
        numbers[name] = [s._asdict() for s in row.curve(name)] if of_lists else row.spread(name)._asdict()
    return dataclasses.asdict(row) | {"numbers": numbers}


def label_words(cell: Cell) -> str:
    """The labels of a cell's row in words, for the progress bar."""
    return " ".join(f"{name}={value}" for name, value in cell.labels.items() if value not in (None, ""))


def result_words(cell: Cell, result: Result) -> str:
    """A line for a cell that has finished."""
    single = {name: value for name, value in (result.numbers or {}).items() if not isinstance(value, list)}
    numbers = "  ".join(f"{name} {number_words(value, 3)}" for name, value in single.items())
    status = "" if result.status == "finite" else f"  {result.status}  {result.error}"
    return f"{label_words(cell)}  {cell.task.name} seed {cell.seed}: {numbers}  {result.seconds:.1f} s{status}"
