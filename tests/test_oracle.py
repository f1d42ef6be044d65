"""The oracle against finite differences and against numbers worked out by hand."""

import numpy as np
import oracle
import pytest

RULES = {
    "linear": ("mlp", [(4, 4)]),
    "mlp2": ("mlp", [(4, 8), (8, 4)]),
    "mlp3": ("mlp", [(4, 8), (8, 8), (8, 4)]),
    "mlp4": ("mlp", [(4, 8), (8, 8), (8, 8), (8, 4)]),
    "residual1": ("residual_mlp", [(4, 4)]),
    "residual2": ("residual_mlp", [(4, 8), (8, 4)]),
    "residual4": ("residual_mlp", [(4, 8), (8, 8), (8, 8), (8, 4)]),
    "gated": ("gated_mlp", [(4, 8), (4, 8), (8, 4)]),
}


@pytest.mark.parametrize("bias", ["l2", "dot_product"])
@pytest.mark.parametrize("name", RULES)
def test_inner_gradient_is_the_derivative_of_the_inner_loss(name, bias):
    architecture, shapes = RULES[name]
    rule = oracle.Rule(architecture, bias, True, 1)
    generator = np.random.default_rng(0)
    weights = [generator.normal(size=shape) for shape in shapes]
    norm_scale, key, value = generator.normal(size=(3, 4))
    _, cotangent, gradients = oracle.inner_gradient(rule, weights, norm_scale, key, value)

    def loss(weights):
        return oracle.inner_loss(rule, oracle.read(rule, weights, norm_scale, key), value)[0]

    step = 1e-5
    for layer, gradient in enumerate(gradients):
        for index in np.ndindex(gradient.shape):
            values = []
            for sign in (1, -1):
                moved = [matrix.copy() for matrix in weights]
                moved[layer][index] += sign * step
                values.append(loss(moved))
            assert gradient[index] == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-7, rel=1e-7)
    output = oracle.read(rule, weights, norm_scale, key)
    for index in range(4):
        moved = np.eye(4)[index] * step
        after, before = (oracle.inner_loss(rule, output + sign * moved, value)[0] for sign in (1, -1))
        assert cotangent[index] == pytest.approx((after - before) / (2 * step), abs=1e-8)


def test_layer_norm_and_activations_have_their_known_values():
    normalized, deviation = oracle.normalize(np.array([1.0, 3.0]))
    np.testing.assert_allclose(normalized, [-1, 1], atol=1e-6)
    assert deviation == pytest.approx(np.sqrt(1 + 1e-6), rel=1e-15)
    assert oracle.gelu(1.0) == pytest.approx(0.841192, abs=1e-6)  # the tanh form; the erf form gives 0.841345
    assert oracle.silu(1.0) == pytest.approx(1 / (1 + np.exp(-1)))


def scalars(chunk_size, **options):
    """Two tokens of a one-number memory W=2: keys 1 and 2, values 5 and 3, alpha 1/2, eta 1/4, theta 1/10."""
    half, quarter, tenth = (np.full(2, value) for value in (0.5, 0.25, 0.1))
    tokens = {"queries": np.ones((2, 1)), "keys": np.array([[1.0], [2.0]]), "values": np.array([[5.0], [3.0]])}
    params = {"weights": [np.array([[2.0]])]}
    return oracle.memorize(
        oracle.Rule("mlp", "l2", True, chunk_size),
        params,
        oracle.start(params),
        **tokens,
        forget=half,
        momentum=quarter,
        step_size=tenth,
        **options,
    )


def test_two_tokens_by_hand():
    # Token 1: u = 1 (2 - 5) = -3, S = 0.3, W = 1 + 0.3 = 1.3.  Token 2 at W = 1.3: u = 2 (2.6 - 3) = -0.8,
    # S = 0.075 + 0.08 = 0.155, W = 0.65 + 0.155 = 0.805.
    # In one chunk, token 2 at the anchor W = 2: u = 2 (4 - 3) = 2, S = 0.075 - 0.2 = -0.125, W = 0.65 - 0.125 = 0.525.
    reads, state, loss, norm = scalars(1)
    np.testing.assert_allclose(reads[:, 0], [1.3, 0.805])
    np.testing.assert_allclose(state.momentum[0], [[0.155]])
    reads, state, loss, norm = scalars(2)
    np.testing.assert_allclose(reads[:, 0], [1.3, 0.525])
    np.testing.assert_allclose(loss, [4.5, 0.5])
    np.testing.assert_allclose(norm, [3, 1])
    assert state.position == 0 and state.anchor[0] == state.weights[0]


def test_mask_and_reset_by_hand():
    reads, state, *_ = scalars(2, mask=np.array([False, True]))
    np.testing.assert_allclose(reads[:, 0], [2, 1 - 0.2])
    reads, state, *_ = scalars(4, resets=np.array([False, True]))
    np.testing.assert_allclose(reads[:, 0], [1.3, 1 - 0.2])
    assert state.position == 1 and state.anchor[0] == 2


def test_closed_form_of_a_chunk():
    """M_t = beta_t M_0 + f_t S_0 - sum_j G_tj u_j and S_t = p_t S_0 - sum_j N_tj u_j (sums written out, no scan)."""
    generator = np.random.default_rng(3)
    time = 6
    forget, momentum, step_size = generator.uniform(0.1, 0.9, (3, time))
    keys, values = generator.normal(size=(2, time, 4))
    weights, past = generator.normal(size=(2, 4, 4))
    rule = oracle.Rule("mlp", "l2", True, 8)
    _, state, *_ = oracle.memorize(
        rule, {}, oracle.State([weights], [past], [weights]), keys, keys, values, forget, momentum, step_size
    )
    expected = np.prod(1 - forget) * weights
    carried = np.prod(momentum) * past
    for i in range(time):
        expected = expected + np.prod(1 - forget[i + 1 :]) * np.prod(momentum[: i + 1]) * past
        gradient = np.outer(keys[i], keys[i] @ weights - values[i])
        carried = carried - step_size[i] * np.prod(momentum[i + 1 :]) * gradient
        for later in range(i, time):
            influence = step_size[i] * np.prod(momentum[i + 1 : later + 1]) * np.prod(1 - forget[later + 1 :])
            expected = expected - influence * gradient
    np.testing.assert_allclose(state.weights[0], expected, rtol=1e-12)
    np.testing.assert_allclose(state.momentum[0], carried, rtol=1e-12)
