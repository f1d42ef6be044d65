"""Results as files: rows as CSV, values as JSON, and figures as PNG, drawn without a display.

matplotlib is imported by the first figure only.
"""

import contextlib
import csv
import dataclasses
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def save_csv(rows: Sequence[Any], file: Path) -> None:
    """Write rows (dataclass instances, or dictionaries with the same keys) below a line with their field names.

    None is an empty field. Makes the folder; replaces the file.
    """
    lines = [_fields(row) for row in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def save_json(value: Any, file: Path) -> None:
    """Write a value as indented JSON (`json_text`). Makes the folder; replaces the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json_text(value, indent=2) + "\n")


def json_text(value: Any, indent: int | None = None) -> str:
    """A value as JSON, dataclasses in it as objects, and null for numbers that are not finite."""
    plain = json.loads(json.dumps(value, default=_fields), parse_constant=lambda _: None)
    return json.dumps(plain, indent=indent, allow_nan=False)


def _fields(row: Any) -> dict[str, Any]:
    return row if isinstance(row, dict) else dataclasses.asdict(row)


@contextlib.contextmanager
def figure(file: Path, width: float = 6, height: float = 4, dpi: int = 150, note: str = "") -> Iterator["Axes"]:
    """Axes of a new figure of width x height inches, which the end of the `with` block saves as the PNG `file`.

    The figure itself is `axes.figure`. Makes the folder. note: a line under the figure, and in the file's description.
    """
    with panels(file, 1, width, height, dpi, note) as (axes,):
        yield axes


@contextlib.contextmanager
def panels(
    file: Path, count: int, width: float = 6, height: float = 4, dpi: int = 150, note: str = "", columns: int = 4
) -> Iterator[list["Axes"]]:
    """As `figure`, with `count` axes side by side, at most `columns` in a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)  # no pyplot: it would keep the figure, and choose a backend for the whole process
    across = min(count, columns)
    yield [drawn.add_subplot(-(-count // across), across, number + 1) for number in range(count)]
    if note:
        drawn.supxlabel(textwrap.fill(note, int(20 * width)), fontsize="xx-small", color="gray")
    file.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(file, dpi=dpi, metadata={"Description": note} if note else None)
