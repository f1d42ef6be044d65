"""Tasks of drawn sequences: a generator makes tokens, and asks for answers at some of their positions.

Training, validation and test sequences differ in their seed only. What is asked is a target of 0 or more.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from titans_jax import sharding
from titans_jax.config import ConfigError, ModelConfig
from titans_jax.data.recall import RecallTask, recall_sequences
from titans_jax.models.loss import Batch, cross_entropy_sum
from titans_jax.studies.models import one_graph
from titans_jax.studies.tasks import Numbers, Task
from titans_jax.training.fit import Selection

TEST_SEED, VALIDATION_SEED = 0, 1 << 62
"""Seeds of the sequences that all models are asked on; models and their training sequences have seeds 1, 2, ..."""

Sequences = dict[str, np.ndarray]
"""{"tokens", "targets"}, int32 [count, time]."""


@dataclass(frozen=True)
class Generated(Task):
    """Answers in drawn sequences. A subclass needs `sequence_length`, `vocabulary`, `draw` and `baseline`."""

    train_sequences: int = 0
    """Training sequences, read again and again in another order; 0 draws new ones for every step."""
    validation_sequences: int = 0
    """Sequences that the training is stopped by, and the learning rate chosen; 0 takes the last step."""
    test_sequences: int = 512
    """Unseen sequences asked about, the same for all models."""

    enough: ClassVar[float] = 0.99
    """The validation accuracy at which a training ends, as in Zoology."""
    score_number: ClassVar[str] = "accuracy"
    """What is compared on validation sequences."""

    @property
    def vocabulary(self) -> int:
        """Tokens there are."""
        raise NotImplementedError

    def draw(self, count: int, seed: int, asked: bool) -> Sequences:
        """`count` sequences; asked: with targets where answers are wanted, else where the model learns."""
        raise NotImplementedError

    def fit_to(self, model: ModelConfig) -> ModelConfig:
        """See `Task`."""
        return dataclasses.replace(model, vocab_size=self.vocabulary)

    def check(self, model: ModelConfig) -> None:
        """See `Task`."""
        super().check(model)
        for name, least in (("test_sequences", 1), ("validation_sequences", 0), ("train_sequences", 0)):
            count = getattr(self, name)
            if count < least:
                raise ConfigError(f"{name} is {count}; use at least {least}")
            if count % self.batch_size:
                works = -(-count // self.batch_size) * self.batch_size
                raise ConfigError(f"{name} is {count}; use a multiple of batch_size {self.batch_size}, such as {works}")
        self.draw(1, TEST_SEED, True)

    def batches(self, seed: int) -> Iterator[Batch]:
        """See `Task`. New sequences are drawn some steps at a time: a long training needs no memory for them."""
        done = 0
        for number in range(self.steps):
            if self.train_sequences:
                rows = _drawn(self, self.train_sequences, seed, False)
                order = np.random.default_rng((seed, number)).permutation(self.train_sequences)
                rows = {name: values[order] for name, values in rows.items()}
            else:
                count = min(256, self.steps - done) * self.batch_size
                rows = self.draw(count, seed + (number << 32), False)
            for batch in self.cut(rows):
                if done == self.steps:
                    return
                done += 1
                yield batch

    def cut(self, sequences: Sequences) -> Iterator[Batch]:
        """The sequences, `batch_size` at a time, each a document of its own."""
        for first in range(0, len(sequences["tokens"]), self.batch_size):
            batch = {name: rows[first : first + self.batch_size] for name, rows in sequences.items()}
            yield batch | {"segment_ids": None}

    def selection(self) -> Selection | None:
        """See `Task`: once an epoch, or 20 times where there are none."""
        if not self.validation_sequences:
            return None

        def score(graphdef: nnx.GraphDef, params: Any) -> float:
            return self.ask(graphdef, params, self.held_out(VALIDATION_SEED)).numbers[self.score_number]

        every = self.train_sequences // self.batch_size or max(self.steps // 20, 1)
        return Selection(score, min(every, self.steps), enough=self.enough)

    def held_out(self, seed: int) -> Sequences:
        """The sequences of `TEST_SEED` or of `VALIDATION_SEED`, drawn once for all models."""
        count = self.test_sequences if seed == TEST_SEED else self.validation_sequences
        return _drawn(self, count, seed, True)

    def ask(self, graphdef: nnx.GraphDef, params: Any, sequences: Sequences) -> Answers:
        """What a model answers."""
        step, totals = make_answer_step(graphdef), []
        for batch in self.cut(sequences):
            totals.append(step(params, sharding.spread(batch, None)[0]))
        return Answers(
            *(np.sum(np.array(part, np.float64), axis=0) for part in zip(*jax.device_get(totals), strict=True))
        )

    def measure(self, graphdef: nnx.GraphDef, params: Any) -> Numbers:
        """The numbers of `Answers` on test sequences, and "validation" where there are such sequences."""
        numbers = self.ask(graphdef, params, self.held_out(TEST_SEED)).numbers
        if self.validation_sequences:
            asked = self.ask(graphdef, params, self.held_out(VALIDATION_SEED)).numbers
            numbers["validation"] = asked[self.score_number]
        return numbers


class Answers(NamedTuple):
    """Sums over asked sequences: nats of the answers; by class how often it was right, asked for and answered; answers
    before a sequence's first mistake; and sequences without a mistake, of how many."""

    nats: float
    right: np.ndarray
    asked: np.ndarray
    answered: np.ndarray
    before_mistake: float
    whole: float
    sequences: float

    @property
    def numbers(self) -> Numbers:
        """accuracy: share of answers that are right. macro_accuracy: the mean of the classes' own, a class that is
        answered but never asked for counting 0 (as torchmetrics has it). cumulative_accuracy: share of answers before
        the first mistake of their sequence, the mean over its beginnings of how many have none (DeltaProduct).
        sequence_accuracy: share of sequences without a mistake. loss: mean cross entropy, nats."""
        count, seen = self.asked.sum(), (self.asked + self.answered) > 0
        macro = np.sum(self.right / np.maximum(self.asked, 1)) / seen.sum()
        numbers = {"accuracy": self.right.sum() / count, "macro_accuracy": macro}
        numbers |= {"cumulative_accuracy": self.before_mistake / count}
        numbers |= {"sequence_accuracy": self.whole / self.sequences, "loss": self.nats / count}
        return {name: float(value) for name, value in numbers.items()}


@one_graph
def make_answer_step(graphdef: nnx.GraphDef) -> Callable[[Any, Batch], tuple[jax.Array, ...]]:
    """Compiled (params, batch) -> the fields of `Answers`."""

    @jax.jit
    def answer_step(params, batch):
        logits, targets = nnx.merge(graphdef, params)(batch["tokens"], batch["segment_ids"]), batch["targets"]
        nats, _ = cross_entropy_sum(logits, targets)
        answers, asked = jnp.argmax(logits, axis=-1), targets >= 0
        right = asked & (answers == targets)
        by_class = functools.partial(jnp.bincount, length=logits.shape[-1])
        # What is not asked is counted past the last class, which is dropped.
        counts = [
            by_class(jnp.where(where, values, logits.shape[-1]).ravel())
            for where, values in ((right, targets), (asked, targets), (asked, answers))
        ]
        unbroken = jnp.cumprod(right | ~asked, axis=-1).astype(bool)
        return nats, *counts, jnp.sum(unbroken & asked), jnp.sum(unbroken[:, -1]), len(targets)

    return answer_step


@functools.lru_cache(maxsize=4)
def _drawn(task: Generated, count: int, seed: int, asked: bool) -> Sequences:
    return task.draw(count, seed, asked)


@dataclass(frozen=True)
class Recall(Generated):
    """Multi-query associative recall: which value came with a key, asked on unseen sequences."""

    name: ClassVar[str] = "recall"

    num_pairs: int = 4
    """Key-value pairs of a sequence."""
    length: int = 32
    """Tokens of a sequence."""
    vocab_size: int = 64
    """Tokens: half of them keys, half values; Zoology has more of them than length."""
    random_fill: bool = False
    """Random tokens between the queries, in place of blanks."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a training row."""
        return self.length

    @property
    def vocabulary(self) -> int:
        """See `Generated`."""
        return self.vocab_size

    @property
    def sequences(self) -> RecallTask:
        """What sequences look like."""
        return RecallTask(self.num_pairs, self.length, self.vocab_size, random_fill=self.random_fill)

    def draw(self, count: int, seed: int, asked: bool) -> Sequences:
        """See `Generated`; learned is what is asked."""
        return recall_sequences(self.sequences, count, seed)

    def baseline(self) -> tuple[str, Numbers]:
        """See `Task`."""
        chance = 1 / self.num_pairs
        return f"one of {self.num_pairs} values at random", {"accuracy": chance, "loss": -math.log(chance)}
