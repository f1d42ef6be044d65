"""Loss by position in documents far longer than a row of training.

A row is one document, from its first token. It is read in windows of `data.sequence_length` tokens through
`LanguageModel.extend`, once with the state carried on from window to window and once, for comparison, with an empty
state at every window. The difference is the gain from the state at that length: from the memories, and from the caches
of attention in blocks that have any. Only the longer documents reach later positions, so every bucket of positions
says how many do. A text whose documents are all short is read in stretches across documents instead.

The state has one size at any length, except for the cache of an "attention" block, which has room for the longest row;
one compiled function reads all windows, and only the sums over buckets are kept.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import track

from titans_jax import data, sharding
from titans_jax.config import memory_rule
from titans_jax.evaluation.documents import read_documents
from titans_jax.evaluation.evaluators import EvaluationError, EvaluationOptions, Numbers, register_evaluator
from titans_jax.evaluation.perplexity import count_bytes, perplexity_of
from titans_jax.evaluation.results import Table, file_of, header_of, note_of
from titans_jax.inference.generate import CAUSE
from titans_jax.models import empty_state, granularity, has_memory
from titans_jax.plots import figure, save_csv, save_json

if TYPE_CHECKING:
    from titans_jax.training import Run

FIRST_BUCKET = 512
"""Tokens of the first bucket; each later one ends at twice the position of the one before."""
SIDE_BY_SIDE = 4
"""Rows that are read at a time; also the number of stretches of a text without long documents."""
STRETCH = 65536
"""Tokens that are decoded to text at a time."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The measurements at positions `first` to `last` of all rows, counted from 0, both included."""

    first: int
    last: int
    documents: int
    """Rows that reach this bucket: documents, or stretches where the text has no long documents."""
    tokens: int
    """Predicted targets, of all rows."""
    bytes: int
    """Bytes of text that these targets stand for."""
    loss: float
    """Mean cross entropy in nats per token, with the state carried on (empty at every window for memory "fresh")."""
    perplexity: float
    """exp(loss)."""
    cumulative_perplexity: float
    """Perplexity of all positions up to `last`."""
    bits_per_byte: float
    """The same loss in bits per byte of text."""
    fresh_bits_per_byte: float
    """Bits per byte with an empty state at every window."""
    gain: float
    """fresh_bits_per_byte - bits_per_byte: the gain from the state of earlier windows."""


SHOWN = ("first", "last", "documents", "perplexity", "cumulative_perplexity", "bits_per_byte", "gain")
"""Columns of the table that is printed, which fits in 80 characters; the files have all columns."""


@register_evaluator()
def positions(run: "Run", options: EvaluationOptions) -> Numbers:
    """Loss, perplexity and bits per byte by position in long documents, each read from its first token.

    Of the documents that fill the first bucket of positions and a row of training, reads the first `options.samples`
    (default all), each up to `options.length` tokens, cut down to whole windows. Where none fills a second window,
    reads 4 stretches (or `options.samples`) of the joined text, and says so. Writes positions.csv, positions.json and
    positions.png into the run's folder (named positions_off or positions_fresh for memory "off" or "fresh"). With
    memory "fresh" both losses are those of empty states.

    Raises:
      EvaluationError: the text is no file, or shorter than one row; the length is less than a window; or a loss is not
        finite, in which case the buckets before it are written.
    """
    window = run.config.data.sequence_length
    corpus = read_corpus(run, options.text)
    documents = document_rows(corpus, options.length, window, options.samples)
    rows = documents or [*long_rows(corpus.tokens, options.length, window, options.samples or SIDE_BY_SIDE)]
    unit = "documents" if documents else "stretches"
    if not documents:
        Console(stderr=True).print(
            f"titans: no document of the text has {max(2 * window, FIRST_BUCKET):,} tokens; positions are those in "
            "stretches of it across documents",
            highlight=False,
            soft_wrap=True,
        )
    places = list(bucket_ends(max(map(len, rows)) - 1))
    nats, speed = _read(run, rows, places, carried=options.memory != "fresh")
    finite = np.isfinite(nats).all(axis=0)
    known = len(places) if finite.all() else int(np.argmin(finite))
    buckets = _buckets(places[:known], nats, rows, run.tokenizer)
    header = header_of(run, options) | {
        "text": data.describe_source(run.config.data) if options.text is None else str(options.text),
        "chunk_size": memory_rule(run.config.model.memory).chunk_size if has_memory(run.config.model) else None,
        unit: len(rows),
        "documents_of_the_text": len(corpus.separators) - 1,
        "tokens_per_second": round(speed),
    }
    file = file_of(run, options, "positions")
    if buckets:
        # The header is repeated in every row, whose own documents are those that reach it.
        rows = [dataclasses.asdict(bucket) for bucket in buckets]
        save_csv([row | header | row for row in rows], file.with_suffix(".csv"))
        save_json(header | {"buckets": buckets}, file.with_suffix(".json"))
        plot_positions(buckets, window, file.with_suffix(".png"), note_of(header))
    if known < len(places):
        first, last = places[known]
        kept = f"; the buckets before are in {file}.csv" if buckets else ""
        raise EvaluationError(f"the model's logits at positions {first:,} to {last:,} are not finite; {CAUSE}{kept}")
    words = {key: value for key, value in header.items() if isinstance(value, str)}
    numbers = {key: value for key, value in header.items() if isinstance(value, int) and key != "step"}
    shown = [{column: getattr(bucket, column) for column in SHOWN} for bucket in buckets]
    return numbers | {"positions": Table(shown, words)}


def read_corpus(run: "Run", file: Path | None) -> data.Corpus:
    """The tokens of `read_documents`, one document after another, with a token between documents around each, as in
    training.

    Raises:
      EvaluationError: as `read_documents`.
    """
    return data.tokenize(read_documents(run, file), run.tokenizer, show_progress=False)


def document_rows(corpus: data.Corpus, length: int, window: int, most: int | None = None) -> list[np.ndarray]:
    """A row for each of the first `most` documents that are long enough: int [tokens + 1] each, from the token in front
    of the document on, cut down to `length` tokens and to whole windows; views of the corpus.

    Documents shorter than the first bucket of positions or than a window are left out. The result is empty if no
    document fills a second window, unless `length` is a single window.

    Raises:
      EvaluationError: length is less than a window.
    """
    length = _whole_windows(length, window)
    rows = []
    for start, end in itertools.pairwise(corpus.separators.tolist()):
        if end - start >= max(window, min(FIRST_BUCKET, length)):
            tokens = min(length, (end - start) // window * window)
            rows.append(corpus.tokens[start : start + tokens + 1])
    rows = rows[:most]
    return rows if max(map(len, rows), default=0) > min(length, 2 * window) else []


def long_rows(stream: np.ndarray, length: int, window: int, most: int = SIDE_BY_SIDE) -> np.ndarray:
    """The first stretches of a stream, each with the token that follows it: int [rows, length + 1], rows 1 to `most`.

    length is cut down to whole windows. A view of the stream.

    Raises:
      EvaluationError: a row is shorter than a window, or the stream shorter than a row.
    """
    length = _whole_windows(length, window)
    available = len(stream) - 1
    if available < length:
        fits = available - available % window
        shorter = f"use length {fits} or a longer text" if fits else "give a longer text"
        raise EvaluationError(f"the text holds {available:,} tokens to predict and length is {length:,}; {shorter}")
    rows = min(most, available // length)
    return np.lib.stride_tricks.sliding_window_view(stream, length + 1)[: rows * length : length]


def _whole_windows(length: int, window: int) -> int:
    if length < window:
        raise EvaluationError(f"length is {length:,}; use at least one window, data.sequence_length {window:,}")
    return length - length % window


class LongReader:
    """Reads long rows window by window, with one compiled function for all windows and all models of one structure."""

    def __init__(self, graphdef: nnx.GraphDef, *, closed: bool = False):
        """closed: windows are whole chunks, see `LanguageModel.extend`."""

        def read(params: Any, state: Any, piece: jax.Array, there: jax.Array) -> tuple[jax.Array, Any]:
            logits, state = nnx.merge(graphdef, params).extend(piece[:, :-1], state, closed=closed)
            nats = optax.softmax_cross_entropy_with_integer_labels(logits, piece[:, 1:])
            return sharding.replicate(jnp.sum(nats, axis=0, where=there[:, None])), state

        self._empty = jax.jit(functools.partial(empty_state, graphdef), static_argnums=(1, 2))
        self._read = jax.jit(read)

    def loss_by_position(self, params: Any, rows: np.ndarray, window: int, *, fresh: bool) -> np.ndarray:
        """Cross entropy in nats of every target, summed over rows: float64 [length], of int [rows, length + 1].

        fresh: begin every window with an empty state, else carry it from window to window.
        """
        return np.concatenate(list(self.losses(params, rows, window, fresh=fresh)))

    def losses(
        self, params: Any, rows: Sequence[np.ndarray], window: int, *, fresh: bool, room: int | None = None
    ) -> Iterator[np.ndarray]:
        """The losses of `loss_by_position` for each window, float64 [window], summed over the rows that reach it.

        rows: each of whole windows and the token that follows them, int [tokens + 1]. room: tokens that the state has
        room for, where its size depends on them; None: as many as the longest row has.
        """
        longest = max(map(len, rows)) - 1
        state = self._empty(params, len(rows), room or longest)
        for start in range(0, longest, window):
            there = np.array([start + window < len(row) for row in rows])
            piece = np.zeros((len(rows), window + 1), np.int32)
            for number in np.flatnonzero(there):
                piece[number] = rows[number][start : start + window + 1]
            nats, after = self._read(params, state, piece, there)
            yield np.asarray(nats, np.float64)
            state = state if fresh else after


def bucket_ends(length: int, end: int = FIRST_BUCKET) -> Iterator[tuple[int, int]]:
    """First and last position of every bucket of rows of this length; end: where the first bucket ends."""
    first = 0
    while first < length:
        yield first, min(end, length) - 1
        first, end = end, 2 * end


def _read(
    run: "Run", rows: list[np.ndarray], places: list[tuple[int, int]], *, carried: bool
) -> tuple[np.ndarray, float]:
    """The losses of all rows summed over each bucket, float64 [1 or 2, buckets]: with the state carried on, if
    `carried`, and with empty states; and the tokens read per second."""
    window = run.config.data.sequence_length
    reader = LongReader(run.graphdef, closed=window % granularity(run.config.model) == 0)
    rows = sorted(rows, key=len, reverse=True)
    side_by_side = min(SIDE_BY_SIDE, len(rows))
    groups = [rows[start : start + side_by_side] for start in range(0, len(rows), side_by_side)]
    groups[-1] += [rows[0][:1]] * (side_by_side - len(groups[-1]))  # rows of no window: one compilation for all groups
    states = (False, True) if carried else (True,)

    def read(group: list[np.ndarray], fresh: bool) -> Iterator[np.ndarray]:
        return reader.losses(run.params, group, window, fresh=fresh, room=len(rows[0]) - 1)

    next(read(groups[0], True))  # compiles, before the clock starts
    begun, ends = time.perf_counter(), [last for _, last in places]
    windows = (
        (number, place, loss)
        for group in groups
        for number, fresh in enumerate(states)
        for place, loss in enumerate(read(group, fresh))
    )
    count = len(states) * sum(len(group[0]) // window for group in groups)
    nats = np.zeros((len(states), len(places)))
    for number, place, loss in track(windows, "positions", count, console=Console(stderr=True), transient=True):
        bucket = np.searchsorted(ends, place * window + np.arange(window))
        nats[number] += np.bincount(bucket, loss, len(places))
    tokens = len(states) * sum(len(row) - 1 for row in rows)
    return nats, tokens / (time.perf_counter() - begun)


def _buckets(
    places: list[tuple[int, int]], nats: np.ndarray, rows: list[np.ndarray], tokenizer: data.Tokenizer
) -> list[Bucket]:
    """nats: as `_read` gives them."""
    buckets, read, lost = [], 0, 0.0
    for (first, last), losses in zip(places, nats.T.tolist(), strict=False):
        parts = [row[first : last + 2] for row in rows if len(row) - 1 > first]
        tokens = sum(len(part) - 1 for part in parts)
        stretches = (
            part[None, start : start + STRETCH + 1] for part in parts for start in range(0, len(part) - 1, STRETCH)
        )
        text = sum(count_bytes(stretch[:, :-1], stretch[:, 1:], tokenizer) for stretch in stretches)
        read, lost = read + tokens, lost + losses[0]
        bits, fresh = (each / (text or math.nan) / math.log(2) for each in (losses[0], losses[-1]))
        loss = losses[0] / tokens
        buckets.append(
            Bucket(
                first, last, len(parts), tokens, text, loss, perplexity_of(loss), perplexity_of(lost / read), bits,
                fresh, fresh - bits,
            )
        )  # fmt: skip
    return buckets


def plot_positions(buckets: list[Bucket], window: int, file: Path, note: str = "") -> None:
    """Draw bits per byte over positions, with the state carried on and with empty ones."""
    with figure(file, width=7, height=4.2, dpi=120, note=note) as axes:
        ends = [bucket.last + 1 for bucket in buckets]
        axes.plot(ends, [bucket.bits_per_byte for bucket in buckets], "o-", label="state carried on")
        fresh = [bucket.fresh_bits_per_byte for bucket in buckets]
        axes.plot(ends, fresh, "o--", color="tab:gray", label=f"empty state every {window:,} tokens")
        axes.axvline(window, color="black", linewidth=0.8, linestyle=":", label="length of a row in training")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ends, [f"{bucket.last + 1:,}\n({bucket.documents:,})" for bucket in buckets])
        axes.set_xticks([], minor=True)
        axes.set(xlabel="positions up to (rows that reach them)", ylabel="loss (bits per byte)", title=file.parent.name)
        axes.grid(alpha=0.3)
        axes.legend()
