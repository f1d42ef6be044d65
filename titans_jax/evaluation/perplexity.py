"""Loss, bits per byte and perplexity of a language model over held-out batches."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from titans_jax import data
from titans_jax.data import ByteTokenizer, Tokenizer
from titans_jax.evaluation.evaluators import EvaluationError, EvaluationOptions, Numbers, register_evaluator
from titans_jax.inference.generate import CAUSE
from titans_jax.models import granularity
from titans_jax.models.loss import Batch, cross_entropy_sum

if TYPE_CHECKING:
    from titans_jax.training import Run

EvaluationStep = Callable[[Any, Batch], tuple[jax.Array, jax.Array, dict[str, jax.Array]]]


@dataclass(frozen=True)
class Evaluation:
    """Totals over the predicted targets of some batches."""

    nats: float
    """Summed cross entropy."""
    tokens: int
    """Predicted targets."""
    bytes: int
    """Bytes of text that these targets stand for; the ends of documents are predicted too but stand for none."""

    @property
    def loss(self) -> float:
        """Mean cross entropy, nats per token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits to encode one byte of the text: comparable between tokenizers."""
        return self.nats / self.bytes / math.log(2)

    @property
    def perplexity(self) -> float:
        """See `perplexity_of`."""
        return perplexity_of(self.loss)


def perplexity_of(loss: float) -> float:
    """exp(loss), per token, of a loss in nats per token: infinite beyond the float range, NaN of NaN."""
    return math.inf if loss > 700 else math.exp(loss)


def evaluate(
    evaluation_step: EvaluationStep,
    params: Any,
    batches: Iterable[Batch],
    tokenizer: Tokenizer,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Run `make_evaluation_step`'s function over the batches; None if `stop()` became true on the way.

    Raises:
      EvaluationError: the batches hold no target.
    """
    nats, tokens, num_bytes = 0.0, 0, 0
    for batch in batches:
        if stop():
            return None
        batch_nats, batch_tokens, _ = evaluation_step(params, batch)
        nats, tokens = nats + float(batch_nats), tokens + int(batch_tokens)
        rows = batch["tokens"], batch["targets"]
        if isinstance(rows[1], jax.Array):  # spread over processes, each of which reads a part
            rows = multihost_utils.process_allgather(rows, tiled=True)
        num_bytes += count_bytes(*rows, tokenizer)
    if tokens == 0 or num_bytes == 0:
        raise EvaluationError(
            "the validation data holds no text to predict; use a smaller data.validation_every, or more data"
        )
    return Evaluation(nats, tokens, num_bytes)


def evaluate_run(run: "Run", batches: int | None = None) -> Evaluation:
    """A trained model on the first `batches` validation batches of its data, or on all.

    Raises:
      EvaluationError: the batches hold no text.
    """
    align = granularity(run.config.model)
    validation = data.validation_batches(run.config.data, run.tokenizer, align=align)
    step = make_evaluation_step(run.graphdef)
    return evaluate(step, run.params, itertools.islice(validation, batches), run.tokenizer)


@register_evaluator()
def perplexity(run: "Run", options: EvaluationOptions) -> Numbers:
    """Loss, bits per byte and perplexity of a run on the held-out documents of its data.

    Every row starts with an empty state, so memory "fresh" is the same as "on".

    Raises:
      EvaluationError: the batches hold no text, or the loss is not finite.
    """
    result = evaluate_run(run, options.batches)
    if not math.isfinite(result.loss):
        raise EvaluationError(f"the model's logits on the held-out documents are not finite; {CAUSE}")
    return {
        "loss": result.loss,
        "bits_per_byte": result.bits_per_byte,
        "perplexity": result.perplexity,
        "tokens": result.tokens,
        "bytes": result.bytes,
    }


def make_evaluation_step(graphdef: nnx.GraphDef) -> EvaluationStep:
    """Compiled (params, batch) -> (summed nats, predicted targets, diagnostics).

    The diagnostics are those of `LanguageModel.__call__`, float32 [memory layers] each; none without a memory.
    """
    return jax.jit(functools.partial(_evaluation_step, graphdef))


def _evaluation_step(graphdef: nnx.GraphDef, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array, dict]:
    model = nnx.merge(graphdef, params)
    logits, diagnostics = model(batch["tokens"], batch["segment_ids"], return_diagnostics=True)
    return *cross_entropy_sum(logits, batch["targets"]), diagnostics


def count_bytes(tokens: np.ndarray, targets: np.ndarray, tokenizer: Tokenizer) -> int:
    """Bytes of UTF-8 text that targets [rows, time] stand for, each of which follows the token at its place.

    With a SentencePiece model a character cut by the end of a row may count for replacement characters.
    """
    tokens, targets = np.asarray(tokens), np.asarray(targets)
    if isinstance(tokenizer, ByteTokenizer):
        return int(np.sum((targets >= 0) & (targets < 256)))
    size, total = lambda ids: len(tokenizer.decode(ids).encode()), 0
    for read, wanted in ((read[row >= 0], row[row >= 0]) for read, row in zip(tokens, targets, strict=True)):
        # A stretch begins with a document, or where another was cut. SentencePiece leaves out the blank that a decoded
        # text begins with, so a stretch is decoded with the token before it, which does not count.
        starts = np.flatnonzero((read[1:] != wanted[:-1]) | (read[1:] == tokenizer.eos_id)) + 1
        for before, stretch in zip(np.split(read, starts), np.split(wanted, starts), strict=True):
            total += size(np.concatenate([before[:1], stretch])) - size(before[:1])
    return total
