"""Packing: documents become one array of tokens, and an index says which tokens each row takes.

The array of a split is  b document 0 b document 1 b ... b  with b the token between documents. A document's inputs are
the b before it and its tokens; its targets, shifted by one, are its tokens and the b after it. So every input has a
target, every token is predicted once, and the first token of a document is predicted from b alone.

    "stream"      the inputs of all documents, one after another, cut every `sequence_length`: one segment a row, which
                  runs across documents; nothing is padded but the end of the last row
    "documents"   documents keep apart: each is a segment of its own, or several where it is longer than a row; segments
                  are placed at multiples of `align`, the longest first, each into the fullest row that has room for it

Grain's best-fit packing, given one bin per row, needs as many rows (15,137 of 2,048 tokens for the default data, align
64), takes 3.2 s instead of 0.01 s, breaks ties differently (95 % of the rows are the same), and gives an iterator; here
rows have random access, so that they are shuffled as a whole, shared among processes and resumed by one number.
"""

import hashlib
import tempfile
import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from titans_jax.data.errors import DataError
from titans_jax.data.sources import PART, Documents
from titans_jax.data.tokenizers import Tokenizer

IN_MEMORY = 1 << 26
"""More bytes of tokens than this are kept in a file."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """The tokens of a split.

    tokens      uint16 or int32 [tokens], laid out as the module describes; a large array is a memory-mapped file
    separators  int64 [documents + 1], the places of the tokens between documents
    num_bytes   length of the text in UTF-8
    hashed      the hash object (SHA-256) of the tokens, where it was computed as they were written; else None
    """

    tokens: np.ndarray
    separators: np.ndarray
    num_bytes: int
    hashed: Any = None

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the SHA-256 of all tokens and separators, whatever files they came from.

        Costs 2 seconds for a billion bytes of tokens, which take minutes to read and tokenize.
        """
        digest = hashlib.sha256(np.ascontiguousarray(self.tokens)) if self.hashed is None else self.hashed.copy()
        digest.update(np.ascontiguousarray(self.separators))
        return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Rows(Sequence[dict[str, np.ndarray]]):
    """Rows of `sequence_length` tokens by index: row i is pieces[first_piece[i] : first_piece[i + 1]] of the tokens.

    pieces       int64 [pieces, 3]: where the piece starts in the tokens, its length, its position in the row
    first_piece  int64 [rows + 1]
    """

    tokens: np.ndarray
    pieces: np.ndarray
    first_piece: np.ndarray
    sequence_length: int

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.first_piece) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """{"tokens", "targets", "segment_ids"}, each int32 [sequence_length].

        Padding has token 0, target -1 and segment 0; segments count from 1.
        """
        return lay_out(self.placed(index), self.sequence_length)

    def placed(self, index: int) -> list[tuple[int, np.ndarray]]:
        """The pieces of a row: (position, [length + 1] tokens, the last of which is a target only)."""
        pieces = self.pieces[self.first_piece[index] : self.first_piece[index + 1]]
        return [(position, self.tokens[start : start + length + 1]) for start, length, position in pieces.tolist()]


def lay_out(placed: Iterable[tuple[int, np.ndarray]], sequence_length: int) -> dict[str, np.ndarray]:
    """The row made of the pieces of `Rows.placed`, as in `Rows`; without pieces, a row of padding."""
    tokens = np.zeros(sequence_length, np.int32)
    targets = np.full(sequence_length, -1, np.int32)
    segment_ids = np.zeros(sequence_length, np.int32)
    for segment, (position, piece) in enumerate(placed, 1):
        place = slice(position, position + len(piece) - 1)
        tokens[place] = piece[:-1]
        targets[place] = piece[1:]
        segment_ids[place] = segment
    return {"tokens": tokens, "targets": targets, "segment_ids": segment_ids}


def tokenize(documents: Sequence[str], tokenizer: Tokenizer, *, show_progress: bool = True) -> Corpus:
    """Tokenize every document once, part by part; a token takes 2 bytes (4 where the vocabulary exceeds 65,536).

    More than `IN_MEMORY` bytes of tokens go to an unnamed temporary file (in TMPDIR), which disappears with the
    process; each process has its own. Use `prepare` for text that is too large to be tokenized at every start.
    Documents without tokens are left out. With `show_progress` a progress bar appears after 2 seconds.

    Raises:
      DataError: the file cannot be written.
    """
    from rich.console import Console
    from rich.progress import Progress

    dtype = token_dtype(tokenizer)
    separator = np.array([tokenizer.eos_id], dtype)
    places, num_tokens, num_bytes, start = [0], 1, 0, time.monotonic()
    hashed = hashlib.sha256()
    progress = Progress(console=Console(stderr=True), transient=True, disable=not show_progress)
    task = progress.add_task("reading and tokenizing", total=len(documents))
    try:
        with tempfile.SpooledTemporaryFile(IN_MEMORY, prefix="titans_tokens_") as file:

            def write(tokens: np.ndarray) -> None:
                file.write(tokens)
                hashed.update(tokens)

            write(separator)
            for index in range(len(documents)):
                before, size = num_tokens, 0
                for preceding, text in stretches(parts_of(documents, index)):
                    tokens = encode_after(tokenizer, preceding, text).astype(dtype)
                    write(tokens)
                    num_tokens += len(tokens)
                    size += count_utf8(text)
                    if not progress.live.is_started and time.monotonic() - start > 2:
                        progress.start()
                if num_tokens > before:
                    write(separator)
                    places.append(num_tokens)
                    num_tokens += 1
                    num_bytes += size
                progress.update(task, completed=index + 1)
                if not progress.live.is_started and time.monotonic() - start > 2:
                    progress.start()
            if file.tell() > IN_MEMORY:
                file.flush()
                tokens = np.memmap(file, dtype, "r")
            else:
                file.seek(0)
                tokens = np.frombuffer(file.read(), dtype)
    except OSError as error:
        if error.filename is not None:  # a document's file
            raise
        raise DataError(
            f"the tokens cannot be written to {tempfile.gettempdir()} ({error.strerror}): free space there, set "
            "TMPDIR to another folder, or prepare the data once with titans data prepare"
        ) from error
    finally:
        progress.stop()
    return Corpus(tokens, np.array(places, np.int64), num_bytes, hashed)


def token_dtype(tokenizer: Tokenizer) -> type[np.generic]:
    """The type that tokens are kept in."""
    return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32


def count_utf8(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def parts_of(documents: Sequence[str], index: int) -> Iterator[str]:
    """The text of a document in parts, which are short where the source can give short ones."""
    if isinstance(documents, Documents):
        return documents.parts(index)
    return iter([documents[index]])


def stretches(parts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """A document's text as stretches (preceding, text): long texts are cut after a line end, or else after a space.

    preceding: the character before the stretch, "" for the first one. `encode_after` then gives the same tokens as for
    the whole text, provided that no token of the tokenizer spans such a cut.
    """
    held, preceding = "", ""
    for part in parts:
        held += part
        if len(held) < PART:
            continue
        end = held.rfind("\n") + 1 or held.rfind(" ") + 1 or len(held)
        yield preceding, held[:end]
        preceding, held = held[end - 1], held[end:]
    if held:
        yield preceding, held


def encode_after(tokenizer: Tokenizer, preceding: str, text: str) -> np.ndarray:
    """Tokens of a text that follows the character `preceding`, int32 [tokens].

    The character matters because some tokenizers put a space before whatever they encode.
    """
    if preceding:
        first, both = tokenizer.encode(preceding), tokenizer.encode(preceding + text)
        if np.array_equal(both[: len(first)], first):
            return both[len(first) :]
    return tokenizer.encode(text)


def pack(corpus: Corpus, *, sequence_length: int, packing: str, align: int = 1) -> Rows:
    """Lay the corpus out in rows; the layout depends on nothing but the arguments.

    Args:
      sequence_length: tokens of a row.
      packing: "documents" or "stream", see the module.
      align: documents start at multiples of this many positions of a row ("documents" only).

    Raises:
      DataError: `packing` is unknown, or a row shorter than 1.
      ValueError: `align` is below 1.
    """
    if packing not in ("documents", "stream"):
        raise DataError(f"data.packing={packing!r} is unknown: use 'documents' or 'stream'")
    if sequence_length < 1:
        raise DataError(f"data.sequence_length={sequence_length} is too short: use 1 or more")
    if align < 1:
        raise ValueError(f"align={align} is too small: use 1 or more")
    if packing == "stream":
        starts, lengths = _windows(corpus.separators[[0, -1]], sequence_length)
        rows, positions = np.arange(len(starts)), np.zeros(len(starts), np.int64)
    else:
        starts, lengths = _windows(corpus.separators, sequence_length)
        rows, positions = _best_fit(lengths, sequence_length, align)
    order = np.lexsort((positions, rows))
    first_piece = np.searchsorted(rows[order], np.arange(rows.max(initial=-1) + 2))
    pieces = np.stack([starts, lengths, positions], axis=1)[order]
    return Rows(corpus.tokens, pieces, first_piece, sequence_length)


def _windows(separators: np.ndarray, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths, int64 [pieces], of what lies between separators, cut every `sequence_length` tokens."""
    counts = -(-np.diff(separators) // sequence_length)
    stretch = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(stretch)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = separators[stretch] + within * sequence_length
    return starts, np.minimum(sequence_length, separators[stretch + 1] - starts)


def _best_fit(lengths: np.ndarray, sequence_length: int, align: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and position of each piece, int64 [pieces]: the longest first, each into the fullest row with room."""
    rows, positions = np.zeros_like(lengths), np.zeros_like(lengths)
    room_of_rows: dict[int, list[int]] = {}  # room left -> rows that have it
    rooms: list[int] = []  # the keys of room_of_rows, sorted
    order = np.argsort(-lengths, kind="stable")
    num_rows = int(np.count_nonzero(lengths == sequence_length))  # pieces that fill a row come first
    rows[order[:num_rows]] = np.arange(num_rows)
    for piece in order[num_rows:].tolist():
        length = int(lengths[piece])
        smallest = bisect_left(rooms, length)
        if smallest < len(rooms):
            room = rooms[smallest]
            row = room_of_rows[room].pop()
            if not room_of_rows[room]:
                del room_of_rows[room], rooms[smallest]
        else:
            room, row, num_rows = sequence_length, num_rows, num_rows + 1
        rows[piece], positions[piece] = row, sequence_length - room
        room -= -(-length // align) * align
        if room > 0:
            if room not in room_of_rows:
                insort(rooms, room)
            room_of_rows.setdefault(room, []).append(row)
    return rows, positions
