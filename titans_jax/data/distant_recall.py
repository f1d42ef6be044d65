"""Recall over a distance: pairs of a key and a value among random tokens, all asked at the end of the sequence.

    tokens    n n k1 v1 n n n n k2 v2 n ... n | k2 k1        n: any of the tokens that are neither key nor value
    targets   .  .  .  .  .  .  .  .  .  .  .  . | v2 v1     . is -1: not predicted

The number of pairs does not depend on the length, so that a longer sequence asks for the same number of facts over a
greater distance. The noisy recall of MAD (arXiv 2403.17844) is similar, but asks throughout the sequence.
"""

from dataclasses import dataclass

import numpy as np

from titans_jax.data.errors import DataError
from titans_jax.data.recall import choose


@dataclass(frozen=True)
class DistantRecall:
    """The sequences of one length.

    Token ids are, in this order, noise_size noise tokens, pool_size keys and pool_size values. Within a sequence all
    keys differ, and so do all values.

    Raises:
      DataError: no such sequence has these sizes.
    """

    num_pairs: int
    """Key-value pairs of a sequence, at random places; each is asked for once, in random order."""
    sequence_length: int
    """Tokens of a sequence, at least three per pair."""
    pool_size: int
    """How many tokens are keys, and how many others are values."""
    noise_size: int
    """How many tokens are neither keys nor values."""

    def __post_init__(self) -> None:
        for name, least in (("num_pairs", 1), ("noise_size", 1), ("pool_size", self.num_pairs)):
            if getattr(self, name) < least:
                raise DataError(f"{name} is {getattr(self, name)}; use at least {least}")
        if self.sequence_length < 3 * self.num_pairs:
            raise DataError(
                f"sequence_length is {self.sequence_length}; use at least {3 * self.num_pairs}: a key, a value and a "
                f"query for each of num_pairs {self.num_pairs}"
            )

    @property
    def vocab_size(self) -> int:
        """Tokens in all."""
        return self.noise_size + 2 * self.pool_size


def distant_recall_sequences(task: DistantRecall, count: int, seed: int) -> dict[str, np.ndarray]:
    """`count` sequences of the task; the same seed gives the same ones, another seed others.

    Returns:
      {"tokens", "targets"}, int32 [count, sequence_length]. The target at a query is its value, elsewhere -1.
    """
    generator, pairs = np.random.default_rng(seed), task.num_pairs
    context = task.sequence_length - pairs
    tokens = generator.integers(task.noise_size, size=(count, task.sequence_length), dtype=np.int32)
    targets = np.full(tokens.shape, -1, np.int32)
    keys, values = (choose(generator, np.zeros(task.pool_size), count, pairs) + task.noise_size for _ in range(2))
    values += task.pool_size
    # Pairs must not overlap: their places are different sorted numbers, with i added to the i-th.
    places = np.sort(choose(generator, np.zeros(context - pairs), count, pairs), axis=1) + np.arange(pairs)
    np.put_along_axis(tokens, places, keys, axis=1)
    np.put_along_axis(tokens, places + 1, values, axis=1)
    order = choose(generator, np.zeros(pairs), count, pairs)
    tokens[:, context:] = np.take_along_axis(keys, order, axis=1)
    targets[:, context:] = np.take_along_axis(values, order, axis=1)
    return {"tokens": tokens, "targets": targets}
