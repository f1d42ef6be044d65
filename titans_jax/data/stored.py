"""Rows of tokens on disk, as `titans data prepare` writes them, with random access.

A folder holds `index.json`, the tokenizer's file where it has one, and ArrayRecord shards. A record is one packed row
of a batch; the index has, for each shard, its rows, documents, bytes of text, tokens, size and SHA-256. However large
the folder, a process reads only the records of its own rows, and in any order.

A folder may be at any address that etils.epath knows (gs://, s3://). ArrayRecord reads local files: shards from
elsewhere are copied first, into the user's cache folder, once.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titans_jax.data.errors import DataError
from titans_jax.data.packing import Rows, lay_out
from titans_jax.data.pipeline import Batch, Joined, Share, Statistics
from titans_jax.data.sources import Documents, Split, refuse_validation_path, register_source, require_path
from titans_jax.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_file

if TYPE_CHECKING:
    from etils import epath

    from titans_jax.config import DataConfig

FORMAT = 1
INDEX = "index.json"
THREADS = 8
PIECE = 1 << 22


# A row as a record


def encode_row(rows: Rows, index: int) -> bytes:
    """A row as little-endian bytes: the count of its pieces, position and length of each, their tokens."""
    placed = rows.placed(index)
    header = [len(placed)] + [number for position, piece in placed for number in (position, len(piece))]
    return b"".join([np.array(header, "<i4").tobytes(), *(piece.tobytes() for _, piece in placed)])


def decode_row(record: bytes, dtype: np.dtype, sequence_length: int) -> Batch:
    """The row that `encode_row` turned into this record."""
    (count,) = np.frombuffer(record, "<i4", 1)
    places = np.frombuffer(record, "<i4", 2 * count, 4).reshape(-1, 2).tolist()
    tokens, start, placed = np.frombuffer(record, dtype, offset=4 + 8 * int(count)), 0, []
    for position, length in places:
        placed.append((position, tokens[start : start + length]))
        start += length
    return lay_out(placed, sequence_length)


# A folder


@dataclass(frozen=True)
class Shard:
    """One file of rows, as the index describes it."""

    file: str
    rows: int
    documents: int
    """Documents that end in this shard."""
    bytes: int
    """Length of the shard's text in UTF-8."""
    tokens: int
    """Positions that have a target."""
    fingerprint: str
    """16 hexadecimal digits of the tokens themselves, whatever the file looks like."""
    size: int
    """Bytes of the file."""
    sha256: str
    """Its SHA-256."""


@dataclass(frozen=True)
class Index:
    """The index of a folder: the settings it was prepared with and its shards."""

    folder: epath.Path
    settings: dict[str, Any]
    """sequence_length, packing, align, shard_bytes, and the tokenizer as `describe_tokenizer` gives it."""
    splits: dict[str, list[Shard]]

    def statistics(self, split: Split) -> Statistics:
        """The counts of a split."""
        shards = self.splits[split]
        digest = hashlib.sha256("".join(shard.fingerprint for shard in shards).encode())
        return Statistics(
            num_documents=sum(shard.documents for shard in shards),
            num_bytes=sum(shard.bytes for shard in shards),
            num_tokens=sum(shard.tokens for shard in shards),
            num_rows=sum(shard.rows for shard in shards),
            sequence_length=self.settings["sequence_length"],
            fingerprint=digest.hexdigest()[:16],
        )


def describe_tokenizer(name: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """A tokenizer as an index records it: {"name", "vocab_size", "eos_id", "sha256" of its file or None}."""
    file = tokenizer_file(name)
    digest = file and hashlib.sha256(file.read_bytes()).hexdigest()
    return {
        "name": file.name if file else name,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "sha256": digest,
    }


def as_path(folder: str) -> epath.Path:
    """A folder's address, local or not.

    Raises:
      DataError: an address of a kind that nothing here can read.
    """
    from etils import epath

    try:
        return epath.Path(os.path.expanduser(folder))
    except KeyError as error:
        kind = folder.partition("://")[0]
        raise DataError(
            f"{folder!r} is at an address of the kind {kind}://: use a local folder, gs:// or s3://"
        ) from error


def is_local(path: epath.Path) -> bool:
    """Whether files there are files of this machine."""
    return "://" not in os.fspath(path)


def write_index(folder: epath.Path, settings: dict[str, Any], splits: dict[str, list[Shard]]) -> None:
    """Write the index of a folder, whole or not at all."""
    content = {"format": FORMAT, "settings": settings, "splits": {k: [vars(s) for s in v] for k, v in splits.items()}}
    write_whole(folder / INDEX, json.dumps(content | {"sha256": _digest(content)}, indent=1) + "\n")


def write_whole(path: epath.Path, text: str) -> None:
    """Write a file under a temporary name and rename it, so that it is there whole or not at all."""
    writing = path.parent / f"{path.name}.{os.getpid()}.tmp"
    writing.write_text(text)
    writing.replace(path)


def read_index(folder: str, field: str = "data.path") -> Index:
    """The index of a folder that `titans data prepare` finished.

    Raises:
      DataError: there is none, or it is damaged or of a later format.
    """
    path = as_path(folder)
    try:
        content = json.loads((path / INDEX).read_text())
        digest = content.pop("sha256")
        if content.get("format", 0) > FORMAT:
            raise DataError(
                f"{field}={folder!r} was prepared in format {content['format']} and this version reads formats up to "
                f"{FORMAT}: use that version, or prepare the data again"
            )
        if digest != _digest(content):
            raise ValueError("its checksum is another")
        splits = {name: [Shard(**shard) for shard in shards] for name, shards in content["splits"].items()}
        return Index(path, content["settings"], splits)
    except ImportError as error:
        raise DataError(f"{field}={folder!r} cannot be reached ({error})") from error
    except FileNotFoundError as error:
        raise DataError(
            f"{field}={folder!r} has no {INDEX}: give a folder that titans data prepare CONFIG --output FOLDER "
            "finished (the same command goes on with one that was stopped)"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{field}={folder!r} has an {INDEX} that is damaged ({error}): prepare it again") from error


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sha256_of(file: epath.Path | Path) -> tuple[int, str]:
    """Size and SHA-256 of a file."""
    size, digest = 0, hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(PIECE):
            size += len(piece)
            digest.update(piece)
    return size, digest.hexdigest()


class StoredRows(Sequence[Batch]):
    """The rows of a split of a folder.

    Args:
      index: of the folder.
      split: which rows.
      process, processes: each process verifies the SHA-256 of every `processes`-th shard, so that together they
        verify each shard once.

    Raises:
      DataError: a shard is missing, cut or altered, or cannot be copied to this machine.
    """

    def __init__(self, index: Index, split: Split, process: int = 0, processes: int = 1):
        shards = index.splits[split]
        if is_local(index.folder):
            files = [Path(os.fspath(index.folder)) / shard.file for shard in shards]
            _check(files, shards, range(process, len(shards), processes))
        else:
            with ThreadPoolExecutor(THREADS) as pool:
                files = list(pool.map(lambda shard: _copied(index.folder, shard), shards))
        self._sequence_length = index.settings["sequence_length"]
        self._dtype = np.dtype("<u2" if index.settings["tokenizer"]["vocab_size"] <= 1 << 16 else "<i4")
        self._files, self._ends = files, list(accumulate(shard.rows for shard in shards))
        self._readers: dict[int, Any] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        place = index - (self._ends[number - 1] if number else 0)
        try:
            # Not through ArrayRecord's data source, which takes fifty times as long to read one record.
            with self._lock:
                reader = self._reader(number)
                reader.seek(place)
                record = reader.read()
        except (RuntimeError, ValueError, OSError, IndexError) as error:
            raise DataError(f"{self._files[number]}, row {place}, cannot be read ({str(error)[:200]})") from error
        return decode_row(record, self._dtype, self._sequence_length)

    def _reader(self, number: int) -> Any:
        if number not in self._readers:
            from array_record.python.array_record_module import ArrayRecordReader

            options = "readahead_buffer_size:0,max_parallelism:0"
            self._readers[number] = ArrayRecordReader(str(self._files[number]), options, file_reader_buffer_size=4096)
        return self._readers[number]


def _check(files: Sequence[Path], shards: Sequence[Shard], chosen: Sequence[int]) -> None:
    for file, shard in zip(files, shards, strict=True):
        if not file.is_file():
            raise DataError(f"{file} is missing: bring it back, or prepare the data again")
        if file.stat().st_size != shard.size:
            raise DataError(
                f"{file} has {file.stat().st_size:,} bytes and was written with {shard.size:,}: bring it back, or "
                "prepare the data again"
            )
    with ThreadPoolExecutor(THREADS) as pool:
        for number, (_, digest) in zip(chosen, pool.map(sha256_of, [files[i] for i in chosen]), strict=True):
            if digest != shards[number].sha256:
                raise DataError(f"{files[number]} is not what was written (another SHA-256): prepare the data again")


def _copied(folder: epath.Path, shard: Shard) -> Path:
    """A local copy of a shard from elsewhere, named after its SHA-256."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titans_jax" / "shards"
    file = cache / f"{shard.sha256}.array_record"
    if not file.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        writing = file.with_suffix(f".{os.getpid()}.tmp")
        try:
            with (folder / shard.file).open("rb") as source, writing.open("wb") as target:
                while piece := source.read(PIECE):
                    target.write(piece)
        except OSError as error:
            raise DataError(f"{folder / shard.file} cannot be copied to {cache} ({error}): bring it back") from error
        if sha256_of(writing) != (shard.size, shard.sha256):
            writing.unlink()
            raise DataError(f"{folder / shard.file} is not what was written: prepare the data again")
        writing.replace(file)
    return file


# What a configuration asks for


def parts(config: DataConfig) -> list[tuple[str, float]]:
    """The folders of `data.source` "tokens" with their weights.

    Raises:
      DataError: `data.mixture` cannot be read, or is given beside `data.path`.
    """
    refuse_validation_path(config)
    if not config.mixture:
        require_path(config)
        return [(str(config.path), 1.0)]
    if config.path is not None:
        raise DataError(f"data.path={str(config.path)!r} has no use beside data.mixture: leave one of them out")
    found = []
    for each in config.mixture:
        folder, _, number = each.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = -1.0
        if not folder or not 0 < weight < float("inf"):
            raise DataError(f"data.mixture has {each!r}: use FOLDER=WEIGHT with a positive number, such as books=0.3")
        if os.path.realpath(folder) in [os.path.realpath(other) for other, _ in found]:
            raise DataError(f"data.mixture has {folder!r} twice: use it once, with the sum of both weights")
        found.append((folder, weight))
    return found


def open_indexes(config: DataConfig, tokenizer: Tokenizer, align: int) -> list[Index]:
    """The folders of a configuration, made with its settings.

    Raises:
      DataError: names the first setting that differs, with both values.
    """
    field = "data.mixture" if config.mixture else "data.path"
    asked = {"sequence_length": config.sequence_length, "packing": config.packing, "align": align}
    asked["tokenizer"] = describe_tokenizer(config.tokenizer, tokenizer)
    indexes = []
    for folder, _ in parts(config):
        index = read_index(folder, field)
        for name, value in asked.items():
            made = index.settings[name]
            if name == "tokenizer":
                if {**made, "name": ""} != {**value, "name": ""}:
                    own = os.path.join(folder, made["name"]) if made["sha256"] else made["name"]
                    raise DataError(
                        f"data.tokenizer={config.tokenizer!r} is not the one that {field}={folder!r} was prepared "
                        f"with: use {own!r}"
                    )
            elif made != value and not (name == "align" and config.packing == "stream"):
                what = "memory chunks need documents at multiples of" if name == "align" else f"data.{name} is"
                raise DataError(
                    f"{what} {value}, but {field}={folder!r} was prepared with {made}: use {made}, or prepare it again"
                )
        indexes.append(index)
    return indexes


def stored_rows(
    config: DataConfig, tokenizer: Tokenizer, split: Split, align: int, share: Share
) -> tuple[Sequence[Batch], Statistics]:
    """The rows of a split, those of several folders one after another, and counts over all; raises as `StoredRows`."""
    indexes = open_indexes(config, tokenizer, align)
    rows = [StoredRows(index, split, share.process, share.processes) for index in indexes]
    weights = [weight for _, weight in parts(config)]
    return Joined(rows), Statistics.together([index.statistics(split) for index in indexes], weights)


@register_source("tokens")
def _rows_as_text(config: DataConfig, split: Split) -> Documents:
    """The text of every row, for users that read text and not rows, such as evaluations of long texts."""
    tokenizer = load_tokenizer(config.tokenizer)
    rows = Joined([StoredRows(read_index(folder), split) for folder, _ in parts(config)])

    def read(index: int) -> str:
        row = rows[index]
        return tokenizer.decode(row["tokens"][row["segment_ids"] > 0])

    return Documents(range(len(rows)), read, of_split=True)


def names(config: DataConfig) -> list[str]:
    """A name for each part of a mixture: the last part of its path, or the whole path where two names are the same."""
    folders = [folder.rstrip("/") for folder, _ in parts(config)]
    short = [folder.rpartition("/")[2] for folder in folders]
    return short if len({*short}) == len(short) else folders
