"""From results to tables: mean and standard deviation over seeds, on the terminal, as CSV and as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.table import Table

from titans_jax.studies.results import Result
from titans_jax.studies.study import Cell, Column
from titans_jax.studies.tasks import Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Spread(NamedTuple):
    """A number over seeds. sd: the sample standard deviation, None for a single value. All None without any value."""

    mean: float | None
    sd: float | None
    least: float | None
    most: float | None
    count: int


@dataclass(frozen=True)
class Row:
    """A row of a table: the cells with these labels.

    parameters, state_floats, tokens: of a model, one number for each task, or the least and the largest of them.
    numbers: {name: its value with each seed}; a value is None where it is not finite or its model failed. models: the
    number of cells; not_finite, failed: how many of these were not finite or failed.
    """

    labels: dict[str, Any]
    parameters: list[int]
    state_floats: list[int]
    tokens: list[int]
    seconds: float
    models: int
    not_finite: int
    failed: int
    numbers: dict[str, list[Any]] = field(default_factory=dict)

    def spread(self, name: str) -> Spread:
        """Mean, standard deviation and range over seeds."""
        return spread(self.numbers.get(name, []))

    def curve(self, name: str) -> list[Spread]:
        """`spread` of every entry of a number that is a list."""
        known = [values for values in self.numbers.get(name, []) if values is not None]
        return [spread(values) for values in zip(*known, strict=True)]

    @property
    def broken(self) -> str:
        """How many models were not finite or failed, such as "1 of 3 not finite", or ""."""
        said = {"not finite": self.not_finite, "failed": self.failed}
        return ", ".join(f"{count} of {self.models} {word}" for word, count in said.items() if count)


def spread(values: list[float | None]) -> Spread:
    """The spread of the values that are not None."""
    known = [value for value in values if value is not None]
    if not known:
        return Spread(None, None, None, None, 0)
    sd = statistics.stdev(known) if len(known) > 1 else None
    return Spread(statistics.fmean(known), sd, min(known), max(known), len(known))


def draw_spreads(axes: Axes, points: Mapping[float, Spread], **style: Any) -> None:
    """A line through the means at each x, with the standard deviations as error bars; an x without a value is left out.

    style: of matplotlib's `errorbar`.
    """
    known = {x: value for x, value in points.items() if value.count}
    means, deviations = ([value.mean for value in known.values()], [value.sd or 0 for value in known.values()])
    axes.errorbar(list(known), means, deviations, **{"capsize": 3, "marker": "o", "markersize": 4} | style)


def make_rows(done: list[tuple[Cell, Result]]) -> list[Row]:
    """A row for the cells with the same labels, in the order in which they come."""
    groups: dict[tuple, list[tuple[Cell, Result]]] = {}
    for cell, result in done:
        groups.setdefault(tuple(cell.labels.items()), []).append((cell, result))
    rows = []
    for group in groups.values():
        tasks: dict[str, list[Result]] = {}
        for cell, result in group:
            tasks.setdefault(cell.task.name, []).append(result)
        results, numbers = [result for _, result in group], {}
        for seeds in tasks.values():
            names = dict.fromkeys(name for result in seeds for name in result.numbers or {})
            numbers |= {name: [(result.numbers or {}).get(name) for result in seeds] for name in names}
        rows.append(
            Row(
                labels=group[0][0].labels,
                parameters=[seeds[0].parameters for seeds in tasks.values()],
                state_floats=[seeds[0].state_floats for seeds in tasks.values()],
                tokens=[max(result.tokens for result in seeds) for seeds in tasks.values()],
                seconds=statistics.fmean([each.seconds for each in results if each.status != "failed"] or [0.0]),
                models=len(results),
                not_finite=sum(result.status == "not finite" for result in results),
                failed=sum(result.status == "failed" for result in results),
                numbers=numbers,
            )
        )
    return rows


def joined_row(labels: dict[str, Any], rows: list[Row], numbers: dict[str, list[Any]]) -> Row:
    """One row for the models of several rows: the least and the largest of each size, and the mean of their seconds."""

    def ends(part: str) -> list[int]:
        sizes = [size for row in rows for size in getattr(row, part)]
        return [min(sizes), max(sizes)]

    return Row(
        labels=labels,
        parameters=ends("parameters"),
        state_floats=ends("state_floats"),
        tokens=ends("tokens"),
        seconds=statistics.fmean(row.seconds for row in rows),
        models=sum(row.models for row in rows),
        not_finite=sum(row.not_finite for row in rows),
        failed=sum(row.failed for row in rows),
        numbers=numbers,
    )


def means_by_seed(values: Iterable[list[float | None]]) -> list[float | None]:
    """For each seed, the mean of several numbers; None if any is None, as a mean over the others could flatter."""
    return [None if None in seed else statistics.fmean(seed) for seed in zip(*values, strict=False)]


Baseline = tuple[str, Numbers]
"""A result without a model of the study: its description and its numbers."""


def baselines_of(cells: list[Cell]) -> list[Baseline]:
    """The baselines of the cells' tasks, each once; of tasks that are described alike, such as the settings of one, the
    mean."""
    found: dict[str, list[Numbers]] = {}
    for task in {str(cell.identity["task"]): cell.task for cell in cells}.values():
        words, numbers = task.baseline()
        found.setdefault(words, []).append(numbers)
    return [
        (words, {name: statistics.fmean(each[name] for each in numbers) for name in numbers[0]})
        for words, numbers in found.items()
    ]


def number_words(value: float | None, digits: int) -> str:
    """A number with `digits` decimals, as in "1,234.50", or "" where there is none."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:,.{digits}f}" if abs(value) < 1e6 else f"{value:.2e}"


def spread_words(value: Spread, digits: int) -> str:
    """Mean and standard deviation, as in "0.95 ± 0.01"."""
    words = number_words(value.mean, digits)
    return words + f" ± {number_words(value.sd, digits)}" * (value.sd is not None)


def terminal_table(rows: list[Row], columns: list[Column], baselines: list[Baseline]) -> Table:
    """A line per row: its labels, sizes, numbers over seeds, and how many models were not finite or failed.

    Labels that are the same in all rows are in the title; baselines are in the caption.
    """
    every = {name: list(dict.fromkeys(row.labels[name] for row in rows)) for name in rows[0].labels}
    varied = [name for name, values in every.items() if len(values) > 1] or list(every)[:1]
    same = [f"{name} {label_word(values[0])}" for name, values in every.items() if name not in varied and values[0]]
    title, said = ", ".join(same), []
    for words, numbers in baselines:
        named = [f"{c.heading} {numbers[c.number]:.{c.digits}f}" for c in columns if c.number in numbers]
        said.append(f"{words}: {', '.join(named)}")
    table = Table(box=box.SIMPLE, padding=0, title=title or None, caption="; ".join(said))
    for heading in (*varied, "parameters", "state", "tokens", *(column.heading for column in columns), "seeds"):
        table.add_column(heading, overflow="fold", justify="left" if heading in varied else "right")
    for row in rows:
        counts = [row.spread(column.number).count for column in columns]
        table.add_row(
            *(label_word(row.labels[name]) for name in varied),
            *map(_sizes, (row.parameters, row.state_floats, row.tokens)),
            *(spread_words(row.spread(column.number), column.digits) for column in columns),
            f"{max(counts, default=0)}" + f", {row.broken}" * bool(row.broken),
        )
    return table


def label_word(value: Any) -> str:
    """A label as a table prints it; None is ""."""
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _sizes(values: list[int]) -> str:
    return " / ".join(f"{value:,}" for value in dict.fromkeys(values))


def csv_rows(rows: list[Row], columns: list[Column], baselines: list[Baseline], command: str) -> list[dict[str, Any]]:
    """A dictionary per row of the table, baselines too; the command that made it is in every one of them."""
    lines = []
    for row in rows:
        sizes = {"parameters": row.parameters, "state_floats": row.state_floats, "tokens": row.tokens}
        line = row.labels | {name: " / ".join(map(str, dict.fromkeys(values))) for name, values in sizes.items()}
        for column in columns:
            value = row.spread(column.number)
            line |= {column.number: value.mean, f"{column.number}_sd": value.sd}
            line |= {f"{column.number}_least": value.least, f"{column.number}_most": value.most}
        lines.append(line | {"seconds": row.seconds, "models": row.models, "broken": row.broken, "command": command})
    first = next(iter(rows[0].labels))
    for words, numbers in baselines:
        named = {column.number: numbers.get(column.number) for column in columns}
        lines.append(dict.fromkeys(lines[0]) | {first: f"baseline: {words}", **named, "command": command})
    return lines


def best_of(rows: list[Row], tried: tuple[str, ...], number: str) -> list[Row]:
    """The rows, where only the one with the largest mean of a number stays of those that differ only in labels `tried`.

    A row of which fewer seeds are known loses: their mean could flatter.
    """

    def worth(row: Row) -> tuple[int, float]:
        spread = row.spread(number)
        return spread.count, spread.mean or 0.0

    best: dict[tuple, Row] = {}
    for row in rows:
        same = tuple(item for item in row.labels.items() if item[0] not in tried)
        if same not in best or worth(row) > worth(best[same]):
            best[same] = row
    return list(best.values())
