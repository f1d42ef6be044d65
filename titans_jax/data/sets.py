"""Data sets by name: which files the evaluations read, whether they are there, and where they come from.

    titans data list                        all of them, in the folder `data`, or --data FOLDER
    titans data fetch piqa boolq            what is not there, from its official address, or --path FILE_OR_ADDRESS
    titans data fetch piqa --path my.jsonl  a file of one's own in its place

A set is one file in that folder. It is fetched whole, compared with the sha256 that is known of its address (those of
tensorflow_datasets' tables, and of what others have recorded), brought into the fields that are read, and put into
place last: a fetch that fails leaves nothing. Sets that need a builder are built by tensorflow_datasets.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titans_jax.data.errors import DataError
from titans_jax.registry import did_you_mean

PACKED = ("", ".gz", ".xz")
"""Endings with which a file may lie there; it is fetched without."""
TIMEOUT = 60.0
"""Seconds without an answer."""


@dataclass(frozen=True)
class DataSet:
    """One file, what it is, and where it comes from."""

    file: str
    """In the folder of data sets; may lie there packed (.gz, .xz)."""
    what: str
    address: str | None = None
    sha256: str | None = None
    """That of what the address gives; None where nobody recorded it."""
    member: str | None = None
    """The file in the archive that the address gives."""
    labels: str | None = None
    """The file in the archive with a line `label` for every record."""
    builder: str | None = None
    """A builder of tensorflow_datasets, where there is no address: "name:split"."""
    convert: Callable[[Any], dict[str, Any]] | None = None
    """A record of the builder -> a record of the file."""


def _arc(record: Any) -> dict[str, Any]:
    labels = [int(label) for label in record["choices"]["label"]]
    choices = [_text(choice) for choice in record["choices"]["text"]]
    gold = labels.index(int(record["answerKey"]))
    return {"id": _text(record["id"]), "question": _text(record["question"]), "choices": choices, "gold": gold}


def _book(record: Any) -> dict[str, Any]:
    return {"title": _text(record["book_title"]), "text": _text(record["book_text"])}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


_AI2 = "https://storage.googleapis.com/ai2-mosaic/public"
_ETT = "https://raw.githubusercontent.com/zhouhaoyi/ETDataset/main/ETT-small"
SETS: dict[str, DataSet] = {
    "wikitext": DataSet(
        "wikitext-2/wiki.test.raw", "WikiText-2, raw test text",
        "https://huggingface.co/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip",
        "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11", "wikitext-2-raw/wiki.test.raw",
    ),
    "lambada_openai": DataSet(
        "lambada/lambada_test.jsonl", "LAMBADA, OpenAI's version of the test set",
        "https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl",
        "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226",
    ),
    "piqa": DataSet(
        "commonsense/piqa.val.jsonl", "PIQA, development set", f"{_AI2}/physicaliqa/physicaliqa-train-dev.zip",
        "54d32a04f59a7e354396f321723c8d7ec35cc6b08506563d8d1ffcc15ce98ddd",
        "physicaliqa-train-dev/dev.jsonl", "physicaliqa-train-dev/dev-labels.lst",
    ),
    "hellaswag": DataSet(
        "commonsense/hellaswag.val.jsonl", "HellaSwag, validation set",
        "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl",
        "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588",
    ),
    "winogrande": DataSet(
        "commonsense/winogrande_xl.val.jsonl", "WinoGrande, development set", f"{_AI2}/winogrande/winogrande_1.1.zip",
        "3619ab104d8be2977b25c90ff420cb42d491707dcc75362a1e5d22bc082b7318", "winogrande_1.1/dev.jsonl",
    ),
    "arc_easy": DataSet(
        "commonsense/arc_easy.test.jsonl", "ARC-Easy, test set", builder="ai2_arc/ARC-Easy:test", convert=_arc
    ),
    "arc_challenge": DataSet(
        "commonsense/arc_challenge.test.jsonl", "ARC-Challenge, test set", builder="ai2_arc/ARC-Challenge:test",
        convert=_arc,
    ),
    "social_iqa": DataSet(
        "commonsense/social_i_qa.val.jsonl", "Social IQa, development set", f"{_AI2}/socialiqa/socialiqa-train-dev.zip",
        "ee073914a0fc33265cfbcfc50ec20df9b2e07809c3f420f599138d1f394ef5c3",
        "socialiqa-train-dev/dev.jsonl", "socialiqa-train-dev/dev-labels.lst",
    ),
    "boolq": DataSet(
        "commonsense/boolq.val.jsonl", "BoolQ, development set", "https://storage.googleapis.com/boolq/dev.jsonl",
        "ebc29ea3808c5c611672384b3de56e83349fe38fc1fe876fd29b674d81d0a80a",
    ),
    "babi": DataSet(
        "babi/tasks_1-20_v1-2.en-10k.tar", "bAbI 1.2, for BABILong",
        "https://s3.amazonaws.com/text-datasets/babi_tasks_1-20_v1-2.tar.gz",
    ),
    "books": DataSet(
        "books/valid.jsonl", "novels, for BABILong: PG-19's test set", builder="pg19:test", convert=_book
    ),
    "squad": DataSet(
        "squad/dev-v2.0.json", "SQuAD 2.0, development set, for RULER's qa_1",
        "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",
        "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
    ),
    "hotpotqa": DataSet(
        "hotpotqa/hotpot_dev_distractor_v1.json", "HotpotQA, development set with distractors, for RULER's qa_2: the "
        "copy that RULER names, as the official server is often away",
        "https://huggingface.co/datasets/namlh2004/hotpotqa/resolve/7e54db4656209750ff487f6fdf8e39a66dba136b/"
        "hotpot_dev_distractor_v1.json",
        "e3da074df24e8369009918aa5cdbdd254dadcde4c63f7569d36afd6f2268caa8",
    ),
    "ETTh1": DataSet("ett/ETTh1.csv", "ETT, hours, first transformer", f"{_ETT}/ETTh1.csv",
                     "f18de3ad269cef59bb07b5438d79bb3042d3be49bdeecf01c1cd6d29695ee066"),
    "ETTh2": DataSet("ett/ETTh2.csv", "ETT, hours, second transformer", f"{_ETT}/ETTh2.csv",
                     "a3dc2c597b9218c7ce1cd55eb77b283fd459a1d09d753063f944967dd6b9218b"),
    "ETTm1": DataSet("ett/ETTm1.csv", "ETT, quarter hours, first transformer", f"{_ETT}/ETTm1.csv",
                     "6ce1759b1a18e3328421d5d75fadcb316c449fcd7cec32820c8dafda71986c9e"),
}  # fmt: skip
"""All sets by name; those of lm-eval's tasks have the tasks' names."""


def find_file(folder: Path, file: str) -> Path | None:
    """The file of that name in a folder, as it is or packed; None where there is none."""
    return next((found for ending in PACKED if (found := folder / (file + ending)).is_file()), None)


def fetch(name: str, folder: Path, path: str | None = None, track: Callable[..., Any] = lambda it, **_: it) -> Path:
    """Bring a set into the folder, and return its file; the one that is there already, if it is.

    Args:
      path: a file or an address to take it from, in place of its own; then nothing is known of its sha256.
      track: shows the progress of an iterator over parts, as rich.progress.track.

    Raises:
      DataError: there is no such set, or it cannot be had: one sentence with the address.
    """
    if name not in SETS:
        raise DataError(f"there is no data set {name!r}; use {', '.join(SETS)}{did_you_mean(name, SETS)}")
    one, target = SETS[name], folder / SETS[name].file
    if path is None and (there := find_file(folder, one.file)) is not None:
        return there
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as beside:
        made = Path(beside) / "made"
        if path is not None or one.builder is None:
            source = path or one.address
            content = _download(name, str(source), Path(beside) / "fetched", track)
            if path is None:
                _check(name, one, content)
            _unpack(name, one, content, made, str(source))
        else:
            _build(name, one, made, Path(beside))
        ending = Path(path).suffix if path is not None and Path(path).suffix in PACKED else ""
        target = target.with_name(target.name + ending)
        made.replace(target)
    return target


def _download(name: str, source: str, file: Path, track: Callable[..., Any]) -> Path:
    """The content of an address, or a file of this machine, as a file."""
    try:
        if "://" not in source:
            shutil.copyfile(Path(source).expanduser(), file)
            return file
        with urllib.request.urlopen(source, timeout=TIMEOUT) as answer, file.open("wb") as out:
            size = int(answer.headers.get("Content-Length") or 0)
            parts = iter(lambda: answer.read(1 << 20), b"")
            for part in track(parts, description=name, total=max(1, -(-size >> 20))):
                out.write(part)
            if size and out.tell() != size:
                raise OSError(f"{out.tell():,} of {size:,} bytes came")
        return file
    except (OSError, ValueError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise DataError(
            f"{name} cannot be fetched from {source} ({reason}); fetch it yourself and give it with --path"
        ) from error


def _check(name: str, one: DataSet, content: Path) -> None:
    found = hashlib.sha256(content.read_bytes()).hexdigest()
    if one.sha256 is not None and found != one.sha256:
        raise DataError(
            f"{name} from {one.address} has sha256 {found}, not {one.sha256}: it is another file, or damaged; fetch it "
            "yourself and give it with --path"
        )


def _unpack(name: str, one: DataSet, content: Path, made: Path, source: str) -> None:
    """The file that is read of what was fetched: the member of an archive, with its labels, or all of it."""
    if one.member is None or not zipfile.is_zipfile(content):
        content.replace(made)
        return
    try:
        with zipfile.ZipFile(content) as archive:
            text = archive.read(one.member)
            if one.labels is not None:
                labels = archive.read(one.labels).decode().split()
                text = b"".join(_labelled(io.BytesIO(text), labels))
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{name} from {source} cannot be unpacked ({error}); fetch it again") from error
    made.write_bytes(text)


def _labelled(lines: io.BytesIO, labels: list[str]) -> Iterator[bytes]:
    """JSON lines with their labels: numbers that count from 0 stay numbers, as the published sets have them."""
    number = int if "0" in labels else str
    for line, label in zip(lines, labels, strict=True):
        yield json.dumps(json.loads(line) | {"label": number(label)}).encode() + b"\n"


def _build(name: str, one: DataSet, made: Path, folder: Path) -> None:
    """Have tensorflow_datasets build a set, and write its split as JSON lines."""
    import tensorflow_datasets as tfds  # only who fetches such a set waits for the import

    builder_name, split = one.builder.split(":")
    try:
        builder = tfds.builder(builder_name, data_dir=str(folder), file_format="array_record")
        builder.download_and_prepare()
        source = builder.as_data_source(split)
        with made.open("w", encoding="utf-8") as out:
            for record in source:
                out.write(json.dumps(one.convert(record), ensure_ascii=False) + "\n")
    except Exception as error:  # of any kind: it downloads and parses by others' code
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DataError(
            f"{name} cannot be built by tensorflow_datasets from {builder_name} ({reason}); fetch it yourself and give "
            "it with --path"
        ) from error
