"""Studies: tables of small trained models, by name.

    @register_study()                           # as "my_study"; `titans study my_file.py` finds it
    class MyStudy(Study):
        \"\"\"What it asks, in one line.\"\"\"

        options = MyOptions                     # a dataclass under StudyOptions: what the command line sets
        def cells(self, options): ...           # the models to train, each with its task, seed and labels
        def columns(self, options): ...         # the numbers of its table
        def draw(self, options, rows, file, note): ...        # its figure

`titans_jax.studies.run` trains the cells, keeps what is finished, and writes table and figure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from titans_jax.config import ConfigError, ModelConfig, to_dict
from titans_jax.registry import Registry
from titans_jax.studies.tasks import Task

if TYPE_CHECKING:
    from titans_jax.studies.table import Baseline, Row


@dataclass(frozen=True)
class StudyOptions:
    """The options of every study."""

    quick: bool = False
    """Use defaults for two CPU cores and 20 minutes, in place of those for one accelerator."""
    seeds: int = 3
    """Models of each kind, with different initial parameters and training rows."""
    equal_parameters: bool = True
    """Widen the feed-forward layers until models of one width, vocabulary and head have as many parameters as the
    largest of them."""
    output: str | None = None
    """Folder for results, table and figure; None: runs/study_NAME. Models finished there are not trained again."""


@dataclass(frozen=True)
class Cell:
    """One model to train and measure.

    labels: the row of the table it belongs to, {heading: value}; cells of one row differ in seed, or in task.
    """

    labels: dict[str, Any]
    model: ModelConfig
    task: Task
    seed: int

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that its numbers depend on: cells of the same identity are one cell, even in different studies."""
        task = {"name": self.task.name, **dataclasses.asdict(self.task)}
        parts = {"model": model_identity(self.model), "task": task, "optimizer": to_dict(self.task.optimizer)}
        read = {"data": found} if (found := self.task.fingerprint()) else {}
        return parts | read | {"seed": self.seed}


def model_identity(model: ModelConfig) -> dict[str, Any]:
    """The fields that a model's numbers depend on: all but `remat`, which says what its gradient computes again."""
    return {name: value for name, value in to_dict(model).items() if name != "remat"}


@dataclass(frozen=True)
class Column:
    """A column of a table; number: the name of a measured number (`Task.measure`)."""

    number: str
    heading: str
    digits: int = 3


class Study:
    """A table of small models; a subclass is registered under its name by `register_study`."""

    options: ClassVar[type[StudyOptions]] = StudyOptions
    """The dataclass of its command-line options."""

    def defaults(self, said: StudyOptions) -> StudyOptions:
        """The defaults of the options, which depend on the flags in `said`, such as `quick`."""
        return dataclasses.replace(self.options(), quick=said.quick)

    def cells(self, options: StudyOptions) -> list[Cell]:
        """The models to train, in order; those of one row of the table have the same labels.

        They are made equally large afterwards, where the options say so.

        Raises:
          ConfigError: the options cannot work, in one sentence.
        """
        raise NotImplementedError

    def columns(self, options: StudyOptions) -> list[Column]:
        """The numbers of its table."""
        raise NotImplementedError

    def finish(self, options: StudyOptions, rows: list[Row]) -> list[Row]:
        """The rows of the table, with further numbers computed from the measured ones."""
        return rows

    def published(self, options: StudyOptions) -> list[Baseline]:
        """Published results to show with the table: a description and the numbers of each."""
        return []

    def notes(self, options: StudyOptions) -> str:
        """A sentence above the table."""
        return ""

    def draw(self, options: StudyOptions, rows: list[Row], file: Path, note: str) -> None:
        """The study's figure, as the PNG `file`; `note` belongs under it."""
        raise NotImplementedError


STUDIES: Registry[type[Study]] = Registry("study")
"""Studies by name."""

register_study: Callable[..., Callable[[type[Study]], type[Study]]] = STUDIES.register


def at_least_one(options: StudyOptions, *names: str) -> None:
    """Refuse these options where they are a count below one, or an empty list.

    Raises:
      ConfigError: names the field.
    """
    for name in names:
        value = getattr(options, name)
        if isinstance(value, tuple) and not value:
            raise ConfigError(f"{name} is empty; name at least one")
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"{name} is {value}; use at least 1")


def with_seeds(
    options: StudyOptions, models: Iterable[tuple[dict[str, Any], ModelConfig]], task: Task
) -> Iterable[Cell]:
    """The cells of one task: for each model with its labels, one cell for each seed 1, 2, ..."""
    for labels, model in models:
        for seed in range(1, options.seeds + 1):
            yield Cell(labels, task.fit_to(model), task, seed)
