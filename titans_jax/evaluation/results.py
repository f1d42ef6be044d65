"""Parts shared by all evaluators with a table: the header, the names of its files, and the note of its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_jax.evaluation.evaluators import EvaluationOptions

if TYPE_CHECKING:
    from titans_jax.training import Run


class Table(list[dict[str, Any]]):
    """The rows of a task, with a header of what a reader must know of the numbers, which is printed above them."""

    def __init__(self, rows: Sequence[dict[str, Any]], header: dict[str, Any]):
        super().__init__(rows)
        self.header = header


def header_of(run: Run, options: EvaluationOptions) -> dict[str, Any]:
    """What a reader of any numbers of a run must know."""
    return {
        "step": run.step,
        "trained_on_rows_of": run.config.data.sequence_length,
        "tokenizer": run.config.data.tokenizer,
        "memory": options.memory,
    }


def note_of(header: Mapping[str, Any]) -> str:
    """A header as the line below a picture."""
    return ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in header.items())


def file_of(run: Run, options: EvaluationOptions, name: str) -> Path:
    """The path of a result's files without suffix; results with memory "off" or "fresh" have files of their own."""
    return run.folder / (name if options.memory == "on" else f"{name}_{options.memory}")
