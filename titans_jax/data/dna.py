"""DNA sequences with a class each: files of GUE and of GenomicsBenchmarks, and a tokenizer of single characters.

    dataset = load_dataset("prom/prom_core_notata", "../shared/data/genomics")
    rows = dataset.rows("train")                # {"tokens", "segment_ids": [n, time], "targets": [n]}

GUE (arXiv 2306.15006) has train, dev and test files `sequence,label`. GenomicsBenchmarks has train and test alone: here
a tenth of train is held out to choose parameters by, while HyenaDNA's protocol chooses them by the test part.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from titans_jax.data.errors import DataError
from titans_jax.data.sources import open_unpacked

PAD, OTHER, BASES = 0, 5, "ACGT"
"""The padding token; the token of an unknown base (N and all letters but BASES); and the bases of tokens 1 to 4."""

VOCABULARY = 6

HELD_OUT = 10
"""One in this many training sequences is held out for validation, where a dataset has no file for it."""

Split = Literal["train", "validation", "test"]

FILES = {"train": ("train",), "validation": ("dev", "valid", "validation"), "test": ("test",)}
"""Names of the files of each split, up to the first dot."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Sequences by split. tokens, segment_ids: int32 [n, time], padding on the left; targets: int32 [n]."""

    name: str
    splits: dict[str, dict[str, np.ndarray]]
    classes: int
    fingerprint: str
    """16 hexadecimal digits that change with any sequence and label."""

    def rows(self, split: Split) -> dict[str, np.ndarray]:
        """All sequences of a split."""
        return self.splits[split]

    @property
    def length(self) -> int:
        """Tokens of a row: the longest sequence."""
        return self.splits["train"]["tokens"].shape[1]


@functools.lru_cache(maxsize=16)
def load_dataset(name: str, folder: str) -> Dataset:
    """The dataset in the files of `folder`/`name`, or of `folder`/gue/`name`: .csv or .tsv, also .xz and .gz.

    Raises:
      DataError: the folder, a file, a column or a label is missing, a file is damaged, or a sequence is empty.
    """
    places = [Path(folder) / name, Path(folder) / "gue" / name, Path(folder) / "genomic_benchmarks" / name]
    place = next((place for place in places if place.is_dir()), None)
    if place is None:
        raise DataError(f"{name} is not in {folder!r}; give the folder that holds it, or gue/{name}, with --folder")
    found = {split: _file(place, beginnings) for split, beginnings in FILES.items()}
    for split in ("train", "test"):
        if found[split] is None:
            raise DataError(f"{place} has no {split} file; add {split}.csv with the columns sequence and label")
    read = {split: _read(file) for split, file in found.items() if file is not None}
    if "validation" not in read:
        if len(read["train"]) < 2:
            raise DataError(
                f"{found['train']} has 1 sequence; use 2 or more, some of which are held out, or add dev.csv"
            )
        read["train"], read["validation"] = _hold_out(read["train"])
    labels = sorted({label for pairs in read.values() for _, label in pairs})
    number = {label: place for place, label in enumerate(labels)}
    length = max(len(sequence) for pairs in read.values() for sequence, _ in pairs)
    splits = {
        split: {
            "tokens": (tokens := np.stack([tokenize(sequence, length) for sequence, _ in pairs])),
            "segment_ids": (tokens != PAD).astype(np.int32),
            "targets": np.array([number[label] for _, label in pairs], np.int32),
        }
        for split, pairs in read.items()
    }
    digest = hashlib.sha256(repr(read).encode("utf-8", "replace"))
    return Dataset(name, splits, len(labels), digest.hexdigest()[:16])


def tokenize(sequence: str, length: int) -> np.ndarray:
    """One token per base, int32 [length], padded on the left; upper and lower case are the same."""
    table = np.full(256, OTHER, np.int32)
    for place, base in enumerate(BASES, 1):
        table[[ord(base), ord(base.lower())]] = place
    tokens = np.full(length, PAD, np.int32)
    tokens[length - len(sequence) :] = table[np.frombuffer(sequence.encode("ascii", "replace"), np.uint8)]
    return tokens


def matthews_correlation(confusion: np.ndarray) -> float:
    """Matthews' coefficient of counts [classes, classes] of (target, answer): 1 is right, 0 is chance (Gorodkin 2004).

    0 where all targets, or all answers, are of one class.
    """
    counts = np.asarray(confusion, np.float64)
    total, right, asked, answered = counts.sum(), np.trace(counts), counts.sum(axis=1), counts.sum(axis=0)
    spread = (total**2 - np.sum(answered**2)) * (total**2 - np.sum(asked**2))
    return float((right * total - asked @ answered) / np.sqrt(spread)) if spread > 0 else 0.0


def _file(folder: Path, beginnings: tuple[str, ...]) -> Path | None:
    files = sorted(file for file in folder.iterdir() if file.name.split(".")[0] in beginnings)
    return files[0] if files else None


def _read(file: Path) -> list[tuple[str, str]]:
    with open_unpacked(file) as stream:
        text = stream.read().decode("utf-8-sig", "replace")
    csv.field_size_limit(max(csv.field_size_limit(), len(text) + 1))  # one sequence may be the whole file
    try:
        header, *lines = [*csv.reader(io.StringIO(text), delimiter="\t" if ".tsv" in file.name else ",")] or [[]]
    except csv.Error as error:
        raise DataError(f"{file} is no table ({error}); use sequence and label") from error
    columns = [next((n for n, one in enumerate(header) if one in names), None) for names in COLUMNS]
    if None in columns:
        raise DataError(f"{file} has the columns {header}; use sequence and label")
    short = [number for number, line in enumerate(lines, 2) if line and len(line) <= max(columns)]
    if short:
        raise DataError(f"{file}, line {short[0]}, has no {header[max(columns)]}; use a sequence and a label a line")
    pairs = [(line[columns[0]], line[columns[1]]) for line in lines if line]
    if not pairs or not all(sequence for sequence, _ in pairs):
        raise DataError(f"{file} has an empty sequence, or none at all; use one a line")
    return pairs


COLUMNS = (("sequence", "seq"), ("label", "labels"))
"""Names of the two columns that are read."""


def _hold_out(pairs: list[tuple[str, str]]) -> tuple[list, list]:
    """Pairs to train on, and a random tenth of the pairs for validation."""
    order = np.random.default_rng(0).permutation(len(pairs))
    held = set(order[: max(len(pairs) // HELD_OUT, 1)].tolist())
    kept = [pair for number, pair in enumerate(pairs) if number not in held]
    return kept, [pairs[number] for number in sorted(held)]
