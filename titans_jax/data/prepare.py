"""Documents to rows of tokens on disk, once for all starts: `titans data prepare`.

The text is cut into portions; a process tokenizes a portion, packs it and writes it as a shard (stored.py). Each shard,
and a note beside it that describes its content, is put in place whole, so that a stop at any moment loses only the
portions being written; the same command then goes on. Portions depend on the text and `shard_bytes` alone, never on how
many processes there are.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from titans_jax.data.errors import DataError
from titans_jax.data.packing import Corpus, count_utf8, encode_after, pack, parts_of, stretches, token_dtype
from titans_jax.data.sources import Split, describe_source, open_documents
from titans_jax.data.stored import (
    INDEX,
    Index,
    Shard,
    as_path,
    describe_tokenizer,
    encode_row,
    is_local,
    read_index,
    sha256_of,
    write_index,
    write_whole,
)
from titans_jax.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_files

if TYPE_CHECKING:
    from etils import epath

    from titans_jax.config import DataConfig

SETTINGS = "prepare.json"
"""The file in an unfinished folder with the settings that it is being prepared with."""
WRITER = "group_size:1"  # a record can be read without others


@dataclass(frozen=True)
class Portion:
    """The text of one shard."""

    split: Split
    number: int
    texts: list[tuple[str, str, bool]]
    """(the character before the text, "" where a document begins; the text; whether the document ends with it)."""

    @property
    def name(self) -> str:
        """The file name of the shard."""
        return f"{self.split}-{self.number:05}.array_record"

    def digest(self) -> str:
        """SHA-256 of the text and its ends."""
        digest = hashlib.sha256()
        for preceding, text, ends in self.texts:
            digest.update(text.encode("utf-8", "surrogatepass"))
            digest.update(f"\0{len(text)} {preceding != ''} {ends}".encode())
        return digest.hexdigest()


def prepare(
    config: DataConfig,
    folder: str,
    *,
    align: int = 1,
    workers: int | None = None,
    shard_bytes: int = 1 << 26,
    say: Callable[[str], None] = print,
) -> Index:
    """Write the documents of a configuration as rows for `data.source` "tokens", or continue where that was stopped.

    Args:
      folder: a new or empty one, or one that the same configuration was being prepared in.
      align: as in `pack`.
      workers: number of processes; None: one for each core that this process may use; 1: this process alone.
      shard_bytes: characters of text in a shard, at least 1.
      say: called with a line of progress from time to time, where standard error is no terminal.

    Returns:
      The index of the finished folder.

    Raises:
      DataError: the folder holds something else, the data cannot be read, or a split has no text.
    """
    from titans_jax.sharding import cores  # needs jax, which the processes that are started here do without

    if config.source == "tokens":
        raise DataError("data.source='tokens' is prepared already: use the source that has the text")
    tokenizer, target = load_tokenizer(config.tokenizer), as_path(folder)
    settings = {
        "sequence_length": config.sequence_length,
        "packing": config.packing,
        "align": align,
        "shard_bytes": shard_bytes,
        "tokenizer": describe_tokenizer(config.tokenizer, tokenizer),
    }
    documents = {split: open_documents(config, split) for split in ("train", "validation")}
    _begin(target, folder, settings)
    workers = workers or cores()
    made: dict[str, list[Shard]] = {"train": [], "validation": []}
    with _Pool(workers, (os.fspath(target), config.tokenizer, settings)) as pool, _progress(documents, say) as told:
        waiting: deque[tuple[Split, Future[Shard]]] = deque()

        def finish(until: int) -> None:
            while len(waiting) > until:
                split, shard = waiting.popleft()
                made[split].append(_result(shard))
                told(split, made)

        for split, texts in documents.items():
            for portion in _portions(split, texts, shard_bytes, lambda n, split=split: told(split, made, n)):
                shard = _done(target, portion)
                waiting.append((split, _there(shard) if shard else pool.submit(portion)))
                finish(until=workers + 1)
        finish(until=0)
    for split, shards in made.items():
        require_text(sum(shard.bytes for shard in shards), split, config)
    for file in tokenizer_files(config.tokenizer):
        (target / file.name).write_bytes(file.read_bytes())
    write_index(target, settings, made)
    for left in [*target.glob("*.tmp"), *target.glob("*.array_record.json"), target / SETTINGS]:
        left.unlink(missing_ok=True)
    return read_index(folder)


def require_text(num_bytes: int, split: Split, config: DataConfig) -> None:
    """Refuse a split without text.

    Raises:
      DataError: `num_bytes`, the bytes of text in the split's documents, is 0.
    """
    if not num_bytes:
        raise DataError(f"the {split} documents of {describe_source(config)} hold no text: give more of it")


def _begin(target: epath.Path, folder: str, settings: dict[str, Any]) -> None:
    """Check that the folder is new or empty, or was begun with the same settings, and write the settings to it."""
    try:
        there = target.exists()
    except ImportError as error:
        raise DataError(f"output={folder!r} cannot be reached ({error})") from error
    if there:
        found = {each.name for each in target.iterdir()} if target.is_dir() else {"a file"}
        if INDEX in found:
            raise DataError(f"output={folder!r} holds prepared data already: use it, remove it, or give another folder")
        if found and SETTINGS not in found and not all(name.endswith(".tmp") for name in found):
            raise DataError(f"output={folder!r} holds {sorted(found)[0]}: give a new or an empty folder")
        if SETTINGS in found:
            begun = json.loads((target / SETTINGS).read_text())
            for name, value in settings.items():
                if begun.get(name) != value:
                    raise DataError(
                        f"output={folder!r} was begun with {name} {begun.get(name)}, not {value}: remove it, or give "
                        "another folder"
                    )
    target.mkdir(parents=True, exist_ok=True)
    write_whole(target / SETTINGS, json.dumps(settings))


def _portions(
    split: Split, documents: Sequence[str], shard_bytes: int, told: Callable[[int], None]
) -> Iterator[Portion]:
    """The text of a split in portions of `shard_bytes` characters or a few more; `told` gets the count of documents."""
    texts: list[tuple[str, str, bool]] = []
    number = size = 0
    for index in range(len(documents)):
        found = stretches(parts_of(documents, index))
        stretch = next(found, None)
        while stretch is not None:
            following = next(found, None)
            texts.append((*stretch, following is None))
            size += len(stretch[1])
            if size >= shard_bytes:
                yield Portion(split, number, texts)
                texts, number, size = [], number + 1, 0
            stretch = following
        told(index + 1)
    if texts:
        yield Portion(split, number, texts)


def _done(target: epath.Path, portion: Portion) -> Shard | None:
    """The shard that an earlier start wrote for this portion, if the text and the file's size are still the same."""
    note, file = target / f"{portion.name}.json", target / portion.name
    if not note.exists() or not file.exists():
        return None
    found = json.loads(note.read_text())
    shard = Shard(**found["shard"])
    return shard if found["text"] == portion.digest() and file.stat().length == shard.size else None


def write_shard(folder: str, tokenizer: Tokenizer, settings: dict[str, Any], portion: Portion) -> Shard:
    """Tokenize, pack and write a portion, then its note.

    Raises:
      DataError: another preparation has removed what was being written.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    corpus, documents = _corpus(portion, tokenizer)
    rows = pack(
        corpus,
        sequence_length=settings["sequence_length"],
        packing=settings["packing"],
        align=settings["align"],
    )
    target = as_path(folder)
    with TemporaryDirectory(prefix="titans_shard_") as elsewhere:
        place = Path(os.fspath(target)) if is_local(target) else Path(elsewhere)
        writing = place / f"{portion.name}.{os.getpid()}.tmp"
        writer = ArrayRecordWriter(str(writing), WRITER)
        for index in range(len(rows)):
            writer.write(encode_row(rows, index))
        writer.close()
        if not writing.exists():
            raise DataError(
                f"{writing} was removed while it was written: another preparation in the same folder has ended; run "
                "one at a time"
            )
        size, sha256 = sha256_of(writing)
        if is_local(target):
            writing.replace(place / portion.name)
        else:
            as_path(str(writing)).copy(target / portion.name, overwrite=True)
    shard = Shard(
        file=portion.name,
        rows=len(rows),
        documents=documents,
        bytes=corpus.num_bytes,
        tokens=len(corpus.tokens) - 1,
        fingerprint=corpus.fingerprint(),
        size=size,
        sha256=sha256,
    )
    write_whole(target / f"{portion.name}.json", json.dumps({"text": portion.digest(), "shard": vars(shard)}))
    return shard


def _corpus(portion: Portion, tokenizer: Tokenizer) -> tuple[Corpus, int]:
    """A portion's tokens, and how many documents end in it.

    A document that began in an earlier portion starts with the last token of that portion (where the character before
    the cut is no token, as a line end to some SentencePiece models, with a separator). A document that goes on in a
    later portion has no separator after it: its last token here is only a target, and there it is the first input. A
    document without tokens is left out.
    """
    dtype = token_dtype(tokenizer)
    separator = np.array([tokenizer.eos_id], dtype)
    first = portion.texts[0][0]
    before = tokenizer.encode(first)[-1:].astype(dtype) if first else separator
    parts = [before if len(before) else separator]
    borders, length, num_bytes = [0], 1, 0
    begun, size = first != "", 0  # whether the document has tokens; bytes of it that wait for its first token
    for preceding, text, ends in portion.texts:
        parts.append(encode_after(tokenizer, preceding, text).astype(dtype))
        length, size = length + len(parts[-1]), size + count_utf8(text)
        begun = begun or len(parts[-1]) > 0
        if begun:
            num_bytes, size = num_bytes + size, 0
        if begun and ends:
            parts.append(separator)
            borders.append(length)
            length += 1
        if ends:
            begun, size = False, 0
    documents = len(borders) - 1
    if begun:  # it goes on in the next portion
        borders.append(length - 1)
    return Corpus(np.concatenate(parts), np.array(borders, np.int64), num_bytes), documents


# Processes

_worker: tuple[str, Tokenizer, dict[str, Any]]


def _start_worker(folder: str, tokenizer: str, settings: dict[str, Any]) -> None:
    global _worker
    _worker = folder, load_tokenizer(tokenizer), settings
    if (parent := parent_process()) is not None:
        # A parent that is killed cannot end its workers, which would wait for work for ever.
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _work(portion: Portion) -> Shard:
    return write_shard(*_worker, portion)


def _there(shard: Shard) -> Future[Shard]:
    """A future that is done already."""
    future: Future[Shard] = Future()
    future.set_result(shard)
    return future


class _Pool:
    """Processes that write shards; with one worker, this process."""

    def __init__(self, workers: int, arguments: tuple[str, str, dict[str, Any]]):
        self._pool = None
        if workers == 1:
            _start_worker(*arguments)
        else:
            self._pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, arguments)

    def submit(self, portion: Portion) -> Future[Shard]:
        return self._pool.submit(_work, portion) if self._pool else _there(_work(portion))

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)


def _result(shard: Future[Shard]) -> Shard:
    try:
        return shard.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a process that wrote a shard has died, of too little memory perhaps: run the same command again to go on, "
            "with fewer --workers or a smaller --shard_bytes"
        ) from error


class _progress:
    """Shows the progress: a bar on a terminal, else a line every 30 seconds."""

    def __init__(self, documents: dict[str, Sequence[str]], say: Callable[[str], None]):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from titans_jax.quiet_lines import QuietLines

        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._tasks = {split: self._bar.add_task(split, total=len(docs), text="") for split, docs in documents.items()}
        self._say, self._lines, self._start = say, QuietLines(console), time.monotonic()

    def __enter__(self) -> Callable[..., None]:
        self._bar.start()
        return self._tell

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def _tell(self, split: str, made: dict[str, list[Shard]], read: int | None = None) -> None:
        if read is not None:
            self._bar.update(self._tasks[split], completed=read)
            return
        now, done = time.monotonic(), sum(shard.bytes for shards in made.values() for shard in shards)
        speed = done / (now - self._start) / 1e6
        text = f"{sum(map(len, made.values())):,} shards, {done / 1e6:,.0f} MB of text, {speed:,.1f} MB/s"
        self._bar.update(self._tasks[split], text=text)
        if self._lines.due():
            self._say(f"{split}: {text}")
