"""Tasks with generated sequences: a generator draws tokens, and asks for answers at some of their positions.

Training, validation and test sequences differ in their seed only. A position with a target of 0 or more is asked.
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
    """Answers in generated sequences. A subclass needs `sequence_length`, `vocabulary`, `draw` and `baseline`."""

    train_sequences: int = 0
    """Training sequences, repeated in a new order every epoch; 0 draws new sequences for every step."""
    validation_sequences: int = 0
    """Sequences for early stopping and to choose the learning rate; 0 takes the parameters of the last step."""
    test_sequences: int = 512
    """Unseen test sequences, the same for all models."""

    enough: ClassVar[float] = 0.99
    """The validation accuracy at which a training ends, as in Zoology."""
    score_number: ClassVar[str] = "accuracy"
    """The number of `measure` that is compared on validation sequences."""

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary, in tokens."""
        raise NotImplementedError

    def draw(self, count: int, seed: int, asked: bool) -> Sequences:
        """`count` sequences; asked: True for targets where answers are wanted, False for the targets of training."""
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
        """See `Task`. New sequences are drawn for some steps at a time, so that a long training needs little memory."""
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
        """See `Task`: validation once an epoch, or 20 times where sequences are new and there are no epochs."""
        if not self.validation_sequences:
            return None

        def score(graphdef: nnx.GraphDef, params: Any) -> float:
            return self.answered(graphdef, params, self.held_out(VALIDATION_SEED))[self.score_number]

        every = self.train_sequences // self.batch_size or max(self.steps // 20, 1)
        return Selection(score, min(every, self.steps), enough=self.enough)

    def held_out(self, seed: int) -> Sequences:
        """The sequences of `TEST_SEED` or of `VALIDATION_SEED`, drawn once for all models."""
        count = self.test_sequences if seed == TEST_SEED else self.validation_sequences
        return _drawn(self, count, seed, True)

    def ask(self, graphdef: nnx.GraphDef, params: Any, sequences: Sequences) -> Answers:
        """The answers of a model, counted."""
        step, totals = make_answer_step(graphdef), []
        for batch in self.cut(sequences):
            totals.append(step(params, sharding.spread(batch, None)[0]))
        return Answers(
            *(np.sum(np.array(part, np.float64), axis=0) for part in zip(*jax.device_get(totals), strict=True))
        )

    def answered(self, graphdef: nnx.GraphDef, params: Any, sequences: Sequences) -> Numbers:
        """The numbers of `Answers`, of a model on sequences."""
        return self.ask(graphdef, params, sequences).numbers

    def measure(self, graphdef: nnx.GraphDef, params: Any) -> Numbers:
        """The numbers of `Answers` on test sequences, and "validation" where there are such sequences."""
        numbers = self.answered(graphdef, params, self.held_out(TEST_SEED))
        if self.validation_sequences:
            asked = self.answered(graphdef, params, self.held_out(VALIDATION_SEED))
            numbers["validation"] = asked[self.score_number]
        return numbers


class Answers(NamedTuple):
    """Sums over test sequences: nats of the answers; for each class, how often it was answered rightly, asked for and
    answered; answers before a sequence's first mistake; sequences without a mistake; and all sequences."""

    nats: float
    right: np.ndarray
    asked: np.ndarray
    answered: np.ndarray
    before_mistake: float
    whole: float
    sequences: float

    @property
    def numbers(self) -> Numbers:
        """accuracy: share of answers that are right. macro_accuracy: the mean of the classes' accuracies, where a class
        that is answered but never asked for counts 0 (as in torchmetrics). cumulative_accuracy: share of answers before
        the first mistake of their sequence, which is the share of prefixes without a mistake (DeltaProduct).
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
        # Positions that are not asked are counted in an extra class past the last, which bincount drops.
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
    """Multi-query associative recall: the value that came with a key, asked for on unseen sequences."""

    name: ClassVar[str] = "recall"

    num_pairs: int = 4
    """Key-value pairs of a sequence."""
    length: int = 32
    """Tokens of a sequence."""
    vocab_size: int = 64
    """Tokens: half of them keys, half values; in Zoology there are more than `length`."""
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
        """The settings of the sequences."""
        return RecallTask(self.num_pairs, self.length, self.vocab_size, random_fill=self.random_fill)

    def draw(self, count: int, seed: int, asked: bool) -> Sequences:
        """See `Generated`; training and test have the same targets."""
        return recall_sequences(self.sequences, count, seed)

    def baseline(self) -> tuple[str, Numbers]:
        """See `Task`."""
        chance = 1 / self.num_pairs
        return f"one of {self.num_pairs} values at random", {"accuracy": chance, "loss": -math.log(chance)}
