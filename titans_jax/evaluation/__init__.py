"""What a trained model is worth: a registry of evaluators."""

from titans_jax.evaluation.evaluators import (
    EVALUATORS,
    EvaluationError,
    EvaluationOptions,
    Evaluator,
    Numbers,
    register_evaluator,
)
from titans_jax.evaluation.harness import HarnessTask
from titans_jax.evaluation.measure import evaluators_of, measure
from titans_jax.evaluation.niah import Answer
from titans_jax.evaluation.perplexity import Evaluation, evaluate, evaluate_run
from titans_jax.evaluation.positions import Bucket

__all__ = [
    "EVALUATORS",
    "Answer",
    "Bucket",
    "Evaluation",
    "EvaluationError",
    "EvaluationOptions",
    "Evaluator",
    "HarnessTask",
    "Numbers",
    "evaluate",
    "evaluate_run",
    "evaluators_of",
    "measure",
    "register_evaluator",
]
