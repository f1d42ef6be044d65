"""The tasks of studies: the interface `Task`, and language; `generated` has the tasks with generated sequences.

The fields of a task are command-line options too, with their types, defaults and help.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx

from titans_jax import data, sharding
from titans_jax.config import Config, ConfigError, DataConfig, ModelConfig, OptimizerConfig
from titans_jax.config.validate import validate
from titans_jax.data.pipeline import Share
from titans_jax.evaluation.perplexity import EvaluationStep, count_bytes, evaluate, make_evaluation_step
from titans_jax.evaluation.positions import LongReader, bucket_ends
from titans_jax.models import without_writes
from titans_jax.models.loss import Batch
from titans_jax.studies.models import one_graph
from titans_jax.training.fit import Selection
from titans_jax.training.run import check_train_only, check_vocabulary

Numbers = dict[str, Any]
"""Numbers, or lists of them, by name."""


@dataclass(frozen=True)
class Task:
    """A task to train a model on and to measure it by. A subclass implements the methods below."""

    name: ClassVar[str]
    """The name of the task in results and messages."""

    steps: int = 800
    """Training steps."""
    batch_size: int = 16
    """Sequences of a step."""
    learning_rate: float = 3e-3
    """Peak of the cosine schedule, after a linear warm-up in a tenth of the steps."""

    @property
    def optimizer(self) -> OptimizerConfig:
        """AdamW with the cosine schedule."""
        return OptimizerConfig(learning_rate=self.learning_rate, warmup_steps=self.steps // 10)

    @property
    def sequence_length(self) -> int:
        """Tokens of a training row."""
        raise NotImplementedError

    def fit_to(self, model: ModelConfig) -> ModelConfig:
        """The model with the vocabulary of the task."""
        raise NotImplementedError

    def check(self, model: ModelConfig) -> None:
        """Refuse settings that cannot work, before anything runs.

        Raises:
          ConfigError, DataError: one sentence with the field, its value and what would work.
        """
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; use at least 1")
        config = Config(model=self.fit_to(model), optimizer=self.optimizer)
        validate(config)
        check_train_only(config)

    def fingerprint(self) -> str:
        """Hexadecimal digits that change with the data that the task reads; "" for one that draws its own."""
        return ""

    @property
    def tokens_before(self) -> int:
        """Tokens that `start` has trained a model on."""
        return 0

    def batches(self, seed: int) -> Iterator[Batch]:
        """The training batches of a model with this seed, at least `steps` of them."""
        raise NotImplementedError

    def start(self, model: ModelConfig, seed: int) -> Any:
        """The parameters that the training of a model starts from, by path; None: random ones."""
        return None

    def selection(self) -> Selection | None:
        """How validation data chooses the parameters to measure; None: those of the last step."""
        return None

    def trainings(self) -> list[Task]:
        """The tasks that a model is trained on in turn, each from the parameters chosen by the previous one."""
        return [self]

    def measure(self, graphdef: nnx.GraphDef, params: Any) -> Numbers:
        """The measured numbers of a trained model, by name."""
        raise NotImplementedError

    def baseline(self) -> tuple[str, Numbers]:
        """A result that needs no model: its description, and its numbers by the names of `measure`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Language(Task):
    """Next tokens of real text: bits per byte on held-out documents, and loss by position far beyond the rows.

    The long texts are stretches of the held-out documents in sequence, which begin and end anywhere in a document.
    `titans evaluate RUN positions` reads each document from its first token instead.
    """

    name: ClassVar[str] = "language"

    steps: int = 1500
    """Training steps."""
    batch_size: int = 8
    """Rows of a step; replaces data.batch_size."""
    data: DataConfig = field(default_factory=lambda: DataConfig(packing="stream", sequence_length=512))
    """The text and its rows."""
    evaluation_batches: int = 16
    """Held-out batches read."""
    same_text: bool = False
    """Whether each held-out batch is one stretch of text, cut into rows, so that rows of any length are of the same
    text; else its rows are drawn one by one."""
    positions: int = 32768
    """Tokens of each stretch of held-out text for the loss by position, a multiple of data.sequence_length; 0: loss by
    position is not measured."""
    positions_rows: int = 4
    """The number of these stretches."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a training row."""
        return self.data.sequence_length

    def fit_to(self, model: ModelConfig) -> ModelConfig:
        """See `Task`."""
        vocabulary = data.load_tokenizer(self.data.tokenizer).vocab_size
        return dataclasses.replace(model, vocab_size=-(-vocabulary // 64) * 64)

    def check(self, model: ModelConfig) -> None:
        """See `Task`."""
        super().check(model)
        if self.data.source == "tokens" or self.data.mixture:
            field = "data.mixture" if self.data.mixture else "data.source"
            value = self.data.mixture or self.data.source
            raise ConfigError(f"{field} is {value!r}; use a text, which studies cut into rows of their own")
        if self.data.packing != "stream":
            raise ConfigError(f"data.packing is {self.data.packing!r}; use stream, which fits the chunks of any memory")
        config = Config(model=self.fit_to(model), data=self._data(self.sequence_length))
        validate(config)
        check_vocabulary(config, data.load_tokenizer(self.data.tokenizer))
        if self.evaluation_batches < 1:
            raise ConfigError(f"evaluation_batches is {self.evaluation_batches}; use at least 1")
        for split in ("train", "validation"):
            self._corpus(split)  # refuses one without text
        rows = len(self._rows("train", self.sequence_length))
        if rows < self.batch_size:
            raise ConfigError(
                f"batch_size is {self.batch_size}; use at most {rows}, the rows of {self.sequence_length} tokens that "
                "the training text has"
            )
        if self.positions < 0 or self.positions % self.sequence_length:
            raise ConfigError(
                f"positions is {self.positions}; use 0 or a multiple of data.sequence_length {self.sequence_length}"
            )
        if self.positions:
            whole = len(self._long_texts()) if self.positions_rows > 0 else 0
            if whole < max(self.positions_rows, 1):
                raise ConfigError(
                    f"positions_rows is {self.positions_rows}; use 1 to {len(self._long_texts(None))}, as many as "
                    f"the held-out text has rows of positions {self.positions}"
                )

    def fingerprint(self) -> str:
        """See `Task`."""
        return _fingerprint(self.data)

    def batches(self, seed: int) -> Iterator[Batch]:
        """See `Task`. Every seed has its own order of rows."""
        rows, statistics = self._rows("train", self.sequence_length), self._statistics("train", self.sequence_length)
        batches = data.TrainBatches(rows, statistics, Share(self.batch_size, 0, 1), seed=seed)
        try:
            yield from batches
        finally:
            batches.close()

    def measure(self, graphdef: nnx.GraphDef, params: Any) -> Numbers:
        """bits_per_byte and word_perplexity of held-out text; for a model with memory also memory_gain, the increase in
        bits per byte if the memories are never written; and where `positions` is not 0, by bucket of positions in
        stretches of the held-out text:

        ends: where the buckets end. carried, fresh: mean loss of each bucket, nats per token, with the state carried
        from row to row, or emptied before every row. last_over_best, last_over_fresh: the last bucket's carried loss
        over the carried loss of the best bucket, and over its own fresh loss.
        """
        tokenizer, step = data.load_tokenizer(self.data.tokenizer), _evaluation_step(graphdef)
        batches = (sharding.spread(batch, None)[0] for batch in self._held_out())
        numbers = self._by_word(evaluate(step, params, batches, tokenizer).bits_per_byte)
        if unwritten := _unwritten_step(graphdef):
            batches = (sharding.spread(batch, None)[0] for batch in self._held_out())
            never_written = evaluate(unwritten, params, batches, tokenizer).bits_per_byte
            numbers["memory_gain"] = never_written - numbers["bits_per_byte"]
        if not self.positions:
            return numbers
        rows, params = self._long_texts(), jax.device_put(params, jax.local_devices()[0])
        buckets = list(bucket_ends(self.positions, self.sequence_length))
        ends = [last + 1 for _, last in buckets]

        def means(fresh: bool) -> list[float]:
            nats = _long_reader(graphdef).loss_by_position(params, rows, self.sequence_length, fresh=fresh)
            return [float(np.mean(nats[first : last + 1])) / len(rows) for first, last in buckets]

        carried, fresh = means(fresh=False), means(fresh=True)
        ratios = {"last_over_best": carried[-1] / min(carried), "last_over_fresh": carried[-1] / fresh[-1]}
        return numbers | {"ends": ends, "carried": carried, "fresh": fresh} | ratios

    def baseline(self) -> tuple[str, Numbers]:
        """See `Task`: predictions by the frequency of each token in the training text, without any context."""
        size = data.load_tokenizer(self.data.tokenizer).vocab_size
        counts = np.bincount(self._corpus("train").tokens, minlength=size) + 1.0
        batches = list(self._held_out())
        tokens, targets = (np.concatenate([batch[name] for batch in batches]) for name in ("tokens", "targets"))
        bits = -np.log2(counts / counts.sum())[targets[targets >= 0]].sum()
        num_bytes = count_bytes(tokens, targets, data.load_tokenizer(self.data.tokenizer))
        words = f"frequencies of single tokens, {data.describe_source(self.data)}"
        return words, self._by_word(float(bits / num_bytes))

    def _by_word(self, bits_per_byte: float) -> Numbers:
        """bits_per_byte, and word_perplexity: 2 to the mean bits per word, which count the blanks between words too;
        not of words of 1,000 bits or more."""
        bits = bits_per_byte * _bytes_per_word(self)
        # Text without blanks, such as Chinese, is one word of more bits than a number has room for.
        return {"bits_per_byte": bits_per_byte} | ({"word_perplexity": 2.0**bits} if bits < 1000 else {})

    def _data(self, sequence_length: int) -> DataConfig:
        return dataclasses.replace(self.data, sequence_length=sequence_length, batch_size=self.batch_size)

    def _corpus(self, split: data.Split) -> data.Corpus:
        return _corpus(self.data, split)

    def _rows(self, split: data.Split, sequence_length: int) -> data.Rows:
        return data.pack(self._corpus(split), sequence_length=sequence_length, packing=self.data.packing)

    def _statistics(self, split: data.Split, sequence_length: int) -> data.Statistics:
        return data.Statistics.count(self._corpus(split), self._rows(split, sequence_length))

    def _held_out(self) -> Iterator[Batch]:
        """The first `evaluation_batches` held-out batches, in an order that is always the same."""
        shape = self.batch_size, self.sequence_length
        rows, length = (1, math.prod(shape)) if self.same_text else shape
        every = data.ValidationBatches(
            self._rows("validation", length), self._statistics("validation", length), Share(rows, 0, 1)
        )
        for batch in itertools.islice(every, self.evaluation_batches):
            yield {name: values.reshape(shape) for name, values in batch.items()}

    def _long_texts(self, count: int | None = -1) -> np.ndarray:
        """`count` whole stretches of the held-out text (-1: positions_rows, None: all), which may begin anywhere in a
        document, int32 [count, positions + 1]."""
        corpus = self._corpus("validation").tokens
        whole = (len(corpus) - 1) // self.positions
        order = np.random.default_rng(0).permutation(whole)[: self.positions_rows if count == -1 else count]
        return corpus[order[:, None] * self.positions + np.arange(self.positions + 1)].astype(np.int32)


_evaluation_step = one_graph(make_evaluation_step)
_long_reader = one_graph(LongReader)


@one_graph
def _unwritten_step(graphdef: nnx.GraphDef) -> EvaluationStep | None:
    """The step of the model whose memories are never written; None for a model without memory."""
    unwritten = without_writes(graphdef)
    return None if unwritten == graphdef else make_evaluation_step(unwritten)


@functools.lru_cache(maxsize=4)
def _bytes_per_word(task: Language) -> float:
    """Bytes per word in the held-out batches that a task reads; counted are words between blanks that begin in them."""
    tokenizer = data.load_tokenizer(task.data.tokenizer)
    num_bytes = words = 0
    for batch in task._held_out():
        num_bytes += count_bytes(batch["tokens"], batch["targets"], tokenizer)
        for tokens, targets in zip(batch["tokens"], batch["targets"], strict=True):
            words += _words_begun(tokens[0], targets[targets >= 0], tokenizer)
    return num_bytes / max(words, 1)


def _words_begun(before: int, targets: np.ndarray, tokenizer: data.Tokenizer) -> int:
    """The number of words between blanks that begin in `targets`, int [tokens], which follow the token `before`."""
    row = np.concatenate([[before], targets])
    documents = np.split(row, np.flatnonzero(row == tokenizer.eos_id))
    count = lambda ids: len(tokenizer.decode(ids).split())  # noqa: E731
    return sum(map(count, documents)) - count(row[:1])


@functools.lru_cache(maxsize=4)
def _corpus(config: DataConfig, split: data.Split) -> data.Corpus:
    """The tokens of a split, read once for all models.

    Raises:
      DataError: there is no text.
    """
    corpus = data.tokenize(
        data.open_documents(config, split), data.load_tokenizer(config.tokenizer), show_progress=False
    )
    data.require_text(corpus.num_bytes, split, config)
    return corpus


@functools.lru_cache(maxsize=64)
def _fingerprint(config: DataConfig) -> str:
    """The fingerprints of both splits."""
    return " ".join(_corpus(config, split).fingerprint() for split in ("train", "validation"))
