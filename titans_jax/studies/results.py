"""Results of cells in a file, with a line for each as it finishes, so that a study that was killed can continue."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from titans_jax.config import ConfigError
from titans_jax.config.saved import DEFAULTS, from_saved, starts_differ
from titans_jax.studies.study import Cell, model_identity
from titans_jax.studies.tasks import Numbers


@dataclass(frozen=True)
class Result:
    """The result of one cell.

    status: "finite"; "not finite" if a step of its training or one of its numbers was not; or "failed", with `error`.
    tokens: read in training. state_floats: carried by a layer for one sequence. seconds: of training, compilation
    excluded. numbers: the measurements of its task, with None for one that is not finite; None where the cell failed.
    """

    status: Literal["finite", "not finite", "failed"]
    parameters: int
    state_floats: int
    tokens: int = 0
    seconds: float = 0.0
    error: str = ""
    numbers: Numbers | None = None


class ResultsFile:
    """results.jsonl of a study's folder: each line is {"cell": the cell's identity, "defaults": which defaults the
    None of its model stands for (`config.saved`), and the fields of `Result`}.

    A line that was cut off by a kill is dropped. Lines of cells that the study no longer has, or of other versions,
    stay; the cell of an earlier version whose model was another one, or started elsewhere, is not taken for one of
    today.
    """

    def __init__(self, file: Path):
        self.file, self._results = file, {}
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for line in file.read_text().splitlines() if file.exists() else []:
            try:
                fields = json.loads(line)
            except ValueError:
                continue
            lines.append(line + "\n")
            # a line of another version, for no cell
            with contextlib.suppress(AttributeError, ConfigError, KeyError, TypeError):
                identity, defaults = fields.pop("cell"), fields.pop("defaults", 1)
                model = from_saved({"model": identity["model"], "defaults": defaults}).model
                if not starts_differ(model, defaults):
                    self._results[_key(identity | {"model": model_identity(model)})] = Result(**fields)
        rewritten = file.with_suffix(".tmp")  # replaced in one move: a full disk must not lose what is there
        rewritten.write_text("".join(lines))
        rewritten.replace(file)

    def get(self, cell: Cell) -> Result | None:
        """The result of a cell, None for one that has not run."""
        return self._results.get(_key(cell.identity))

    def finished(self, cell: Cell) -> bool:
        """Whether a cell need not run (again); one that failed is tried again."""
        result = self.get(cell)
        return result is not None and result.status != "failed"

    def add(self, cell: Cell, result: Result) -> None:
        """Keep the result of a cell, on disk when this returns."""
        self._results[_key(cell.identity)] = result
        with self.file.open("a") as out:
            line = {"cell": cell.identity, "defaults": DEFAULTS, **asdict(result)}
            out.write(json.dumps(line, allow_nan=False) + "\n")


def _key(identity: dict[str, Any]) -> str:
    return json.dumps(identity, sort_keys=True)


def finite_numbers(numbers: Numbers) -> tuple[Numbers, bool]:
    """The numbers with None in place of those that are not finite, and whether all are."""
    every = True

    def known(value: Any) -> Any:
        nonlocal every
        if isinstance(value, list):
            return [known(item) for item in value]
        every &= math.isfinite(value)
        return value if math.isfinite(value) else None

    return {name: known(value) for name, value in numbers.items()}, every
