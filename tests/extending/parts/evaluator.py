"""An evaluator: how many of the next tokens are the model's likeliest.

titans evaluate runs/evaluator accuracy
"""

import itertools

import jax
import numpy as np

from titans_jax import data, evaluation, models
from titans_jax.config import Config, ModelConfig


@evaluation.register_evaluator()
def accuracy(run, options):
    batches = data.validation_batches(run.config.data, run.tokenizer, align=models.granularity(run.config.model))
    right, likeliest = [], jax.jit(lambda tokens, documents: run.model(tokens, documents).argmax(axis=-1))
    for batch in itertools.islice(batches, options.batches):
        found = likeliest(batch["tokens"], batch["segment_ids"]) == batch["targets"]
        right.append(found[batch["targets"] >= 0])
    return {"accuracy": float(np.mean(np.concatenate(right)))}


config = Config(model=ModelConfig(pattern=("lmm",)))
