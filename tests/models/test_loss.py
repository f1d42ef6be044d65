"""The summed cross entropy against its definition, targets that do not fit, and the loss in blocks of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax.models import loss
from titans_jax.models.loss import cross_entropy_sum, next_token_losses


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


ROWS, TIME, DIM, VOCABULARY = 4, 11, 3, 7


def operands(dtype):
    rng = np.random.default_rng(1)
    targets = rng.integers(-1, VOCABULARY, (ROWS, TIME)).astype(np.int32)
    return (
        jnp.asarray(rng.normal(size=(ROWS, TIME, DIM)), dtype),
        jnp.asarray(rng.normal(size=(DIM, VOCABULARY)), dtype),
        jnp.asarray(targets),
    )


def by_hand(x, head, targets, z_loss):
    """Loss and gradients of the logits of every predicted token, float64."""
    x, head, targets = (np.asarray(operand, np.float64) for operand in (x, head, targets))
    nats = squares = 0.0
    d_x, d_head = np.zeros_like(x), np.zeros_like(head)
    for row, t in np.argwhere(targets >= 0):
        logits, target = x[row, t] @ head, int(targets[row, t])
        log_partition = np.log(np.exp(logits).sum())
        probabilities = np.exp(logits - log_partition)
        nats += log_partition - logits[target]
        squares += z_loss * log_partition**2
        d_logits = probabilities * (1 + 2 * z_loss * log_partition) - np.eye(VOCABULARY)[target]
        d_x[row, t] = head @ d_logits
        d_head += np.outer(x[row, t], d_logits)
    return nats, squares, d_x, d_head


def in_blocks(monkeypatch, tokens):
    monkeypatch.setattr(loss, "MOST_LOGITS", tokens * VOCABULARY)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("block", [TIME, 4, 1])
def test_losses_in_blocks_are_those_of_all_tokens(monkeypatch, block, z_loss):
    in_blocks(monkeypatch, block)
    with jax.enable_x64():
        x, head, targets = operands(jnp.float64)

        def scaled(x, head):
            trained, parts = next_token_losses(x, head, targets, z_loss)
            return 2.5 * trained, parts  # a cotangent that is not 1

        program = jax.jit(jax.value_and_grad(scaled, argnums=(0, 1), has_aux=True))
        (trained, parts), (d_x, d_head) = jax.tree.map(np.asarray, program(x, head))
        alone = float(jax.jit(next_token_losses, static_argnums=3)(x, head, targets, z_loss)[0])
    nats, squares, expected_x, expected_head = by_hand(x, head, targets, z_loss)
    np.testing.assert_allclose([trained / 2.5, alone], nats + squares, rtol=1e-13)
    np.testing.assert_allclose([parts.nats, parts.z_loss], [nats, squares], rtol=1e-13)
    assert parts.count == (np.asarray(targets) >= 0).sum()
    np.testing.assert_allclose(d_x, 2.5 * expected_x, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(d_head, 2.5 * expected_head, rtol=1e-11)


def test_no_more_logits_than_a_blocks_are_there_at_once(monkeypatch):
    in_blocks(monkeypatch, 4)
    gradient = jax.grad(lambda x, head, targets: next_token_losses(x, head, targets)[0], argnums=(0, 1))
    program = str(jax.make_jaxpr(gradient)(*operands(jnp.bfloat16)))
    assert f"f32[1,{ROWS},4,{VOCABULARY}]" in program
    assert f"{TIME},{VOCABULARY}]" not in program and f"{12},{VOCABULARY}]" not in program
