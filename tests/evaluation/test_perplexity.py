"""Perplexity of a run: what losses are worth as perplexities, and logits that are not finite."""

import math

import numpy as np
import pytest

from tests.evaluation.test_harness import DATA, needs
from tests.evaluation.test_positions import broken_run
from titans_jax import data
from titans_jax.evaluation import EvaluationError, EvaluationOptions, evaluate_run
from titans_jax.evaluation.perplexity import count_bytes, perplexity, perplexity_of

MISTRAL = "tokenizers/mistral-v1/tokenizer.model"


@pytest.mark.parametrize("loss, expected", [(0.0, 1.0), (math.log(50), 50.0), (1e4, math.inf)])
def test_a_perplexity_is_the_exponential_of_a_loss(loss, expected):
    assert perplexity_of(loss) == pytest.approx(expected)
    assert math.isnan(perplexity_of(math.nan))


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("length", [5, 16, 1024])
def test_rows_of_any_length_stand_for_all_bytes_of_the_text(packing, length):
    """Also the blanks that rows begin with, which SentencePiece leaves out of a decoded text."""
    needs(MISTRAL)
    tokenizer = data.load_tokenizer(str(DATA / MISTRAL))
    texts = ["The sea was calm, and nobody spoke for an hour. " * 3, "  It was not over", "x", "one two " * 30]
    rows = data.pack(data.tokenize(texts, tokenizer, show_progress=False), sequence_length=length, packing=packing)
    tokens, targets = (np.stack([row[name] for row in rows]) for name in ("tokens", "targets"))
    assert count_bytes(tokens, targets, tokenizer) == sum(map(len, texts))


def test_logits_that_are_not_finite_are_a_sentence_for_who_asks_and_a_number_for_training(tmp_path):
    run = broken_run(tmp_path, "e")
    result = evaluate_run(run, 1)
    assert math.isnan(result.loss) and math.isnan(result.perplexity)
    with pytest.raises(EvaluationError, match="the model's logits on the held-out documents are not finite; ") as said:
        perplexity(run, EvaluationOptions(batches=1))
    assert "\n" not in str(said.value)
