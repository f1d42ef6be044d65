"""One step: the loss it takes, how it accumulates, and what it refuses to apply."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from titans_jax.models.loss import next_token_losses
from titans_jax.training.step import make_train_step

VOCAB = 11


class Bigram(nnx.Module):
    """Logits of the next token from a table alone."""

    def __init__(self):
        table = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32)
        self.table = nnx.Param(jnp.asarray(table))

    def losses(self, batch, z_loss=0.0):
        return next_token_losses(jax.nn.one_hot(batch["tokens"], VOCAB), self.table[...], batch["targets"], z_loss)

    def loss_sum(self, batch):
        nats, parts = self.losses(batch)
        return nats, parts.count


def batch(rows: int = 4, time: int = 6) -> dict[str, np.ndarray]:
    """Rows with very different numbers of targets."""
    rng = np.random.default_rng(1)
    tokens, targets = rng.integers(0, VOCAB, (2, rows, time)).astype(np.int32)
    for row in range(rows):
        targets[row, 1 + row :] = -1
    return {"tokens": tokens, "targets": targets, "segment_ids": np.ones_like(tokens)}


def state_and_step(optimizer, accumulation=1, **options):
    graphdef, params = nnx.split(Bigram())
    state = {"params": nnx.to_pure_dict(params), "optimizer": optimizer.init(nnx.to_pure_dict(params))}
    return state, make_train_step(graphdef, optimizer, accumulation, **options)


def loss_and_gradient(table: np.ndarray, batch: dict[str, np.ndarray]) -> tuple[float, np.ndarray]:
    """Mean cross entropy over targets, and its gradient: softmax minus one-hot, by hand in float64."""
    table, loss, gradient = table.astype(np.float64), 0.0, np.zeros((VOCAB, VOCAB))
    count = (batch["targets"] >= 0).sum()
    for token, target in zip(batch["tokens"].ravel(), batch["targets"].ravel(), strict=True):
        if target >= 0:
            probabilities = np.exp(table[token]) / np.exp(table[token]).sum()
            loss -= np.log(probabilities[target]) / count
            gradient[token] += (probabilities - np.eye(VOCAB)[target]) / count
    return loss, gradient


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_step_is_gradient_descent_on_the_mean_over_targets(accumulation):
    state, step = state_and_step(optax.sgd(0.5), accumulation)
    before = np.asarray(state["params"]["table"])
    loss, gradient = loss_and_gradient(before, batch())
    state, metrics = step(state, batch())
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(gradient), rtol=1e-5)
    np.testing.assert_allclose(state["params"]["table"], before - 0.5 * gradient, rtol=1e-5, atol=1e-6)
    assert float(metrics["tokens"]) == (batch()["targets"] >= 0).sum() == 10
    assert set(metrics) == {"loss", "grad_norm", "tokens"}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_z_loss_is_trained_on_and_reported_beside_the_loss(accumulation):
    """d log(Z)^2 / d logits is 2 log(Z) softmax."""
    weight = 0.3
    state, step = state_and_step(optax.sgd(0.5), accumulation, z_loss=weight)
    before = np.asarray(state["params"]["table"])
    loss, gradient = loss_and_gradient(before, batch())
    partition = np.exp(before.astype(np.float64)).sum(axis=1)
    read = np.bincount(batch()["tokens"][batch()["targets"] >= 0], minlength=VOCAB) / 10
    beside = weight * np.sum(read * np.log(partition) ** 2)
    gradient += weight * (read * 2 * np.log(partition) / partition)[:, None] * np.exp(before)
    state, metrics = step(state, batch())
    np.testing.assert_allclose([metrics["loss"], metrics["z_loss"]], [loss, beside], rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(gradient), rtol=1e-5)
    np.testing.assert_allclose(state["params"]["table"], before - 0.5 * gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1}], ids=["plain", "z_loss"])
def test_a_batch_of_padding_changes_nothing(options):
    state, step = state_and_step(optax.sgd(0.5), **options)
    before = np.asarray(state["params"]["table"])
    state, metrics = step(state, batch() | {"targets": np.full((4, 6), -1, np.int32)})
    assert [float(metrics[name]) for name in ("loss", "grad_norm", "tokens")] == [0, 0, 0]
    np.testing.assert_array_equal(state["params"]["table"], before)


def test_a_step_that_is_not_finite_is_not_applied():
    state, step = state_and_step(optax.adamw(0.1))
    state, _ = step(state, batch())
    state["params"]["table"] = state["params"]["table"].at[batch()["tokens"][0, 0], 3].set(jnp.inf)
    before = jax.tree.map(np.asarray, state)
    state, metrics = step(state, batch())
    assert not np.isfinite(metrics["loss"])
    for new, old in zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(new, old)


def test_the_average_of_the_weights_moves_towards_them():
    """a <- d a + (1 - d) w after every step, from the first weights on."""
    graphdef, params = nnx.split(Bigram())
    params, optimizer = nnx.to_pure_dict(params), optax.sgd(0.5)
    step = make_train_step(graphdef, optimizer, 1, ema=0.75)
    state = {"params": params, "optimizer": optimizer.init(params), "ema": jax.tree.map(jnp.copy, params)}
    expected = np.asarray(params["table"])
    for _ in range(3):
        state, _ = step(state, batch())
        expected = 0.75 * expected + 0.25 * np.asarray(state["params"]["table"])
    np.testing.assert_allclose(state["ema"]["table"], expected, rtol=1e-5)
    assert np.abs(expected - np.asarray(state["params"]["table"])).max() > 1e-3
