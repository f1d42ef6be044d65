"""Batches: rows in a seeded order, this process's share of each, and one number that says how far a run has come.

Row r of a run (r = 0, 1, ...) is row r mod num_rows of epoch r div num_rows, each epoch in an order of its own. Batch n
is the rows from n * batch_size on, whatever the number of processes, so no rows are dropped between epochs.
Process p of P takes the p-th of P contiguous blocks of every batch, which is what
jax.make_array_from_process_local_data puts on its devices.
"""

import hashlib
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from titans_jax.data.errors import DataError
from titans_jax.data.packing import Corpus, Rows, lay_out

Batch = dict[str, np.ndarray]
"""{"tokens", "targets", "segment_ids"}, each int32 [rows, time]."""


@dataclass(frozen=True)
class Share:
    """Which rows of every batch this process reads: the `process`-th of `processes` contiguous blocks."""

    batch_size: int
    """Rows of all processes together; `processes` divides it."""
    process: int
    processes: int

    @property
    def rows(self) -> range:
        """The places of these rows in the batch."""
        return range(
            self.process * self.batch_size // self.processes, (self.process + 1) * self.batch_size // self.processes
        )


@dataclass(frozen=True)
class Statistics:
    """Counts over a whole split, for metrics and for people."""

    num_documents: int
    num_bytes: int
    """Length of the text in UTF-8."""
    num_tokens: int
    """Positions that have a target: the text's tokens and one end for each document."""
    num_rows: int
    sequence_length: int
    fingerprint: str
    """16 hexadecimal digits that change with any token, and with where a document ends."""
    mixed_bytes_per_token: float | None = None
    """Bytes a token in the batches of a mixture, which read a folder as often as its weight says; None without one."""

    @classmethod
    def count(cls, corpus: Corpus, rows: Rows) -> "Statistics":
        """The counts of a split that was packed into `rows`."""
        return cls(
            num_documents=len(corpus.separators) - 1,
            num_bytes=corpus.num_bytes,
            num_tokens=len(corpus.tokens) - 1,
            num_rows=len(rows),
            sequence_length=rows.sequence_length,
            fingerprint=corpus.fingerprint(),
        )

    @classmethod
    def together(cls, parts: Sequence["Statistics"], weights: Sequence[float]) -> "Statistics":
        """The counts of several sources together, rows of which are read in proportion to weights; for a single source,
        its own."""
        if len(parts) == 1:
            return parts[0]
        a_row = [weight / part.num_rows for part, weight in zip(parts, weights, strict=True)]
        num_bytes, num_tokens = (
            sum(weight * getattr(part, name) for part, weight in zip(parts, a_row, strict=True))
            for name in ("num_bytes", "num_tokens")
        )
        return cls(
            num_documents=sum(part.num_documents for part in parts),
            num_bytes=sum(part.num_bytes for part in parts),
            num_tokens=sum(part.num_tokens for part in parts),
            num_rows=sum(part.num_rows for part in parts),
            sequence_length=parts[0].sequence_length,
            fingerprint=hashlib.sha256("".join(part.fingerprint for part in parts).encode()).hexdigest()[:16],
            mixed_bytes_per_token=num_bytes / num_tokens,
        )

    @property
    def bytes_per_token(self) -> float:
        """Bits per byte = nats per token / ln 2 / bytes_per_token; exact when the loss is over the whole split."""
        if self.mixed_bytes_per_token is not None:
            return self.mixed_bytes_per_token
        return self.num_bytes / self.num_tokens

    @property
    def padding(self) -> float:
        """Share of positions that hold no token."""
        return 1 - self.num_tokens / (self.num_rows * self.sequence_length)

    def __str__(self) -> str:
        return (
            f"{self.num_documents:,} documents, {self.num_bytes:,} bytes, {self.num_tokens:,} tokens "
            f"({self.bytes_per_token:.2f} bytes a token) in {self.num_rows:,} rows of {self.sequence_length:,} "
            f"({self.padding:.1%} padding)"
        )


@dataclass(frozen=True)
class Joined(Sequence[Batch]):
    """The rows of several sources, one source after another."""

    parts: Sequence[Sequence[Batch]]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: int) -> Batch:
        ends = list(accumulate(map(len, self.parts)))
        part = bisect_right(ends, index)
        return self.parts[part][index - (ends[part - 1] if part else 0)]


class TrainBatches(Iterator[Batch]):
    """Endless batches of this process: {"tokens", "targets", "segment_ids"}, int32 [batch_size / processes, time].

    A thread reads ahead. `get_state()` is the position after the batches handed out so far, in rows of all processes
    together: {"next_row": 24}. After `set_state` with it, an iterator over the same data, seed and sequence length
    continues with the same batches, bit for bit, even with another number of processes.
    """

    def __init__(
        self,
        rows: Sequence[Batch],
        statistics: Statistics,
        share: Share,
        *,
        seed: int,
        weights: Sequence[float] | None = None,
    ):
        """weights: one for each part of `rows`, which must then be a `Joined`. Each part has epochs of its own, and
        its share of any stretch of rows is in proportion to its weight, rounded."""
        import grain  # takes a second, which generation from a trained model need not wait for

        self.statistics = statistics
        if weights is None:
            self._rows = grain.MapDataset.source(rows).seed(seed).shuffle().repeat()
        else:
            parts = [
                grain.MapDataset.source(part).seed(seed + i).shuffle().repeat() for i, part in enumerate(rows.parts)
            ]
            self._rows = grain.MapDataset.mix(parts, list(weights))
        self._batch_size, self._share = share.batch_size, share.rows
        self._batches: grain.DatasetIterator[Batch] | None = None
        self.set_state({"next_row": 0})

    def __next__(self) -> Batch:
        """The next batch."""
        batch = next(self._batches)
        self._next_row += self._batch_size
        return batch

    def get_state(self) -> dict[str, int]:
        """The position, for `set_state`: {"next_row": rows of all processes handed out so far}."""
        return {"next_row": self._next_row}

    def set_state(self, state: dict[str, int]) -> None:
        """Continue at `state`.

        Raises:
          DataError: `state` is not what `get_state` returns.
        """
        import grain

        next_row = state.get("next_row") if isinstance(state, dict) else None
        if not isinstance(next_row, int) or next_row < 0:
            raise DataError(f"the data position {state!r} is not one: it should look like {{'next_row': 24}}")
        self.close()
        self._next_row = next_row
        first_rows = grain.MapDataset.source(range(next_row, sys.maxsize - self._batch_size, self._batch_size))
        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        self._batches = iter(first_rows.map(self._read).to_iter_dataset(ahead))

    def close(self) -> None:
        """End the thread that reads ahead."""
        if self._batches is not None:
            self._batches.close()

    def _read(self, first_row: int) -> Batch:
        return _stack([self._rows[first_row + i] for i in self._share])


class ValidationBatches:
    """All rows of the validation split, in one fixed random order; every iteration is one pass over them.

    Batches are as in training. The order, which depends on no setting, makes the first few batches a fair sample; rows
    of padding fill the last batch.
    """

    def __init__(self, rows: Sequence[Batch], statistics: Statistics, share: Share):
        self.statistics = statistics
        self._rows = rows
        self._order = np.random.default_rng(0).permutation(len(rows)).tolist()
        self._batch_size, self._share = share.batch_size, share.rows

    def __len__(self) -> int:
        """Batches of one pass."""
        return -(-len(self._rows) // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """One pass over the split."""
        padding = lay_out([], self.statistics.sequence_length)
        for first_row in range(0, len(self._rows), self._batch_size):
            places = [first_row + i for i in self._share]
            yield _stack([self._rows[self._order[i]] if i < len(self._rows) else padding for i in places])


def _stack(rows: list[Batch]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
