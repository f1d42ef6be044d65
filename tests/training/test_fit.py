"""One training in memory: the steps of `titans train`, the same for all seeds but for the start."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from tests.training.tiny import tiny_config
from titans_jax import data
from titans_jax.training.fit import Selection, fit
from titans_jax.training.optimizer import make_optimizer
from titans_jax.training.run import init_model
from titans_jax.training.step import make_train_step

CONFIG = tiny_config()


def batches():
    with_rows = data.train_batches(CONFIG.data, data.load_tokenizer("byte"))
    yield from itertools.islice(with_rows, 3)
    with_rows.close()


def test_the_steps_are_those_of_training():
    _, params, history = fit(CONFIG.model, CONFIG.optimizer, batches(), steps=3, seed=1)
    graphdef, start = init_model(CONFIG.model, 1)
    optimizer = make_optimizer(CONFIG.optimizer, 3)
    state, losses = {"params": start, "optimizer": optimizer.init(start)}, []
    step = make_train_step(graphdef, optimizer, accumulation=1)
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(history.loss, losses, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(state["params"]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert history.finite and history.tokens == 3 * 4 * 64 and history.seconds > 0


def test_a_step_that_is_not_finite_is_told():
    config = tiny_config()
    (batch,) = itertools.islice(batches(), 1)
    steep = dataclasses.replace(config.optimizer, learning_rate=1e30, warmup_steps=0)
    *_, history = fit(config.model, steep, itertools.repeat(batch), steps=3, seed=1)
    assert not history.finite and np.isfinite(history.loss[0])


def test_too_few_batches_are_refused():
    with pytest.raises(ValueError, match="there are 3 batches: 4 steps need as many"):
        fit(CONFIG.model, CONFIG.optimizer, batches(), steps=4, seed=1)


def test_the_best_parameters_of_a_selection_are_returned():
    """Of scores 1, 3 and NaN the second's; with patience 1 and scores 2, 1 the first's, after two steps."""
    seen = []

    def score(graphdef, params):
        seen.append(jax.device_get(params))
        return scores[len(seen) - 1]

    scores = [1.0, 3.0, float("nan")]
    found = fit(CONFIG.model, CONFIG.optimizer, batches(), 3, 1, selection=Selection(score, every=1))
    assert len(seen) == 3 and jax.tree.all(jax.tree.map(np.array_equal, found.params, seen[1]))
    assert not jax.tree.all(jax.tree.map(np.array_equal, found.params, seen[2]))
    scores, seen = [2.0, 1.0], []
    found = fit(CONFIG.model, CONFIG.optimizer, batches(), 3, 1, selection=Selection(score, every=1, patience=1))
    assert len(found.history.loss) == 2 and jax.tree.all(jax.tree.map(np.array_equal, found.params, seen[0]))
    scores, seen = [5.0], []
    found = fit(CONFIG.model, CONFIG.optimizer, batches(), 3, 1, selection=Selection(score, every=1, enough=5.0))
    assert len(found.history.loss) == 1


def test_a_training_starts_from_what_another_one_made():
    _, before, _ = fit(CONFIG.model, CONFIG.optimizer, batches(), steps=1, seed=1)
    other = dataclasses.replace(CONFIG.model, vocab_size=CONFIG.model.vocab_size + 64)
    _, after, _ = fit(other, CONFIG.optimizer, batches(), steps=0, seed=2, start=before)
    assert jax.tree.all(jax.tree.map(np.array_equal, after["cycles"], before["cycles"]))
    assert after["embedding"]["embedding"].shape[0] == other.vocab_size
