"""The documents that a task reads: a file that the user names, or the held-out documents of the run."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path
from typing import IO, TYPE_CHECKING

from titans_jax import data
from titans_jax.config import DataConfig
from titans_jax.data import sets
from titans_jax.evaluation.evaluators import EvaluationError

if TYPE_CHECKING:
    from titans_jax.training import Run


def read_documents(run: Run, file: Path | None, text_field: str | None = None) -> list[str]:
    """The texts of a JSONL file, a text file or a folder of these, packed (.xz, .gz) or not; None is the run's
    validation documents.

    text_field: the field of a JSONL record that has its text; None is the run's `data.text_field`.

    Raises:
      EvaluationError: there is no such file, it is not UTF-8 (and the run's `data.errors` is strict), or a record has
        no such field.
    """
    if file is None:
        return list(data.open_documents(run.config.data, "validation"))
    records = ".jsonl" in file.suffixes or (file.is_dir() and any(file.rglob("*.jsonl*")))
    own, source = run.config.data, "jsonl" if records else "text"
    config = DataConfig(source, str(file), text_field=text_field or own.text_field, errors=own.errors)
    try:
        return list(data.SOURCES[config.source](config, "train"))
    except (data.DataError, OSError) as error:
        raise EvaluationError(f"text is {str(file)!r}, which cannot be used: {error}") from error


def find_file(folder: Path, name: str) -> Path:
    """The file of that name in a folder, compressed or not.

    Raises:
      EvaluationError: there is none.
    """
    found = sets.find_file(folder, name)
    if found is None:
        raise EvaluationError(f"there is no {folder / name} (nor .gz, .xz); titans data list says where it comes from")
    return found


def open_text(file: Path) -> IO[str]:
    """A text file to read, packed (.xz, .gz) or not."""
    return {".gz": gzip.open, ".xz": lzma.open}.get(file.suffix, open)(file, "rt", encoding="utf-8")
