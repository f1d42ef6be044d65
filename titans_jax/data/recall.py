"""Multi-query associative recall (MQAR): keys and values are shown, then every key is asked for its value.

    tokens    7 41  3 58  9 33 | 3  0  0  0  7  0  0  0  9  0        three pairs, then queries, 0 between them
    targets   .  .  .  .  .  . | 58 .  .  .  41 .  .  .  33 .        . is -1: not predicted

The protocol of Zoology (Arora et al., arXiv 2312.04927, 4.1 and appendix C), with blank tokens between the queries as
in its Figure 2. To answer all queries a model must have kept every pair; its state size limits how many it can keep.
"""

from dataclasses import dataclass

import numpy as np

from titans_jax.data.errors import DataError

BLANK = 0
"""The token between queries; neither a key nor a value."""


@dataclass(frozen=True)
class RecallTask:
    """The sequences of one task.

    Keys are tokens 1 to vocab_size // 2 - 1, values those from vocab_size // 2 on; within a sequence all keys differ,
    and so do all values. Queries come only after the last pair, at every second token: the query of a pair is in slot
    g = 0, 1, ... with a probability proportional to (g + 1)^(power - 1), each slot taken once.

    Raises:
      DataError: no such sequence has these sizes.
    """

    num_pairs: int
    """Key-value pairs of a sequence; each is asked for once."""
    sequence_length: int
    """Tokens of a sequence, an even number, at least four per pair."""
    vocab_size: int
    """Tokens in all: the blank, keys and values. Zoology uses more tokens than sequence_length; the least is two per
    pair and two others."""
    power: float = 0.01
    """Exponent of the power law, as Zoology counts it: near 0 queries crowd behind the pairs, 1 spreads them evenly."""
    random_fill: bool = False
    """Random tokens, keys and values among them, in place of the blanks: a harder task, not that of Figure 2."""

    def __post_init__(self) -> None:
        if self.num_pairs < 1:
            raise DataError(f"num_pairs is {self.num_pairs}; use at least 1")
        if self.sequence_length < 4 * self.num_pairs:
            raise DataError(
                f"sequence_length is {self.sequence_length}; use at least {4 * self.num_pairs}: a key, a value, a "
                f"query and its answer's place for each of num_pairs {self.num_pairs}"
            )
        if self.sequence_length % 2:
            raise DataError(
                f"sequence_length is {self.sequence_length}; use an even number, such as {self.sequence_length + 1}"
            )
        if self.vocab_size < 2 * self.num_pairs + 2:
            raise DataError(
                f"vocab_size is {self.vocab_size}; use at least {2 * self.num_pairs + 2}, so that each half has other "
                f"tokens than the blank for num_pairs {self.num_pairs}"
            )
        if not 0 < self.power < float("inf"):
            raise DataError(f"power is {self.power}; use a positive number, such as 0.01")

    @property
    def keys(self) -> range:
        """Tokens that are keys."""
        return range(1, self.vocab_size // 2)

    @property
    def values(self) -> range:
        """Tokens that are values."""
        return range(self.vocab_size // 2, self.vocab_size)


def recall_sequences(task: RecallTask, count: int, seed: int) -> dict[str, np.ndarray]:
    """`count` sequences of the task; the same seed gives the same ones, another seed others.

    Returns:
      {"tokens", "targets"}, int32 [count, sequence_length]. The target at a query is its value, elsewhere -1.
    """
    generator = np.random.default_rng(seed)
    pairs, context = task.num_pairs, 2 * task.num_pairs
    keys = choose(generator, np.zeros(len(task.keys)), count, pairs) + task.keys.start
    values = choose(generator, np.zeros(len(task.values)), count, pairs) + task.values.start
    slots = np.arange((task.sequence_length - context) // 2)
    queries = context + 2 * choose(generator, (task.power - 1) * np.log(slots + 1), count, pairs)

    shape = (count, task.sequence_length)
    tokens = np.full(shape, BLANK, np.int32)
    if task.random_fill:
        tokens = generator.integers(task.vocab_size, size=shape, dtype=np.int32)
    targets = np.full(shape, -1, np.int32)
    tokens[:, 0:context:2] = keys
    tokens[:, 1:context:2] = values
    np.put_along_axis(tokens, queries, keys, axis=1)
    np.put_along_axis(targets, queries, values, axis=1)
    return {"tokens": tokens, "targets": targets}


def choose(generator: np.random.Generator, log_weights: np.ndarray, count: int, size: int) -> np.ndarray:
    """`count` draws of `size` indices, by weight and without replacement, in the order drawn: int32 [count, size].

    The indices of the largest log weights after adding Gumbel noise are such a draw.
    """
    noisy = log_weights + generator.gumbel(size=(count, len(log_weights)))
    return np.argsort(-noisy, axis=1)[:, :size].astype(np.int32)
