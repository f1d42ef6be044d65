"""The preconditioner of written keys against a loop in numpy: values, pieces, documents, padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.slopes import assert_slope_is_the_difference
from titans_jax.config import MemoryConfig, ModelConfig
from titans_jax.layers.document_layout import find_documents
from titans_jax.layers.preconditioner import Preconditioner

HEADS, WIDTH, TIME, BATCH = 2, 4, 12, 2
CONFIG = ModelConfig(
    dim=8, num_heads=HEADS, head_dim=WIDTH, dtype="float64", memory=MemoryConfig(preset="preconditioned_delta")
)


@functools.cache
def drawn():
    """(parameters by name, x [b, t, dim], keys [b, t, h, d])."""
    generator = np.random.default_rng(0)
    names = {
        "kernel": (8, HEADS, 2),
        "bias": (HEADS, 2),
        "log_rate": (HEADS,),
        "step_bias": (HEADS,),
        "center": (HEADS,),
    }
    parameters = {name: generator.normal(size=shape) for name, shape in names.items()}
    keys = generator.normal(size=(BATCH, TIME, HEADS, WIDTH))
    return parameters, generator.normal(size=(BATCH, TIME, 8)), keys


def module():
    made = Preconditioner(CONFIG, rngs=nnx.Rngs(0))
    for name, value in drawn()[0].items():
        getattr(made, name)[...] = jnp.asarray(value)
    return made


def expected(x, keys, squares):
    """A <- e^g A + b k^2; r = log(A + 1e-6) - c; 1.5^(-r / (1 + |r|)); one row, token by token."""
    p, found = drawn()[0], []
    for row, key in zip(x, keys, strict=True):
        logits = np.einsum("d,dhk->hk", row / np.sqrt(8), p["kernel"]) + p["bias"]
        decay = np.exp(-np.exp(p["log_rate"]) * np.log1p(np.exp(logits[:, 0] + p["step_bias"])))
        squares = decay[:, None] * squares + (1 / (1 + np.exp(-logits[:, 1])))[:, None] * key**2
        r = np.log(squares + 1e-6) - p["center"][:, None]
        found.append(1.5 ** (-r / (1 + np.abs(r))))
    return np.array(found), squares


@functools.cache
def compiled():
    """One program for all that follows."""

    def run(x, keys, squares, mask, segment_ids, initial):
        return module()(x, keys, squares, mask, find_documents(segment_ids), initial)

    return jax.jit(run)


def run(x, keys, squares=None, mask=None, segment_ids=None, initial=None):
    """Rows of TIME tokens; without ids, no document starts."""
    rows = len(x)
    squares = np.zeros((rows, HEADS, WIDTH)) if squares is None else squares
    mask = np.ones((rows, TIME), bool) if mask is None else mask
    segment_ids = np.zeros((rows, TIME), np.int32) if segment_ids is None else segment_ids
    initial = np.zeros((HEADS, WIDTH)) if initial is None else initial
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, compiled()(x, keys, squares, mask, segment_ids, initial))


def test_factors_are_those_of_the_decayed_sums():
    """From any sums, in (2/3, 3/2), and the sums go on."""
    _, x, keys = drawn()
    squares = np.random.default_rng(1).uniform(0, 2, (BATCH, HEADS, WIDTH))
    factors, after = run(x, keys, squares)
    for row in range(BATCH):
        wanted, last = expected(x[row], keys[row], squares[row])
        np.testing.assert_allclose(factors[row], wanted, rtol=1e-12)
        np.testing.assert_allclose(after[row], last, rtol=1e-12)
    assert np.ptp(factors) > 0.3 and (factors > 2 / 3).all() and (factors < 1.5).all()


def test_a_later_token_changes_no_earlier_factor():
    _, x, keys = drawn()
    changed = keys.copy()
    changed[:, 7] *= -3.0
    before, after = run(x, keys)[0], run(x, changed)[0]
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).all()


@pytest.mark.parametrize("split", [1, 5, 11])
def test_padding_changes_nothing_and_pieces_equal_the_whole(split):
    """The first tokens, padded with others, then the rest from the sums they left."""
    _, x, keys = drawn()
    whole, last = run(x, keys)
    mask = np.broadcast_to(np.arange(TIME) < split, (BATCH, TIME))
    first, sums = run(x, keys, mask=mask)
    roll = lambda leaf: np.roll(leaf, -split, axis=1)  # noqa: E731
    second, after = run(roll(x), roll(keys), sums, np.broadcast_to(np.arange(TIME) < TIME - split, (BATCH, TIME)))
    np.testing.assert_allclose(first[:, :split], whole[:, :split], rtol=1e-12)
    np.testing.assert_allclose(second[:, : TIME - split], whole[:, split:], rtol=1e-12)
    np.testing.assert_allclose(after, last, rtol=1e-12)


def test_documents_start_with_the_sums_of_the_start():
    """Wherever they start; what is before them changes none of their bits."""
    _, x, keys = drawn()
    initial = np.random.default_rng(2).uniform(0, 2, (HEADS, WIDTH))
    ids = np.array([[1] * 5 + [2] * 7, [1] * 3 + [2] * 4 + [3] * 5], np.int32)
    factors, _ = run(x, keys, segment_ids=ids, initial=initial)
    for row, borders in enumerate(([0, 5, 12], [0, 3, 7, 12])):
        for begin, end in zip(borders[:-1], borders[1:], strict=True):
            wanted, _ = expected(x[row, begin:end], keys[row, begin:end], initial)
            np.testing.assert_allclose(factors[row, begin:end], wanted, rtol=1e-12)


def test_the_gradient_is_the_finite_difference():
    parameters, x, keys = drawn()
    generator = np.random.default_rng(3)
    weigh = generator.normal(size=keys.shape)
    with jax.enable_x64(True):
        graphdef, state = nnx.split(module())

        def loss(point):
            factors, sums = nnx.merge(graphdef, point[0])(point[1], point[2], jnp.zeros((BATCH, HEADS, WIDTH)))
            return jnp.sum(factors * weigh) + jnp.sum(sums)

        point = (state, jnp.asarray(x), jnp.asarray(keys))
        program = jax.jit(jax.value_and_grad(loss))
        assert_slope_is_the_difference(program, point, generator)
