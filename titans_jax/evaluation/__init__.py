"""What a trained model is worth: a registry of evaluators."""

from titans_jax.evaluation import babilong as babilong  # registers its tasks, as those below do
from titans_jax.evaluation import harness as harness
from titans_jax.evaluation import niah as niah
from titans_jax.evaluation.asking import Answer
from titans_jax.evaluation.evaluators import (
    EVALUATORS,
    EvaluationError,
    EvaluationOptions,
    Evaluator,
    Numbers,
    register_evaluator,
)
from titans_jax.evaluation.measure import evaluators_of, measure, sets_of
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
    "Numbers",
    "evaluate",
    "evaluate_run",
    "evaluators_of",
    "measure",
    "register_evaluator",
    "sets_of",
]
