"""Perplexity of a run: what losses are worth as perplexities, and logits that are not finite."""

import math

import pytest

from tests.evaluation.test_positions import broken_run
from titans_jax.evaluation import EvaluationError, EvaluationOptions, evaluate_run
from titans_jax.evaluation.perplexity import perplexity, perplexity_of


@pytest.mark.parametrize("loss, expected", [(0.0, 1.0), (math.log(50), 50.0), (1e4, math.inf)])
def test_a_perplexity_is_the_exponential_of_a_loss(loss, expected):
    assert perplexity_of(loss) == pytest.approx(expected)
    assert math.isnan(perplexity_of(math.nan))


def test_logits_that_are_not_finite_are_a_sentence_for_who_asks_and_a_number_for_training(tmp_path):
    run = broken_run(tmp_path, "e")
    result = evaluate_run(run, 1)
    assert math.isnan(result.loss) and math.isnan(result.perplexity)
    with pytest.raises(EvaluationError, match="the model's logits on the held-out documents are not finite; ") as said:
        perplexity(run, EvaluationOptions(batches=1))
    assert "\n" not in str(said.value)
