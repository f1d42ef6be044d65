"""What a trained model is worth: perplexity and bits per byte."""

from titans_jax.evaluation.perplexity import Evaluation, EvaluationError, evaluate, evaluate_run

__all__ = ["Evaluation", "EvaluationError", "evaluate", "evaluate_run"]
