"""The summed cross entropy against its definition, and targets that do not fit."""

import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax.models.loss import cross_entropy_sum


def test_cross_entropy_of_predicted_targets():
    logits = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    targets = np.array([[0, 4, -1], [2, -1, -1]], np.int32)
    probabilities = np.exp(logits) / np.sum(np.exp(logits), axis=-1, keepdims=True)
    wanted = -sum(np.log(probabilities[row, t, targets[row, t]]) for row, t in ((0, 0), (0, 1), (1, 0)))
    loss, tokens = cross_entropy_sum(jnp.asarray(logits), jnp.asarray(targets))
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    assert tokens == 3


@pytest.mark.parametrize("targets", [np.zeros((1, 3), np.int32), np.zeros((2, 3), np.float32)], ids=["shape", "dtype"])
def test_targets_that_do_not_fit_are_no_loss(targets):
    """One row of targets would otherwise be every row's."""
    with pytest.raises(AssertionError):
        cross_entropy_sum(jnp.zeros((2, 3, 5)), jnp.asarray(targets))
