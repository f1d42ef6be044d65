"""What a trained model is worth: a registry of evaluators, of which perplexity is the first."""

from titans_jax.evaluation.evaluators import EVALUATORS, Evaluator, register_evaluator
from titans_jax.evaluation.perplexity import Evaluation, EvaluationError, evaluate, evaluate_run

__all__ = [
    "EVALUATORS",
    "Evaluation",
    "EvaluationError",
    "Evaluator",
    "evaluate",
    "evaluate_run",
    "register_evaluator",
]
