"""Sources: where documents come from, and which of them are held out for validation.

    python   the .py files of the running interpreter's standard library: the default, needs no download
    text     a text file, or the text files of a folder
    jsonl    a .jsonl file, or those of a folder; the text is in one field of each line
    tfds     an ArrayRecord dataset of tensorflow_datasets, read without TensorFlow (tfds_text.py writes such a dataset)
    parquet  a Hugging Face dataset on disk: the parquet or arrow files of a folder (huggingface.py)
    tokens   rows of tokens that `titans data prepare` wrote (stored.py)

Text and JSONL files may be packed (.xz, .gz). Every source is a random-access sequence of documents in a fixed order,
so that the same files give the same training run. A source of one's own is a function:

    @register_source("letters")
    def letters(config: DataConfig, split: Split) -> Documents:
        return Documents(["a", "b", "c"], read=str)
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import gzip
import json
import lzma
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from titans_jax.data.errors import DataError
from titans_jax.registry import Registry, did_you_mean

if TYPE_CHECKING:
    from titans_jax.config import DataConfig

Split = Literal["train", "validation"]

TEXT_SUFFIXES = (
    ".txt .text .md .rst .tex .html .xml .raw .tokens .py .c .h .cc .cpp .hpp .cu .java .js .ts .go .rs .jl .sh"
).split()
PART = 1 << 22
"""Characters, or bytes, of a long text that are processed at a time."""
UNPACK = {".xz": lzma.open, ".gz": gzip.open}
NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Documents(Sequence[str]):
    """Documents that are read when they are asked for: document i is `read(items[i])`.

    of_split: True if these are the documents of the requested split; False if they are all documents, of which
    `open_documents` holds some out for validation. read_parts: the same text as `read`, in parts, for sources whose
    documents may be too long for memory.
    """

    items: Sequence[Any]
    read: Callable[[Any], str]
    of_split: bool = False
    read_parts: Callable[[Any], Iterator[str]] | None = None

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> str:
        return self.read(self.items[index])

    def parts(self, index: int) -> Iterator[str]:
        """The text of a document in parts, as short as its source can give them."""
        if self.read_parts is not None:
            return self.read_parts(self.items[index])
        text = self[index]
        return (text[start : start + PART] for start in range(0, len(text), PART))


Source = Callable[["DataConfig", Split], Documents]
"""(configuration, split) -> the split's documents, or all; raises DataError for fields that the source does not use."""

SOURCES: Registry[Source] = Registry("data source")
"""Sources by name."""

register_source: Callable[..., Callable[[Source], Source]] = SOURCES.register


def open_documents(config: DataConfig, split: Split) -> Documents:
    """The documents of one split.

    Validation documents are those of `validation_path` (text, jsonl) or of a dataset's own split "validation" (tfds).
    Where there is neither, every `validation_every`-th document is kept out of training; a single document is cut, and
    the last 1 / validation_every of its characters are held out.

    Raises:
      DataError: data is missing or empty, bytes are not UTF-8, or fields contradict one another.
    """
    if config.source not in SOURCES:
        *names, last = map(repr, SOURCES)
        near = did_you_mean(str(config.source), SOURCES)
        raise DataError(f"data.source={config.source!r} is unknown: use {', '.join(names)} or {last}{near}")
    if config.errors not in ("strict", "replace"):
        raise DataError(f"data.errors={config.errors!r} is unknown: use 'strict' or 'replace'")
    documents = SOURCES[config.source](config, split)
    return documents if documents.of_split else _hold_out(documents, split, config)


def describe_source(config: DataConfig) -> str:
    """The field that says where the data is, for messages."""
    return f"data.source={config.source!r}" if config.path is None else f"data.path={str(config.path)!r}"


@register_source("python")
def _standard_library(config: DataConfig, split: Split) -> Documents:
    """One document per file; files that are not UTF-8 (a few of Python's own tests) read as empty and so drop out."""
    if config.path is not None:
        raise DataError(
            f"data.path={str(config.path)!r} has no use with data.source='python', which reads the standard library: "
            "set data.source='text' (or 'jsonl', 'tfds'), or leave data.path out"
        )
    refuse_validation_path(config)
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in _files_below(folder, [".py"]) if not NOT_STANDARD_LIBRARY & set(file.parts)]
    if not files:
        raise DataError(
            f"data.source='python' found no .py file of the standard library in {folder}: "
            "use data.source='text' with data.path"
        )
    return Documents([folder / file for file in files], lambda file: _read_text(file, "empty"))


@register_source("text")
def _text_files(config: DataConfig, split: Split) -> Documents:
    """One document per file."""
    files, of_split = files_of_split(config, split, TEXT_SUFFIXES)
    parts = lambda file: _read_parts(file, config.errors)  # noqa: E731
    return Documents(files, lambda file: _read_text(file, config.errors), of_split, parts)


@register_source("jsonl")
def _jsonl_records(config: DataConfig, split: Split) -> Documents:
    """One document per line; those of packed files, which have no random access, are held in memory."""
    files, of_split = files_of_split(config, split, [".jsonl"])
    records: list[tuple[Path, int, int, int] | str] = []  # (file, number of the line, where it starts, its length)
    for file in files:
        offset = 0
        with open_unpacked(file) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    place = f"{file}, line {number},"
                    # Parsed here too, so that a wrong line is reported before the first one is tokenized.
                    text = _json_text(line, place, offset, config)
                    records.append(text if file.suffix in UNPACK else (file, number, offset, len(line)))
                offset += len(line)

    @functools.lru_cache(maxsize=1)  # a single record is read twice: for its length, then for its text
    def read(record: tuple[Path, int, int, int] | str) -> str:
        if isinstance(record, str):
            return record
        file, number, offset, length = record
        with file.open("rb") as stream:
            stream.seek(offset)
            return _json_text(stream.read(length), f"{file}, line {number},", offset, config)

    if not records:
        field = "validation_path" if of_split and split == "validation" else "path"
        raise DataError(
            f"data.{field}={str(getattr(config, field))!r} holds no record: give files with one JSON object a line"
        )
    return Documents(records, read, of_split)


def _hold_out(documents: Documents, split: Split, config: DataConfig) -> Documents:
    every = config.validation_every
    if every < 2:
        raise DataError(
            f"data.validation_every={every} leaves nothing to train on or to validate with: use 2 or more, as "
            f"{describe_source(config)} has no validation documents of its own"
        )
    if len(documents) == 1:
        length = sum(map(len, documents.parts(0)))
        end = length - length // every
        cut = (0, end) if split == "train" else (end, length)
        within = lambda cut: _within(documents.parts(0), *cut)  # noqa: E731
        return Documents([cut], lambda cut: "".join(within(cut)), read_parts=within)
    if split == "train":
        items = [item for number, item in enumerate(documents.items, 1) if number % every]
        return dataclasses.replace(documents, items=items)
    if not documents.items[every - 1 :]:
        raise DataError(
            f"data.validation_every={every} holds out none of the {len(documents)} documents of "
            f"{describe_source(config)} for validation: use "
            + ("2" if len(documents) == 2 else f"a number from 2 to {len(documents)}")
            + ", or data.validation_path with a text of its own"
        )
    return dataclasses.replace(documents, items=documents.items[every - 1 :: every])


def _within(parts: Iterator[str], first: int, last: int) -> Iterator[str]:
    """The characters from `first` to before `last` of a text in parts."""
    start = 0
    for part in parts:
        if start < last and (found := part[max(0, first - start) : last - start]):
            yield found
        start += len(part)


def _json_text(line: bytes, place: str, offset: int, config: DataConfig) -> str:
    written = decode(line, place, offset, config.errors)
    try:
        record = json.loads(written.removeprefix("\ufeff"))  # a byte order mark, as some editors begin a file
    except (ValueError, RecursionError) as error:  # also a number of too many digits, and lists nested too deeply
        raise DataError(f"{place} is not JSON ({error}): data.source='jsonl' takes one JSON object a line") from error
    fields = record if isinstance(record, dict) else {}
    text = fields.get(config.text_field)
    if not isinstance(text, str):
        names = [name for name, value in fields.items() if isinstance(value, str)]
        raise DataError(f"data.text_field={config.text_field!r} is no text in {place} which has these: {names}")
    # JSON can spell half of a surrogate pair ("\ud83d"), which UTF-8 cannot: the same refusal or replacement.
    return decode(text.encode("utf-8", "surrogatepass"), f"{place} field {config.text_field!r}", 0, config.errors)


@register_source("tfds")
def _array_records(config: DataConfig, split: Split) -> Documents:
    """The split's own documents, or those of "train" where the dataset has no validation split."""
    require_path(config)
    refuse_validation_path(config)
    import tensorflow_datasets as tfds  # only runs that read such a dataset wait for the import

    folder = Path(config.path).expanduser()
    if not (folder / "dataset_info.json").is_file():
        inside = sorted(str(info.parent) for info in folder.rglob("dataset_info.json"))
        raise DataError(
            f"data.path={str(config.path)!r} is no prepared TFDS dataset: give the folder that holds dataset_info.json"
            + (f", such as {inside[-1]}" if inside else ", as titans_jax.data.build_tfds makes one")
        )
    _check_features(folder)
    try:
        builder = tfds.builder_from_directory(folder)
    except Exception as error:  # tensorflow_datasets raises many types for files that are not what it wrote
        raise DataError(
            f"data.path={str(config.path)!r} cannot be read ({type(error).__name__}: {str(error)[:200].splitlines()[0]}"
            "): its dataset_info.json or features.json is damaged, prepare it again"
        ) from error
    if builder.info.file_format is not tfds.core.FileFormat.ARRAY_RECORD:
        raise DataError(
            f"data.path={str(config.path)!r} is stored as {builder.info.file_format.value}: "
            "prepare it with file_format='array_record', which can be read without TensorFlow"
        )
    separate = "validation" in builder.info.splits
    name = split if separate else "train"
    if name not in builder.info.splits:
        raise DataError(f"data.path={str(config.path)!r} has no split {name!r} but {list(builder.info.splits)}")
    if config.text_field not in builder.info.features:
        raise DataError(
            f"data.text_field={config.text_field!r} is no field of {str(config.path)!r}, "
            f"which has these: {list(builder.info.features)}"
        )
    source = builder.as_data_source(name)

    def read(index: int) -> str:
        place = f"{folder}, {name} record {index},"
        try:
            text = source[index][config.text_field]
        except Exception as error:  # array_record and protobuf raise many types
            raise DataError(f"{place} cannot be read ({type(error).__name__}): the dataset is damaged") from error
        return decode(text, place, 0, config.errors)

    return Documents(range(len(source)), read, of_split=separate)


KNOWN_FEATURES = "tensorflow_datasets.core.features."
"""The one prefix of class names that a features.json may have: tensorflow_datasets imports whatever it names."""


def _check_features(folder: Path) -> None:
    """Refuse a features.json that is damaged, or that would import modules from outside tensorflow_datasets."""
    file = folder / "features.json"
    try:
        waiting = [json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({error}): prepare the dataset again") from error
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            name = found.get("pythonClassName", KNOWN_FEATURES)
            if not str(name).startswith(KNOWN_FEATURES):
                raise DataError(
                    f"{file} names the feature class {name!r}, which is none of tensorflow_datasets': use a dataset of "
                    "its own features, such as tfds.features.Text"
                )
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found


def files_of_split(config: DataConfig, split: Split, suffixes: Sequence[str]) -> tuple[list[Path], bool]:
    """(the split's own files, True) where `validation_path` is given, else (all files, False)."""
    require_path(config)
    of_split = config.validation_path is not None
    return _data_files(config, "validation_path" if of_split and split == "validation" else "path", suffixes), of_split


def _data_files(config: DataConfig, field: str, suffixes: Sequence[str]) -> list[Path]:
    """The file at `config.<field>`, or the files below that folder; training leaves the validation files out."""
    path = Path(getattr(config, field)).expanduser()
    if not path.exists():
        raise DataError(f"data.{field}={str(path)!r} does not exist: give a file or a folder that does")
    files = [path / file for file in _files_below(path, suffixes)] if path.is_dir() else [path]
    for file in files:
        if not file.is_file():  # reading a pipe would block
            raise DataError(f"data.{field} has {str(file)!r}, which is no regular file: write what it holds into one")
    if field == "path" and config.validation_path is not None:
        held_out = {file.resolve() for file in _data_files(config, "validation_path", suffixes)}
        files = [file for file in files if file.resolve() not in held_out]
    if not files:
        raise DataError(
            f"data.{field}={str(path)!r} has no file for data.source={config.source!r}: "
            f"names should end in {' '.join(suffixes)} (or these with .xz, .gz)"
        )
    return files


def _files_below(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Files below `folder` with one of `suffixes`, packed or not, relative to it and sorted, without hidden ones.

    Links to folders are followed, unless they lead back to a folder that contains them.
    """
    files = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".") and not _leads_back(Path(parent) / name)]
        for name in names:
            unpacked = Path(name).stem if Path(name).suffix in UNPACK else name
            if not name.startswith(".") and Path(unpacked).suffix in suffixes:
                files.append((Path(parent) / name).relative_to(folder))
    return sorted(files, key=Path.as_posix)


def _leads_back(folder: Path) -> bool:
    """Whether a folder is a link to one of the folders on the path by which it was reached."""
    if not folder.is_symlink():
        return False
    target = folder.resolve()
    return any(target in (parent.resolve(), *parent.resolve().parents) for parent in folder.parents)


@contextmanager
def open_unpacked(file: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, unpacked if its name says that it is packed; raises DataError where it is damaged."""
    try:
        with UNPACK.get(file.suffix, open)(file, "rb") as stream:
            yield stream
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{file} cannot be unpacked ({error}): the file is damaged, fetch or pack it again") from error


def _read_text(file: Path, errors: str) -> str:
    with open_unpacked(file) as stream:
        return decode(stream.read(), str(file), 0, errors)


def _read_parts(file: Path, errors: str) -> Iterator[str]:
    """The text of a file of any length, in parts."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    with open_unpacked(file) as stream:
        offset, part = 0, b"begin"
        while part:
            part, waiting = stream.read(PART), len(decoder.getstate()[0])
            try:
                text = decoder.decode(part, final=not part)
            except UnicodeDecodeError as error:
                raise _not_utf8(str(file), offset - waiting + error.start) from error
            offset += len(part)
            if text:
                yield text


def decode(content: bytes, place: str, offset: int, errors: str) -> str:
    """UTF-8 to text; `errors`: "strict" refuses other bytes, "replace" reads U+FFFD, "empty" drops the document."""
    try:
        return content.decode("utf-8", "replace" if errors == "replace" else "strict")
    except UnicodeDecodeError as error:
        if errors == "empty":
            return ""
        raise _not_utf8(place, offset + error.start) from error


def _not_utf8(place: str, byte: int) -> DataError:
    return DataError(
        f"{place} is not UTF-8 at byte {byte}: convert it, or set data.errors='replace' to read such bytes as U+FFFD"
    )


def require_path(config: DataConfig) -> None:
    """Raises DataError where the source needs `data.path` and there is none."""
    if config.path is None:
        raise DataError(f"data.path is missing: data.source={config.source!r} reads the file or folder it names")


def refuse_validation_path(config: DataConfig) -> None:
    """Raises DataError where a `data.validation_path` was given to a source that holds out documents of its own."""
    if config.validation_path is not None:
        raise DataError(
            f"data.validation_path={str(config.validation_path)!r} has no use with data.source={config.source!r}: "
            "leave it out and set data.validation_every (or give the TFDS dataset a split named 'validation')"
        )
