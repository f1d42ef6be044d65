"""Attentional biases: the derivative that the engine takes is the closed form of memory/README.md, The rule."""

import jax
import jax.numpy as jnp
import miras_oracle as oracle
import numpy as np
import pytest

from titans_jax.memory import biases

ROWS, HEAD_DIM = 5, 7


def drawn(seed=0):
    """Reads and values whose residuals keep away from 0, where a sign has no derivative."""
    generator = np.random.default_rng(seed)
    residual = generator.choice([-1, 1], (ROWS, HEAD_DIM)) * generator.uniform(0.2, 2.0, (ROWS, HEAD_DIM))
    value = generator.normal(size=(ROWS, HEAD_DIM))
    return value + residual, value


def loss_and_cotangent(bias, read, value, gate=None):
    @jax.jit
    def both(read, value, gate):
        return bias(read, value, gate), jax.grad(lambda y: jnp.sum(bias(y, value, gate)))(read)

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, both(*jax.tree.map(jnp.asarray, (read, value, gate))))


def each_row(cotangent, residual, *gate):
    return np.array([cotangent(r, *(g[i] for g in gate)) for i, r in enumerate(residual)])


def test_l2_and_dot_product():
    read, value = drawn()
    loss, cotangent = loss_and_cotangent(biases.l2(), read, value)
    np.testing.assert_allclose(loss, 0.5 * np.sum((read - value) ** 2, axis=1), rtol=1e-14)
    np.testing.assert_allclose(cotangent, oracle.l2_cotangent(read - value), rtol=1e-14)
    loss, cotangent = loss_and_cotangent(biases.dot_product(), read, value)
    np.testing.assert_allclose(loss, -np.sum(read * value, axis=1), rtol=1e-13)
    np.testing.assert_allclose(cotangent, oracle.dot_product_cotangent(read - value, value), rtol=1e-14)


@pytest.mark.parametrize("slope", [0.0, 0.4, 1.0])
def test_affine_goes_from_the_dot_product_to_l2(slope):
    """Its cotangent is slope * read - value; the slope of a bias is what the exact forms build on."""
    read, value = drawn()
    gate = np.full((ROWS, 1), slope)
    _, cotangent = loss_and_cotangent(biases.affine(), read, value, gate)
    np.testing.assert_allclose(cotangent, slope * read - value, rtol=1e-13, atol=1e-15)
    assert biases.affine().slope(slope) == slope and biases.affine().slope(None) == 1
    assert biases.l2().slope(None) == 1 and biases.dot_product().slope(None) == 0


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, 4.0])
def test_lp(p):
    read, value = drawn()
    loss, cotangent = loss_and_cotangent(biases.lp(p, sharpness=50.0), read, value)
    residual = read - value
    # From 0.2 on, the smooth sign and power of remark 5 are 1e-8 and p * 1.3e-5 away from the exact ones.
    tolerance = 1e-13 if p % 2 == 0 else 1e-4
    np.testing.assert_allclose(cotangent, oracle.lp_cotangent(residual, p), rtol=tolerance)
    np.testing.assert_allclose(loss, np.sum(np.abs(residual) ** p, axis=1), rtol=tolerance)
    if p % 2:
        np.testing.assert_allclose(cotangent, oracle.smooth_lp_cotangent(residual, p), rtol=1e-13)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, 4.0])
def test_lp_is_finite_where_the_residual_is_zero(p):
    """Cotangent 0 there, and the outer loop's derivative through it is at most that of 1/2 ||r||^2, below p = 2."""
    bias = biases.lp(p)
    with jax.enable_x64(True):
        zeros = jnp.zeros(3)
        first = jax.grad(lambda y: bias(y, zeros))
        np.testing.assert_array_equal(first(zeros), np.zeros(3))
        second = np.asarray(jax.jacobian(first)(zeros))
    expected = {1.0: 1.0, 1.5: 1.0, 2.0: 2.0, 4.0: 0.0}.get(p, p * 50.0 * 1e-6 ** ((p - 1) / 2))
    np.testing.assert_allclose(second, expected * np.eye(3), rtol=1e-12)


@pytest.mark.parametrize("p, most", [(3.0, 1.0), (4.0, 0.7), (2.5, 1.2)])
def test_lp_goes_on_as_a_straight_line(p, most):
    """As printed up to an error of `most`; beyond it the cotangent keeps the slope that it has there."""
    read, value = drawn()
    residual = read - value
    size = np.abs(residual)
    assert (size > most).any() and (size < most).any()
    loss, cotangent = loss_and_cotangent(biases.lp(p, linear_from=most), read, value)
    _, printed = loss_and_cotangent(biases.lp(p), read, value)
    line = p * most ** (p - 1) * (1 + (p - 1) * (size / most - 1)) * np.sign(residual)
    np.testing.assert_allclose(cotangent, np.where(size > most, line, printed), rtol=1e-12)
    # The loss is the integral of that cotangent.
    integral = most**p + p * most ** (p - 1) * (size - most) + p * (p - 1) / 2 * most ** (p - 2) * (size - most) ** 2
    np.testing.assert_allclose(loss, np.where(size > most, integral, size**p).sum(axis=1), rtol=1e-4)


def test_only_a_bias_that_grows_faster_than_a_square_is_bounded():
    assert biases.lp(3.0).bounded() == biases.lp(3.0, linear_from=1.0)
    assert biases.lp(3.0, linear_from=2.0).bounded() == biases.lp(3.0, linear_from=2.0)
    for bias in (biases.lp(2.0), biases.lp(1.5), biases.l2(), biases.huber()):
        assert bias.bounded() == bias


def test_value_less_is_l1():
    assert biases.value_less() == biases.lp(1.0)
    read, value = drawn()
    np.testing.assert_allclose(
        loss_and_cotangent(biases.value_less(sharpness=50.0), read, value)[1], np.sign(read - value), rtol=1e-7
    )


@pytest.mark.parametrize("gated", [False, True])
def test_huber_by_coordinate(gated):
    """clip(r, -delta, delta), with a threshold for every token and channel if it is a gate."""
    read, value = drawn()
    delta = np.random.default_rng(1).uniform(0.3, 1.7, (ROWS, HEAD_DIM)) if gated else np.full((ROWS, HEAD_DIM), 0.9)
    loss, cotangent = loss_and_cotangent(biases.huber(0.9), read, value, delta if gated else None)
    r = read - value
    assert np.any(np.abs(r) < delta) and np.any(np.abs(r) > delta)
    np.testing.assert_allclose(cotangent, oracle.huber_cotangent(r, delta), rtol=1e-13)
    branches = np.where(np.abs(r) <= delta, 0.5 * r**2, delta * (np.abs(r) - 0.5 * delta))
    np.testing.assert_allclose(loss, np.sum(branches, axis=1), rtol=1e-13)


def threshold(residual):
    """One per token, above the norm of the residual in every second row and below it in the others."""
    return np.linalg.norm(residual, axis=1) * np.where(np.arange(ROWS) % 2 == 0, 1.3, 0.4)


@pytest.mark.parametrize("name", ["huber_norm", "mixture", "value_shift"])
def test_biases_of_the_norm(name):
    """Each in both branches, its threshold a gate [tokens, 1]; a field of the same size says the same of one row."""
    read, value = drawn()
    residual = read - value
    delta = threshold(residual)
    make, closed_form = getattr(biases, name), getattr(oracle, f"{name}_cotangent")
    loss, cotangent = loss_and_cotangent(make(), read, value, delta[:, None])
    np.testing.assert_allclose(cotangent, each_row(closed_form, residual, delta), rtol=1e-12)
    for row in range(2):
        alone = loss_and_cotangent(make(delta[row]), read[row], value[row])
        np.testing.assert_allclose(alone[0], loss[row], rtol=1e-14)
        np.testing.assert_allclose(alone[1], cotangent[row], rtol=1e-14)


def test_mixture_jumps_at_its_switch_and_the_norm_huber_does_not():
    """2 r against delta sign(r): norms 2 delta and delta sqrt(d) (Miras eq 16; memory/README.md, The rule)."""
    value, delta = np.zeros((2, HEAD_DIM)), 1.0
    read = np.full((2, HEAD_DIM), delta / np.sqrt(HEAD_DIM)) * np.array([[1 - 1e-9], [1 + 1e-9]])
    _, cotangent = loss_and_cotangent(biases.mixture(delta), read, value)
    np.testing.assert_allclose(np.linalg.norm(cotangent, axis=1), [2 * delta, delta * np.sqrt(HEAD_DIM)], rtol=1e-7)
    _, cotangent = loss_and_cotangent(biases.huber_norm(delta), read, value)
    np.testing.assert_allclose(cotangent[0], cotangent[1], rtol=1e-8)


def test_value_shift_is_the_worst_shift():
    """max over ||e|| <= delta of 1/2 ||r - e||^2, attained at e = -delta r / ||r||."""
    read, value = drawn()
    residual, delta = read - value, 0.7
    loss, _ = loss_and_cotangent(biases.value_shift(delta), read, value)
    worst = -delta * residual / np.linalg.norm(residual, axis=1, keepdims=True)
    np.testing.assert_allclose(loss, 0.5 * np.sum((residual - worst) ** 2, axis=1), rtol=1e-13)
    shifts = np.random.default_rng(2).normal(size=(1000, HEAD_DIM))
    shifts *= delta / np.linalg.norm(shifts, axis=1, keepdims=True)
    others = 0.5 * np.sum((residual[:, None] - shifts) ** 2, axis=2)
    assert np.all(others < loss[:, None])


@pytest.mark.parametrize("name", ["huber_norm", "mixture", "value_shift"])
def test_a_perfect_read_has_a_finite_cotangent(name):
    same = np.ones((2, HEAD_DIM))
    loss, cotangent = loss_and_cotangent(getattr(biases, name)(0.5), same, same)
    assert np.isfinite(loss).all()
    np.testing.assert_array_equal(cotangent, np.zeros_like(same))


@pytest.mark.parametrize(
    "make, field",
    [
        (lambda: biases.lp(0.5), "p"),
        (lambda: biases.lp(float("nan")), "p"),
        (lambda: biases.lp(3.0, sharpness=0.0), "sharpness"),
        (lambda: biases.lp(3.0, epsilon=0.0), "epsilon"),
        (lambda: biases.lp(3.0, linear_from=0.0), "linear_from"),
        (lambda: biases.huber(0.0), "delta"),
        (lambda: biases.huber_norm(-1.0), "delta"),
        (lambda: biases.mixture(0.0), "delta"),
        (lambda: biases.mixture(1.0, sharpness=-1.0), "sharpness"),
        (lambda: biases.value_shift(-0.1), "delta"),
        (lambda: biases.value_shift(float("nan")), "delta"),
    ],
)
def test_bad_choices_are_refused_in_one_sentence(make, field):
    with pytest.raises(ValueError, match=f"^{field} is ") as refusal:
        make()
    assert len(str(refusal.value).splitlines()) == 1
