"""Products of gates: what the token recurrence says of the start state's and every token's share in each later one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax.memory import Gates
from titans_jax.memory.forms import decay
from titans_jax.ops.channel_decay import LOG_CUT

TOKENS = 48
W_0, S_0, DOCUMENT_W, DOCUMENT_S, GRADIENTS = 0, 1, 2, 3, 4  # rows of the basis in which the recurrence is written
coefficients = jax.jit(decay.coefficients, static_argnames="tile")


def recurrence(retention, momentum, step_size, mask=None, resets=None):
    """(W, S) [tokens, basis]: S_t = eta_t S_{t-1} - theta_t u_t and W_t = a_t W_{t-1} + m_t S_t, token by token, as
    shares of (W_0, S_0, the document start's W and S, u_1, ..)."""
    tokens = len(step_size)
    basis = np.eye(GRADIENTS + tokens)
    weights, carried, found = basis[W_0], basis[S_0], []
    for t in range(tokens):
        if resets is not None and resets[t]:
            weights, carried = basis[DOCUMENT_W], basis[DOCUMENT_S]
        if mask is None or mask[t]:
            old = 0 if momentum is None else momentum[t] * carried
            carried = old - step_size[t] * basis[GRADIENTS + t]
            weights = retention[t] * weights + carried
        found.append((weights, carried))
    return (np.array(rows) for rows in zip(*found, strict=True))


def draw(seed=0, tokens=TOKENS):
    generator = np.random.default_rng(seed)
    return generator.uniform(0.5, 1, tokens), generator.uniform(0.2, 1, tokens), generator.uniform(0.1, 0.9, tokens)


def found(retention, momentum, step_size, mask=None, resets=None, tile=None):
    with jax.enable_x64(True):
        rows = (None if x is None else jnp.asarray(x)[None] for x in (retention, momentum, step_size, mask, resets))
        retention, momentum, *others = rows
        log_momentum = None if momentum is None else jnp.log(momentum)
        made = coefficients(jnp.log(retention), log_momentum, *others, tile=tile)
        return jax.tree.map(np.asarray, made)


def assert_coefficients(c, weights, carried, momentum, atol=1e-13):
    """The `Coefficients` c are these shares."""
    same = {"rtol": 0, "atol": atol}
    np.testing.assert_allclose(c.beta, weights[:, [W_0]], **same)
    np.testing.assert_allclose(c.G, weights[:, GRADIENTS:], **same)
    assert np.array_equal(c.G, np.tril(c.G))
    if momentum is None:
        assert c.f is None and c.p is None and c.N is None
    else:
        np.testing.assert_allclose(c.f, weights[:, [S_0]], **same)
        np.testing.assert_allclose(c.p, carried[:, [S_0]], **same)
        np.testing.assert_allclose(c.N, carried[-1:, GRADIENTS:], **same)
    if c.restart is not None:
        beta, f, p = c.restart
        np.testing.assert_allclose(beta, weights[:, [DOCUMENT_W]], **same)
        if momentum is not None:
            np.testing.assert_allclose(f, weights[:, [DOCUMENT_S]], **same)
            np.testing.assert_allclose(p, carried[:, [DOCUMENT_S]], **same)


PADDED = np.arange(TOKENS) < 41
PADDED_BEFORE_RESET = ~np.isin(np.arange(TOKENS), [13, 14, 15, 30, 31, 46, 47])
RESETS = np.isin(np.arange(TOKENS), [0, 16, 32])
INSIDE_TILES = np.isin(np.arange(TOKENS), [5, 9, 21, 40])


@pytest.mark.parametrize("tile", [None, 16], ids=lambda tile: f"tile-{tile}")
@pytest.mark.parametrize("with_momentum", [True, False], ids=["momentum", "descent"])
@pytest.mark.parametrize(
    "mask, resets",
    [(None, None), (PADDED, None), (None, RESETS), (None, INSIDE_TILES), (PADDED_BEFORE_RESET, RESETS)],
    ids=["plain", "padding", "resets", "resets-inside-tiles", "padding-and-resets"],
)
def test_coefficients(mask, resets, with_momentum, tile):
    retention, momentum, step_size = draw()
    gates = (retention, momentum if with_momentum else None, step_size, mask, resets)
    assert_coefficients(found(*gates, tile=tile), *recurrence(*gates), gates[1])


def test_a_tile_that_does_not_divide_the_block_is_none():
    gates = draw(7)
    assert_coefficients(found(*gates, tile=7), *recurrence(*gates), gates[1])


@pytest.mark.parametrize("tile", [None, 16])
@pytest.mark.parametrize("with_momentum", [True, False])
def test_gates_of_zero_cut(with_momentum, tile):
    """Nothing crosses a cut, exactly, and shares on either side keep all digits: also the first token's, and two in a
    row."""
    retention, momentum, step_size = draw(1)
    retention[[0, 20, 21, 33]] = 0
    momentum[[17, 20, 40]] = 0
    gates = (retention, momentum if with_momentum else None, step_size)
    c = found(*gates, tile=tile)
    weights, carried = recurrence(*gates)
    assert_coefficients(c, weights, carried, gates[1])
    assert np.array_equal(c.G == 0, weights[:, GRADIENTS:] == 0)
    assert not np.any(c.beta)


def test_a_gate_below_the_threshold_is_a_cut():
    retention, momentum, step_size = draw(2)
    retention[10] = np.exp(LOG_CUT - 1)
    c = found(retention, None, step_size)
    assert not np.any(c.G[10:, :10]) and np.all(c.G[9, :10] < 0)
    assert_coefficients(c, *recurrence(retention, None, step_size), None, atol=1e-12)


def test_many_small_gates_do_not_underflow_into_each_other():
    """0.01^48 is nothing in float32; its neighbours' quotient is still 0.01."""
    gates = np.full(TOKENS, 0.01), np.full(TOKENS, 0.5), np.full(TOKENS, 1.0)
    with jax.enable_x64(False):
        rows = [jnp.asarray(x, jnp.float32)[None] for x in gates]
        c = coefficients(jnp.log(rows[0]), jnp.log(rows[1]), rows[2], tile=None)
    weights, _ = recurrence(*gates)
    np.testing.assert_allclose(c.G, weights[:, GRADIENTS:], rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("tile", [None, 16])
def test_gradients_are_finite_at_cuts(tile):
    """and are the differences of the recurrence where the gates are smooth."""
    retention, momentum, step_size = draw(3)
    generator = np.random.default_rng(4)
    probe = generator.normal(size=(TOKENS, TOKENS))

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def gradients(log_retention, log_momentum, step_size):
        rows = (x[None] for x in (log_retention, log_momentum, step_size))
        c = decay.coefficients(*rows, tile=tile)
        return jnp.sum(c.G * probe) + jnp.sum(c.beta) + jnp.sum(c.f) + jnp.sum(c.p) + jnp.sum(c.N)

    def expected(retention, momentum, step_size):
        weights, carried = recurrence(retention, momentum, step_size)
        starts = weights[:, W_0].sum() + weights[:, S_0].sum() + carried[:, S_0].sum()
        return np.sum(weights[:, GRADIENTS:] * probe) + starts + carried[-1, GRADIENTS:].sum()

    with jax.enable_x64(True):
        gates = [jnp.asarray(x) for x in (np.log(retention), np.log(momentum), step_size)]
        smooth = gradients(*gates)
        cut = gradients(gates[0].at[7].set(-jnp.inf), gates[1].at[9].set(-jnp.inf), gates[2])
        assert all(np.isfinite(leaf).all() for leaf in cut)
        assert cut[0][7] == cut[1][9] == 0
        smooth = [np.asarray(leaf) for leaf in smooth]
    for which, gate in enumerate((retention, momentum, step_size)):
        direction = generator.normal(size=TOKENS)
        # Along the logs of the first two gates.
        moved = lambda by, gate=gate, which=which, direction=direction: [  # noqa: E731
            other if i != which else (gate * np.exp(by * direction) if which < 2 else gate + by * direction)
            for i, other in enumerate((retention, momentum, step_size))
        ]
        wanted = (expected(*moved(1e-5)) - expected(*moved(-1e-5))) / 2e-5
        np.testing.assert_allclose(np.sum(smooth[which] * direction), wanted, rtol=1e-7)


def test_block_coefficients_are_those_of_every_block_and_matrix():
    blocks, matrices = 3, 2
    generator = np.random.default_rng(5)
    retention, momentum, step_size = generator.uniform(0.3, 1, (3, blocks, TOKENS, matrices))
    mask = np.stack([np.ones(TOKENS, bool), PADDED, PADDED_BEFORE_RESET])
    resets = np.stack([RESETS, np.zeros(TOKENS, bool), RESETS])
    with jax.enable_x64(True):
        gates = Gates(*(jnp.asarray(x) for x in (np.log(retention), np.log(momentum), step_size, mask)))
        make = jax.jit(decay.block_coefficients, static_argnums=2)
        made = jax.tree.map(np.asarray, make(gates, jnp.asarray(resets), 16))
    for block in range(blocks):
        for matrix in range(matrices):
            own = retention[block, :, matrix], momentum[block, :, matrix], step_size[block, :, matrix]
            one = jax.tree.map(lambda leaf: leaf[block, matrix], made)  # noqa: B023
            assert_coefficients(one, *recurrence(*own, mask[block], resets[block]), own[1])


def test_product_of_coefficients_of_bfloat16_operands():
    """The product keeps about twice the digits of its operands' dtype."""
    generator = np.random.default_rng(6)
    kept, carried = (np.tril(generator.uniform(0.1, 1, (32, 32))).astype(np.float32) for _ in range(2))
    exact = kept.astype(np.float64) @ carried
    errors = {
        dtype: np.max(np.abs(decay.product_of_coefficients(jnp.asarray(kept), jnp.asarray(carried), dtype) - exact))
        / np.max(exact)
        for dtype in (jnp.float32, jnp.bfloat16)
    }
    assert errors[jnp.float32] < 1e-6 and errors[jnp.bfloat16] < 3e-5
