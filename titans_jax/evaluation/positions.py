"""Bits per byte by position, in texts far longer than a row of training.

A long row is read in windows of `data.sequence_length` tokens through `LanguageModel.extend`, once with the state
carried on from window to window and once, for comparison, with an empty state at every window. The difference is what
the state is worth at that length: the memories, and the caches of attention in blocks that have any.

The state has one size at any length, but for the cache of an "attention" block, which has room for the whole row; one
compiled function reads all windows, and of what was measured only sums over buckets are kept.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import track

from titans_jax import data
from titans_jax.evaluation.documents import read_documents
from titans_jax.evaluation.evaluators import EvaluationError, EvaluationOptions, Numbers, register_evaluator
from titans_jax.evaluation.perplexity import count_bytes
from titans_jax.models import granularity
from titans_jax.plots import figure, save_csv, save_json

if TYPE_CHECKING:
    from titans_jax.training import Run

FIRST_BUCKET = 512
"""Tokens of the first bucket; each further one ends at twice the position of the one before."""
MOST_ROWS = 4
STRETCH = 65536
"""Tokens whose text is in memory at a time."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """What was measured at positions `first` to `last` of all rows, counted from 0, both included."""

    first: int
    last: int
    tokens: int
    """Predicted targets, of all rows."""
    documents: int
    """Rows that are still in the document they began with when the bucket begins."""
    loss: float
    """Mean cross entropy in nats per token, with the state that is asked for."""
    bits_per_byte: float
    """The same loss over the bytes that the targets stand for."""
    fresh_bits_per_byte: float
    """With an empty state at every window."""
    gain: float
    """fresh_bits_per_byte - bits_per_byte: what the state of the windows before is worth."""


@register_evaluator()
def positions(run: "Run", options: EvaluationOptions) -> Numbers:
    """Bits per byte by position in rows of `options.length` tokens, cut down to whole windows.

    Reads at most 4 rows, as many as `options.text` holds, side by side. Writes positions.csv, positions.json and
    positions.png into the run's folder (positions_off or positions_fresh for these two memories). With memory "fresh"
    both losses are those of empty states.

    Raises:
      EvaluationError: the text is no file, or shorter than one row; the length is less than a window.
    """
    window = run.config.data.sequence_length
    rows = long_rows(read_stream(run, options.text), options.length, window)
    closed = window % granularity(run.config.model) == 0
    reader, states = LongReader(run.graphdef, closed=closed), (True,) if options.memory == "fresh" else (False, True)
    places = list(bucket_ends(rows.shape[1] - 1))
    nats = np.zeros((len(states), len(places)))
    windows = (
        (number, start, loss)
        for number, fresh in enumerate(states)
        for start, loss in enumerate(reader.losses(run.params, rows, window, fresh=fresh))
    )
    count, console = len(states) * (rows.shape[1] // window), Console(stderr=True)
    for number, start, loss in track(windows, "positions", count, console=console, transient=True):
        bucket = np.searchsorted([last for _, last in places], start * window + np.arange(window))
        nats[number] += np.bincount(bucket, loss, len(places))
    buckets = [_bucket(*place, nats[:, i], rows, run.tokenizer) for i, place in enumerate(places)]
    name = "positions" if options.memory == "on" else f"positions_{options.memory}"
    save_csv(buckets, run.folder / f"{name}.csv")
    save_json({"step": run.step, "rows": len(rows), "window": window, "buckets": buckets}, run.folder / f"{name}.json")
    plot_positions(buckets, window, run.folder / f"{name}.png")
    return {"rows": len(rows), "window": window, "positions": [dataclasses.asdict(bucket) for bucket in buckets]}


def read_stream(run: "Run", file: Path | None) -> np.ndarray:
    """The tokens of `read_documents`, one document after another; int [tokens].

    A token between documents begins the stream and ends it, as in training.

    Raises:
      EvaluationError: as `read_documents`.
    """
    return data.tokenize(read_documents(run, file), run.tokenizer, show_progress=False).tokens


def long_rows(stream: np.ndarray, length: int, window: int) -> np.ndarray:
    """The first rows of a stream, each with the token that follows it: int [rows, length + 1], rows 1 to 4.

    length is cut down to whole windows. A view of the stream.

    Raises:
      EvaluationError: a row is shorter than a window, or the stream shorter than a row.
    """
    if length < window:
        raise EvaluationError(f"length is {length:,}; use at least one window, data.sequence_length {window:,}")
    length -= length % window
    available = len(stream) - 1
    if available < length:
        fits = available - available % window
        shorter = f"use length {fits} or a longer text" if fits else "give a longer text"
        raise EvaluationError(f"the text holds {available:,} tokens to predict and length is {length:,}; {shorter}")
    rows = min(MOST_ROWS, available // length)
    return np.lib.stride_tricks.sliding_window_view(stream, length + 1)[: rows * length : length]


class LongReader:
    """Reads long rows window by window, in one compiled function for all windows and all models of a structure."""

    def __init__(self, graphdef: nnx.GraphDef, *, closed: bool = False):
        """closed: windows are whole chunks, see `LanguageModel.extend`."""

        def empty(params: Any, rows: int, length: int) -> Any:
            return nnx.merge(graphdef, params).init_state(rows, length)

        def read(params: Any, state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[jax.Array, Any]:
            logits, state = nnx.merge(graphdef, params).extend(tokens, state, closed=closed)
            return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, targets), axis=0), state

        self._empty, self._read = jax.jit(empty, static_argnums=(1, 2)), jax.jit(read)

    def loss_by_position(self, params: Any, rows: np.ndarray, window: int, *, fresh: bool) -> np.ndarray:
        """Cross entropy in nats of every target, summed over rows: float64 [length], of int [rows, length + 1].

        fresh: begin every window with an empty state, else carry it from window to window.
        """
        return np.concatenate(list(self.losses(params, rows, window, fresh=fresh)))

    def losses(self, params: Any, rows: np.ndarray, window: int, *, fresh: bool) -> Iterator[np.ndarray]:
        """The same for each window, float64 [window]."""
        state = self._empty(params, len(rows), rows.shape[1] - 1)
        for start in range(0, rows.shape[1] - 1, window):
            piece = rows[:, start : start + window + 1].astype(np.int32)
            nats, after = self._read(params, state, piece[:, :-1], piece[:, 1:])
            yield np.asarray(nats, np.float64)
            state = state if fresh else after


def bucket_ends(length: int, end: int = FIRST_BUCKET) -> Iterator[tuple[int, int]]:
    """First and last position of every bucket of rows of this length; end: where the first bucket ends."""
    first = 0
    while first < length:
        yield first, min(end, length) - 1
        first, end = end, 2 * end


def _bucket(first: int, last: int, nats: np.ndarray, rows: np.ndarray, tokenizer: data.Tokenizer) -> Bucket:
    """nats: the losses summed over the bucket, with the state carried on and with empty ones, or with these alone."""
    targets = rows[:, first + 1 : last + 2]
    stretches = (targets[:, start : start + STRETCH] for start in range(0, targets.shape[1], STRETCH))
    text = sum(count_bytes(stretch, tokenizer) for stretch in stretches) or math.nan
    bits, fresh = (float(x) / text / math.log(2) for x in (nats[0], nats[-1]))
    # A row's first token may be the one in front of a document, as in training.
    documents = int(np.sum(np.all(rows[:, 1 : first + 1] != tokenizer.eos_id, axis=1)))
    return Bucket(first, last, targets.size, documents, float(nats[0]) / targets.size, bits, fresh, fresh - bits)


def plot_positions(buckets: list[Bucket], window: int, file: Path) -> None:
    """Draw bits per byte over positions, with the state carried on and with empty ones."""
    with figure(file, width=7, height=4.2, dpi=120) as axes:
        ends = [bucket.last + 1 for bucket in buckets]
        axes.plot(ends, [bucket.bits_per_byte for bucket in buckets], "o-", label="state carried on")
        fresh = [bucket.fresh_bits_per_byte for bucket in buckets]
        axes.plot(ends, fresh, "o--", color="tab:gray", label=f"empty state every {window:,} tokens")
        axes.axvline(window, color="black", linewidth=0.8, linestyle=":", label="length of a row in training")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ends, [f"{end:,}" for end in ends])
        axes.set_xticks([], minor=True)
        axes.set(xlabel="positions up to", ylabel="loss (bits per byte)", title=file.parent.name)
        axes.grid(alpha=0.3)
        axes.legend()
