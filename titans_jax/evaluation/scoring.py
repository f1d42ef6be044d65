"""Likelihoods of many continuations at once: read side by side and window by window, and a shared context once.

    scorer = Scorer(run)
    for number, score in scorer.score([(context_ids, continuation_ids), ...]): ...

All texts are read by one compiled function, of `rows` x one window of tokens, whatever their lengths: a state is
carried from window to window, and texts of similar length are read side by side. The rest of a text's last window is
padding, which no token before it sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from titans_jax import sharding
from titans_jax.inference.generate import CACHE_MULTIPLE
from titans_jax.inference.rows import RowStates
from titans_jax.models import granularity

if TYPE_CHECKING:
    from titans_jax.training import Run

WINDOW = 64
"""Tokens of a window, or of a chunk (a segment of MAC) where that has more."""
ROWS = 64
STATE_BYTES = 1 << 31
"""Bytes that the states of all rows may take together; a model with larger states is read in fewer rows."""
UNEVEN = 100_000
"""With more tokens of padding in a batch than this, fewer rows are read at a time."""
FEW = 8
SAVED = 2
"""A shared context is read only once if that saves at least this many windows: its continuations are then batched with
fewer others of similar length."""


class Score(NamedTuple):
    """log_likelihood: of a continuation after its context, summed over its tokens, in nats. greedy: whether each of its
    tokens is the likeliest. finite: False where the model's logits are not finite; the other two then mean nothing."""

    log_likelihood: float
    greedy: bool
    finite: bool


Request = tuple[np.ndarray, np.ndarray]
"""(a context, of at least one token, a continuation): int [tokens] each."""


class Scorer:
    """Scores continuations with a trained model."""

    def __init__(self, run: Run):
        self._params, self._vocab_size = run.params, run.tokenizer.vocab_size
        grain = granularity(run.config.model)
        self.window = WINDOW // grain * grain or grain
        self._graphdef, self._states = run.graphdef, RowStates(run.graphdef)
        one = jax.eval_shape(
            lambda params: self._states.empty(params, 1, run.config.data.sequence_length), self._params
        )
        state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(one))
        self.rows = min(ROWS, 1 << max(0, int(math.log2(STATE_BYTES / state_bytes))))
        self._copy = jax.jit(self._states.copy)
        self._read = jax.jit(self._read_window)

    def score(self, requests: Sequence[Request]) -> Iterator[tuple[int, Score]]:
        """Yield the number of every request with its score, in any order.

        A continuation without tokens is certain: 0 nats.
        """
        contexts: dict[bytes, list[int]] = {}
        for number, (context, _) in enumerate(requests):
            contexts.setdefault(np.asarray(context, np.int32).tobytes(), []).append(number)
        length = lambda number: sum(map(len, requests[number]))  # noqa: E731
        saved = lambda numbers: (len(numbers) - 1) * self._begins(requests[numbers[0]]) // self.window  # noqa: E731
        begun = [numbers for numbers in contexts.values() if saved(numbers) >= SAVED]
        alone = {number for numbers in contexts.values() for number in numbers} - {n for ns in begun for n in ns}
        for batch, rows in self._batches(sorted(alone, key=length, reverse=True), length):
            yield from self._continue(requests, batch, 0, rows, self._empty(rows, length(batch[0])))
        shared = sorted(begun, key=lambda numbers: len(requests[numbers[0]][0]), reverse=True)
        for start in range(0, len(shared), self.rows):
            yield from self._share(requests, shared[start : start + self.rows])

    def _begins(self, request: Request) -> int:
        """Tokens in the whole windows of a context without its last token, whose logits a continuation needs."""
        return (len(request[0]) - 1) // self.window * self.window

    def _batches(self, numbers: list[int], length: Any) -> Iterator[tuple[list[int], int]]:
        """Groups of the given requests, which are sorted by length, longest first, with the rows to read each in."""
        start, few = 0, min(FEW, self.rows)
        while start < len(numbers):
            batch, rows = numbers[start : start + self.rows], self.rows
            padding = len(batch) * length(batch[0]) - sum(map(length, batch))
            if len(numbers) <= few or padding > UNEVEN:
                batch, rows = batch[:few], few
            yield batch, rows
            start += len(batch)

    def _share(self, requests: Sequence[Request], contexts: list[list[int]]) -> Iterator[tuple[int, Score]]:
        """Read the beginnings of contexts, all as far as the shortest allows, and continue from copies of the state."""
        begin = min(self._begins(requests[numbers[0]]) for numbers in contexts)
        row_of = {number: row for row, numbers in enumerate(contexts) for number in numbers}
        longest = max(sum(map(len, requests[number])) for number in row_of)
        rows = self.rows if len(row_of) > FEW else min(FEW, self.rows)
        tokens = self._fill([requests[numbers[0]][0][:begin] for numbers in contexts], begin, rows)
        state = self._empty(rows, longest)
        for start in range(0, begin, self.window):
            piece = tokens[:, start : start + self.window]
            *_, state = self._read(self._params, state, piece, piece)
        ordered = sorted(row_of, key=lambda number: sum(map(len, requests[number])), reverse=True)
        for start in range(0, len(ordered), rows):
            batch = ordered[start : start + rows]
            copies = self._copy(self._params, state, np.resize([row_of[number] for number in batch], rows))
            yield from self._continue(requests, batch, begin, rows, copies)

    def _continue(
        self, requests: Sequence[Request], batch: list[int], begin: int, rows: int, state: Any
    ) -> Iterator[tuple[int, Score]]:
        """Score a batch of texts, of which `state`, with `rows` rows, has read the first `begin` tokens."""
        texts = [np.concatenate(requests[number]).astype(np.int32) for number in batch]
        starts, ends = ([len(requests[number][0]) for number in batch], [len(text) for text in texts])
        longest = max(ends)
        inputs, targets = (
            self._fill([text[cut] for text in texts], longest - begin, rows)
            for cut in (slice(begin, -1), slice(begin + 1, None))
        )
        found = []
        for start, size in self._pieces(longest - 1 - begin):
            cut = slice(start, start + size)
            nats, greedy, finite, state = self._read(self._params, state, inputs[:, cut], targets[:, cut])
            found.append((nats, greedy, finite))
        joined = [np.concatenate([np.asarray(part) for part in parts], axis=1) for parts in zip(*found, strict=True)]
        for row, (number, start, end) in enumerate(zip(batch, starts, ends, strict=True)):
            own = slice(start - 1 - begin, end - 1 - begin)
            nats, greedy, finite = (part[row, own] for part in joined) if joined else ((), (), ())
            yield number, Score(-float(np.sum(nats, dtype=np.float64)), bool(np.all(greedy)), bool(np.all(finite)))

    def _pieces(self, length: int) -> Iterator[tuple[int, int]]:
        """First token and size of the windows for `length` tokens; the last may be smaller where windows are large."""
        for start in range(0, length, self.window):
            size = self.window
            while size % 2 == 0 and size // 2 >= max(WINDOW, length - start):
                size //= 2
            yield start, size

    def _fill(self, texts: list[np.ndarray], length: int, rows: int) -> np.ndarray:
        """Texts side by side in whole windows for `length` tokens, int32 [rows, time], filled up with zeros."""
        filled = np.zeros((rows, -(-length // self.window) * self.window), np.int32)
        for row, text in zip(filled, texts, strict=False):
            row[: len(text)] = text
        return filled

    def _empty(self, rows: int, length: int) -> Any:
        # Only full attention and caching use the length; rounded, so that texts of similar length share a compilation.
        return self._states.empty(self._params, rows, -(-(length + self.window) // CACHE_MULTIPLE) * CACHE_MULTIPLE)

    def _read_window(self, params: Any, state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Any, ...]:
        """Cross entropy of the targets in nats (float32), whether each is the likeliest, and whether the logits are
        finite, [rows, time] each; and the next state."""
        logits, state = nnx.merge(self._graphdef, params).extend(tokens, state, closed=True)
        nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
        likeliest = jnp.argmax(logits[..., : self._vocab_size], axis=-1)
        found = sharding.replicate((nats, likeliest == targets, jnp.all(jnp.isfinite(logits), axis=-1)))
        return *found, self._states.spread(params, state)
