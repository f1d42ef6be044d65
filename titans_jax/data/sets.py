"""Data sets by name: which files evaluations and studies read, whether they are there, and where they come from.

    titans data list                        all of them, in the folder `data`, or --data FOLDER
    titans data fetch piqa boolq            what is not there, from its official address, or --path FILE_OR_ADDRESS
    titans data fetch piqa --path my.jsonl  a file of one's own in its place

A set is one file in that folder, or a folder of several. It is fetched whole, compared with the SHA-256 that is known
for its address (from tensorflow_datasets' tables, or recorded by others), converted to the fields that are read, and
put into place last: a fetch that fails leaves nothing. Sets that need a builder are built by tensorflow_datasets. A few
have no address that gives them in this form; the user gives a file of these with --path.
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
"""Suffixes that a set's file may have after its name in `SETS`; a fetched file keeps that of its source."""
TIMEOUT = 60.0
"""Seconds without an answer after which a fetch fails."""


@dataclass(frozen=True)
class DataSet:
    """One file, or a folder of several, what it is, and where it comes from."""

    file: str
    """Path in the folder of data sets: of a file, which may be compressed there (.gz, .xz) and, with a * in its name,
    in several pieces; or of a folder."""
    what: str
    address: str | None = None
    sha256: str | None = None
    """SHA-256 of the download, for several files over all of them in order; None where nobody recorded it."""
    member: str | None = None
    """The file in the archive that the address gives."""
    labels: str | None = None
    """The file in the archive with a line `label` for every record."""
    builder: str | None = None
    """A builder of tensorflow_datasets, where there is no address: "name:split"."""
    convert: Callable[[Any], dict[str, Any]] | None = None
    """Converts a record of the builder to a record of the file."""
    parts: tuple[str, ...] = ()
    """Where the set is a folder: the paths of its files, the same below the address as below the folder."""

    @property
    def source(self) -> str:
        """Where it comes from, in words."""
        if self.builder is not None:
            return f"tensorflow_datasets {self.builder}"
        return self.address or "no address, give it with --path"

    @property
    def has_source(self) -> bool:
        """Whether it can be fetched without a path of the user's."""
        return self.address is not None or self.builder is not None


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
_GITHUB = "https://raw.githubusercontent.com"
_GUE = ("mouse/0", "mouse/2", "mouse/3", "prom/prom_300_tata", "prom/prom_core_all", "prom/prom_core_notata",
        "prom/prom_core_tata", "tf/0", "tf/1", "tf/2")  # fmt: skip
_WIKITEXT = f"{_GITHUB}/pytorch/examples/main/word_language_model/data/wikitext-2"
_ETT = f"{_GITHUB}/zhouhaoyi/ETDataset/main/ETT-small"
SETS: dict[str, DataSet] = {
    "wikitext": DataSet(
        "wikitext-2/wiki.test.raw", "WikiText-2, raw test text",
        "https://huggingface.co/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip",
        "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11", "wikitext-2-raw/wiki.test.raw",
    ),
    "wikitext_train": DataSet(
        "wikitext-2/wiki.train.tokens", "WikiText-2, tokenised training text with <unk>", f"{_WIKITEXT}/train.txt"
    ),
    "wikitext_valid": DataSet(
        "wikitext-2/wiki.valid.tokens", "WikiText-2, tokenised validation text with <unk>", f"{_WIKITEXT}/valid.txt",
        "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
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
        f"{_GITHUB}/rowanz/hellaswag/master/data/hellaswag_val.jsonl",
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
    "books_train": DataSet(
        "books/train*.jsonl", "novels to train on: PG-19's training set, 11 GB", builder="pg19:train", convert=_book
    ),
    "haystack": DataSet(
        "haystack/nonfiction.jsonl", "essays that needles are hidden in, a record with a text each, for niah and ruler"
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
    "Weather": DataSet(
        "weather/weather.csv", "Weather of 2020, ten minutes, 21 channels",
        f"{_GITHUB}/ljnvs/HiCR-Mamba/d472c100956ed4373e9ca3700481ce88f8f1e4dd/datasets/weather/weather.csv.gz",
        "862e9b447a3933f14b6f2d3d686a35d3adb5a486f97acfa46869be0e4bb682db",
    ),
    "GUE": DataSet(
        "genomics/gue", "10 of GUE's sets of DNA: " + ", ".join(_GUE),
        f"{_GITHUB}/wds-seu/DeepGene/486343e5212361d6cd7ed03c624f430ed3d5f02e/data/GUE",
        "e30eb83144c4b606bd5a95accfe8ccccbb635c9dbf57f1c067c6c4d2f589be83",
        parts=tuple(f"{name}/{split}.csv" for name in _GUE for split in ("train", "dev", "test")),
    ),
    "human_nontata_promoters": DataSet(
        "genomics/genomic_benchmarks/human_nontata_promoters", "GenomicsBenchmarks' promoters, as train and test .csv "
        "or .tsv with the columns sequence and label", parts=("train.csv", "test.csv"),
    ),
}  # fmt: skip
"""All sets by name; those of lm-eval's tasks have the tasks' names."""


def find_file(folder: Path, file: str) -> Path | None:
    """The path of a file or folder in `folder`, where a file may be compressed: the first of several pieces, None where
    there is none."""
    return next((found for ending in PACKED for found in sorted(folder.glob(file + ending))), None)


def file_or_place(folder: str, file: str) -> str:
    """The path that `find_file` gives; where there is no such file, the path at which it should be."""
    return str(find_file(Path(folder), file) or Path(folder) / file)


def fetch(name: str, folder: Path, path: str | None = None, track: Callable[..., Any] = lambda it, **_: it) -> Path:
    """Bring a set into the folder, and return the path of its file or folder; without `path`, keep one that is there.

    Args:
      path: a file or an address to take the set from instead of its own (for a set of several files, a folder); its
        SHA-256 is then not checked.
      track: shows the progress of an iterator over parts, as rich.progress.track.

    Raises:
      DataError: there is no such set, or it cannot be fetched or built: one sentence with the address.
    """
    if name not in SETS:
        raise DataError(f"there is no data set {name!r}; use {', '.join(SETS)}{did_you_mean(name, SETS)}")
    one, target = SETS[name], folder / SETS[name].file.replace("*", "")
    if path is None and (there := find_file(folder, one.file)) is not None:
        return there
    if path is None and not one.has_source:
        raise DataError(
            f"{name} has no address that gives {one.what}: bring it with --path, and it is kept as {target}"
        )
    source = path or one.address
    ending = Path(source).suffix if source is not None and not one.parts else ""
    target = target.with_name(target.name + (ending if ending in PACKED else ""))
    there = [file for packed in PACKED for file in folder.glob(one.file + packed)]
    if other := next((file for file in there if file != target or file.is_dir()), None):
        # Beside another file of the set the new one might not be found, or both be read.
        raise DataError(f"{name} is in {other} already; remove that to bring another")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as beside:
        made = Path(beside) / "made"
        if one.parts:
            _bring_parts(name, one, made, path, track)
        elif source is not None:
            content = _download(name, source, Path(beside) / "fetched", track)
            if path is None:
                _check(name, one, [content])
            _unpack(name, one, content, made, source)
        else:
            _build(name, one, made, Path(beside))
        made.replace(target)
    return target


def _bring_parts(name: str, one: DataSet, made: Path, path: str | None, track: Callable[..., Any]) -> None:
    """The folder of a set of several files: a copy of the user's folder, or the files below the address."""
    if path is not None:
        try:
            shutil.copytree(Path(path).expanduser(), made)
        except OSError as error:
            raise DataError(
                f"{name} cannot be taken from {path} ({error.strerror or error}); give a folder with {one.parts[0]} "
                "and the like"
            ) from error
        if missing := [part for part in one.parts if not [*made.glob(f"{part.partition('.')[0]}.*")]]:
            raise DataError(f"{name} cannot be taken from {path}, which has no {missing[0]}; give a folder that has it")
        return
    files = []
    for part in one.parts:
        (made / part).parent.mkdir(parents=True, exist_ok=True)
        files.append(_download(name, f"{one.address}/{part}", made / part, track))
    _check(name, one, files)


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


def _check(name: str, one: DataSet, files: list[Path]) -> None:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    if one.sha256 is not None and (found := digest.hexdigest()) != one.sha256:
        raise DataError(
            f"{name} from {one.address} has sha256 {found}, not {one.sha256}: it is another file, or damaged; fetch it "
            "yourself and give it with --path"
        )


def _unpack(name: str, one: DataSet, content: Path, made: Path, source: str) -> None:
    """Make the set's file from the download: the archive's member, with its labels, or the download as it is."""
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
    import tensorflow_datasets as tfds  # only fetches of such a set wait for the import

    builder_name, split = one.builder.split(":")
    try:
        builder = tfds.builder(builder_name, data_dir=str(folder), file_format="array_record")
        builder.download_and_prepare()
        source = builder.as_data_source(split)
        with made.open("w", encoding="utf-8") as out:
            for record in source:
                out.write(json.dumps(one.convert(record), ensure_ascii=False) + "\n")
    except Exception as error:  # of any type: other packages download and parse here
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DataError(
            f"{name} cannot be built by tensorflow_datasets from {builder_name} ({reason}); fetch it yourself and give "
            "it with --path"
        ) from error
