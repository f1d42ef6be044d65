"""Time series for forecasting: tables of values over time, cut and scaled as the field does it.

    series = load_series("ETTh1", "../shared/data/ett/ETTh1.csv.gz")
    windows = series.windows("test", look_back=96, horizon=96)        # every window, stride 1

The borders and the scaling are those of iTransformer and the Time Series Library: hourly ETT has 12, 4 and 4 months of
30 days to train, validate and test, quarter-hourly ETT the same months, and other tables 70, 10 and 20 % of the rows;
validation and test begin a look-back earlier; and every channel has mean 0 and deviation 1 over the training rows.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from titans_jax.data.errors import DataError

MONTH = 30 * 24
"""Hours of a month of ETT."""

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True, eq=False)
class Series:
    """A scaled table. values: float32 [time, channels]; borders: by split, the first row and the one after the last,
    without the look-back; mean, deviation: [channels], of the unscaled training rows."""

    name: str
    values: np.ndarray
    borders: dict[str, tuple[int, int]]
    mean: np.ndarray
    deviation: np.ndarray
    fingerprint: str
    """16 hexadecimal digits that change with any value."""

    def windows(self, split: Split, look_back: int, horizon: int) -> Windows:
        """Every window of a split, one starting at each row.

        Raises:
          DataError: the split is shorter than one window.
        """
        first, end = self.borders[split]
        first = max(first - look_back, 0)
        count = end - first - look_back - horizon + 1
        if end - first - look_back < 1:
            raise DataError(
                f"look_back is {look_back}; use at most {end - first - 1}, fewer than the rows that {self.name} has to "
                f"{split}"
            )
        if count < 1:
            raise DataError(
                f"horizon is {horizon} and look_back {look_back}; use at most {end - first - look_back} for horizon, "
                f"the rows that {self.name} has to {split}"
            )
        return Windows(self.values, first, count, look_back, horizon)


@dataclass(frozen=True, eq=False)
class Windows:
    """`count` windows of a table, the first of them at row `first`."""

    values: np.ndarray
    first: int
    count: int
    look_back: int
    horizon: int

    def take(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows of the windows with these numbers, float32: [n, look_back, channels] and [n, horizon, channels]."""
        rows = (self.first + np.asarray(which))[:, None] + np.arange(self.look_back + self.horizon)
        found = self.values[rows]
        return found[:, : self.look_back], found[:, self.look_back :]


@functools.lru_cache(maxsize=8)
def load_series(name: str, path: str) -> Series:
    """The table in a .csv or .csv.gz file: a header, then a date and a number per channel in every row.

    name: one that begins with ETTh or ETTm selects the borders of ETT.

    Raises:
      DataError: there is no such file, or it is no such table.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"path is {path!r}, which is no file; give the folder of {name} with --folder")
    try:
        with np.errstate(all="raise"):
            form = {"delimiter": ",", "encoding": "latin-1", "comments": None}
            columns = len(np.loadtxt(file, str, max_rows=1, ndmin=1, **form))
            if columns < 2:
                raise ValueError("its header has one column")
            table = np.loadtxt(file, skiprows=1, usecols=range(1, columns), ndmin=2, **form)
            if len(wrong := np.flatnonzero(~np.isfinite(table).all(axis=1))):
                raise ValueError(f"row {wrong[0] + 2} has a value that is not finite")
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"path is {path!r}, which is no table of a date and numbers: {str(error)[:120]}") from error
    borders = _borders(name, len(table))
    first, end = borders["train"]
    train = table[first:end]
    if not len(train):
        raise DataError(f"path is {path!r}, which has {len(table)} rows; use a table with some to train on")
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    deviation = np.where(deviation == 0, 1.0, deviation)
    digest = hashlib.sha256(np.ascontiguousarray(table)).hexdigest()[:16]
    return Series(name, ((table - mean) / deviation).astype(np.float32), borders, mean, deviation, digest)


def _borders(name: str, rows: int) -> dict[str, tuple[int, int]]:
    if name.startswith("ETT"):
        month = MONTH * (4 if name.startswith("ETTm") else 1)
        ends = [12 * month, 16 * month, 20 * month]
        if rows < ends[-1]:
            raise DataError(f"{name} has {rows:,} rows; use a whole one, of at least {ends[-1]:,}")
    else:
        train, test = int(0.7 * rows), int(0.2 * rows)
        ends = [train, rows - test, rows]
    return dict(zip(("train", "validation", "test"), zip([0, *ends], ends, strict=False), strict=True))
