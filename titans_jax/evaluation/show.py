"""Printed lists and tables: the evaluations, the data they read, and their results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from titans_jax.config import ConfigError
from titans_jax.data.sets import SETS, fetch, find_file
from titans_jax.evaluation.evaluators import EVALUATORS, Numbers
from titans_jax.evaluation.measure import sets_of


def list_evaluators(folder: Path) -> None:
    """Print every evaluator with the first paragraph of its docstring, and whether its data sets are in a folder."""
    for name, evaluator in EVALUATORS.items():
        what = " ".join((evaluator.__doc__ or "").split("\n\n")[0].split())
        missing = [each for each in sets_of(name) if find_file(folder, SETS[each].file) is None]
        fetched = f" Not in {folder}: {', '.join(missing)} (titans data fetch {' '.join(missing)})."
        there = fetched if missing else f" All in {folder}." if sets_of(name) else ""
        print(f"{name:16} {what}{there}")


def list_sets(folder: Path) -> None:
    """Print every data set, its size if it is in the folder, and where it comes from."""
    for name, one in SETS.items():
        file = find_file(folder, one.file)
        there = "not there" if file is None else f"{_size(file) / 1e6:,.1f} MB"
        print(f"{name:16} {there:12} {folder / one.file}: {one.what}; from {one.source}")


def _size(file: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    return sum(each.stat().st_size for each in (file, *file.rglob("*")) if each.is_file())


def fetch_sets(names: Sequence[str], folder: Path, path: str | None) -> None:
    """Fetch data sets (for the name "all", every one that has a source), and print where each is.

    Raises:
      ConfigError: one path is given for several sets.
      DataError: a set cannot be fetched.
    """
    names = tuple(name for name, one in SETS.items() if one.has_source) if tuple(names) == ("all",) else names
    if path is not None and len(names) > 1:
        raise ConfigError(f"path is {path!r}, but there are {len(names)} names; give it with one")
    for name in names:
        print(f"{name:16} {fetch(name, folder, path, track)}", flush=True)


def print_numbers(numbers: Numbers) -> None:
    """Print results of evaluators: a line for every number, and a table, below its header, for every list of rows."""
    width = max(14, *(len(name) + 2 for name in numbers))
    printed: dict[str, Any] = {}
    for name, value in numbers.items():
        if not isinstance(value, list):
            print(f"{name.replace('_', ' '):{width}}{value:,.6g}")
            continue
        header = getattr(value, "header", printed)
        if header != printed:  # the tables of one evaluator share a header, which is printed once
            printed = header
            for key, what in header.items():
                print(f"{key.replace('_', ' '):{width}}{what}")
        table = Table(title=name.replace("_", " "), title_justify="left", box=box.SIMPLE)
        for column in value[0]:
            table.add_column(column.replace("_", " "), justify="right")
        for row in value:
            table.add_row(*(_cell(x) for x in row.values()))
        Console().print(table)


def _cell(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
