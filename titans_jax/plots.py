"""Results as files: rows as CSV, values as JSON, and figures as PNG, drawn without a display.

matplotlib is imported by the first figure only.
"""

import contextlib
import csv
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def save_csv(rows: Sequence[Any], file: Path) -> None:
    """Write rows, dataclass instances or dictionaries with the keys of the first, under a line of their field names.

    None is an empty field. Makes the folder; replaces the file.
    """
    lines = [_fields(row) for row in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def save_json(value: Any, file: Path) -> None:
    """Write a value as indented JSON, dataclasses in it as objects. Makes the folder; replaces the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=2, default=_fields) + "\n")


def _fields(row: Any) -> dict[str, Any]:
    return row if isinstance(row, dict) else dataclasses.asdict(row)


@contextlib.contextmanager
def figure(file: Path, width: float = 6, height: float = 4, dpi: int = 150) -> Iterator["Axes"]:
    """Axes of a new figure of width x height inches, which the end of the `with` block saves as the PNG `file`.

    The figure itself is `axes.figure`. Makes the folder.
    """
    with panels(file, 1, 1, width, height, dpi) as (axes,):
        yield axes


@contextlib.contextmanager
def panels(
    file: Path, rows: int, columns: int, width: float = 6, height: float = 4, dpi: int = 150
) -> Iterator[list["Axes"]]:
    """`figure` with rows x columns axes of its width and height together, row by row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)  # no pyplot: it would keep the figure, and choose a backend for the whole process
    yield [*drawn.subplots(rows, columns, squeeze=False).flat]
    file.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(file, dpi=dpi)
