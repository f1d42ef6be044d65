"""The selective scan against a loop over its equations: values, gradients, splits, resets, and what is kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slopes import assert_slope_is_the_difference

from titans_jax.ops.selective_scan import CHUNK, selective_scan

BATCH, CHANNELS, ENTRIES = 2, 3, 4
LONG = 2 * CHUNK + 22
"""Tokens of three chunks of 50."""
WAYS = pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "in_order"])
scan = functools.partial(jax.jit, static_argnames="parallel")(selective_scan)


def drawn(time, dtype=np.float64, seed=0):
    """x, step, a, b, c and the state before."""
    rng = np.random.default_rng(seed)
    x, step = rng.normal(size=(2, BATCH, time, CHANNELS))
    b, c = rng.normal(size=(2, BATCH, time, ENTRIES))
    a, state = -np.exp(rng.normal(size=(ENTRIES, CHANNELS))), rng.normal(size=(BATCH, ENTRIES, CHANNELS))
    return [jnp.asarray(leaf, dtype) for leaf in (x, 0.3 * np.exp(step), a, b, c, state)]


def loop(x, step, a, b, c, state, resets=None):
    """h_t = exp(D_t A) h_{t-1} + D_t B_t x_t ; y_t = C_t h_t, one number at a time."""
    x, step, a, b, c, h = (np.array(leaf, np.float64) for leaf in (x, step, a, b, c, state))
    y = np.zeros_like(x)
    for row, t in np.ndindex(x.shape[:2]):
        if resets is not None and resets[row, t]:
            h[row] = 0
        for channel in range(x.shape[2]):
            for n in range(len(a)):
                left = np.exp(step[row, t, channel] * a[n, channel])
                written = step[row, t, channel] * b[row, t, n] * x[row, t, channel]
                h[row, n, channel] = left * h[row, n, channel] + written
                y[row, t, channel] += c[row, t, n] * h[row, n, channel]
    return y, h


def assert_close(found, expected, tolerance=1e-10):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())


def resets_at(time, *places):
    """Resets before these (row, token) pairs."""
    found = np.zeros((BATCH, time), bool)
    found[tuple(np.array(places).T)] = True
    return jnp.asarray(found)


@WAYS
@pytest.mark.parametrize("time", [1, 2, CHUNK, CHUNK + 1, LONG])
def test_equals_the_loop(time, parallel):
    with jax.enable_x64(True):
        given = drawn(time)
        assert_close(scan(*given, parallel=parallel), loop(*given))


@WAYS
def test_resets_start_from_nothing(parallel):
    """At the first token, inside a chunk, at its border and at two tokens in a row, in some rows."""
    with jax.enable_x64(True):
        given, resets = drawn(LONG), resets_at(LONG, (0, 0), (0, 7), (0, 8), (1, 50), (1, LONG - 1))
        found = scan(*given, resets, parallel=parallel)
        assert_close(found, loop(*given, resets))
        x, step, a, b, c, state = given
        alone = scan(x[1:, 50:-1], step[1:, 50:-1], a, b[1:, 50:-1], c[1:, 50:-1], 0 * state[1:], parallel=parallel)
        assert_close([found[0][1:, 50:-1]], alone[:1])


@WAYS
def test_any_split_equals_the_whole(parallel):
    with jax.enable_x64(True):
        x, step, a, b, c, state = drawn(LONG)
        whole, outputs, begin = scan(x, step, a, b, c, state, parallel=parallel), [], 0
        for size in (1, 30, CHUNK, 2, LONG - CHUNK - 33):
            part = slice(begin, begin + size)
            y, state = scan(x[:, part], step[:, part], a, b[:, part], c[:, part], state, parallel=parallel)
            outputs.append(y)
            begin += size
        assert begin == LONG
        assert_close((jnp.concatenate(outputs, axis=1), state), whole)


@WAYS
def test_a_step_of_zero_changes_nothing(parallel):
    """Not a bit of the state, whatever the token holds."""
    x, step, a, b, c, state = drawn(9, np.float32)
    pause = jnp.asarray([1, 1, 1, 1, 0, 0, 0, 0, 0], jnp.float32)[None, :, None]
    _, before = scan(x[:, :4], step[:, :4], a, b[:, :4], c[:, :4], state, parallel=parallel)
    _, after = scan(x, step * pause, a, b, c, state, parallel=parallel)
    np.testing.assert_allclose(after, before, rtol=1e-6)
    _, still = scan(x[:, 4:], 0 * step[:, 4:], a, b[:, 4:], c[:, 4:], state, parallel=parallel)
    np.testing.assert_array_equal(still, state)


@WAYS
def test_an_output_depends_on_no_later_token(parallel):
    """Bit for bit, over three chunks."""
    x, step, a, b, c, state = drawn(LONG, np.float32)
    before = np.array(scan(x, step, a, b, c, state, parallel=parallel)[0])
    for t in (0, 1, 49, 50, 77, LONG - 1):
        given = [leaf.at[:, t].add(1) for leaf in (x, step, b, c)]
        after = np.array(scan(*given[:2], a, *given[2:], state, parallel=parallel)[0])
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t : t + 2] != before[:, t : t + 2]).any(axis=2).all()


@WAYS
def test_the_slope_is_the_difference(parallel):
    """Of the outputs and of the last state, by all inputs, over three chunks with resets."""
    with jax.enable_x64(True):
        resets = resets_at(LONG, (0, 7), (1, 50))
        weights = jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, LONG, CHANNELS)))

        def loss(given):
            y, state = selective_scan(*given, resets, parallel=parallel)
            return jnp.sum(weights * y) + jnp.sum(jnp.sin(state))

        program, given = jax.jit(jax.value_and_grad(loss)), drawn(LONG)
        assert_slope_is_the_difference(program, given, np.random.default_rng(2))
        for gradient in program(given)[1]:
            assert np.isfinite(gradient).all() and np.any(gradient != 0)


@WAYS
def test_extreme_steps_and_rates_are_finite(parallel):
    """A state that is forgotten whole, one that is kept for ever, and steps of 0."""
    x, step, a, b, c, state = drawn(CHUNK + 1, np.float32)
    for scale, rate in ((1e4, 1e4), (1.0, 0.0), (0.0, 1.0)):

        def loss(given, rate=rate):
            x, step, a, b, c, state = given
            y, state = selective_scan(x, step, rate * a, b, c, state, parallel=parallel)
            return jnp.sum(y) + jnp.sum(state)

        value, gradients = jax.jit(jax.value_and_grad(loss))([x, scale * step, a, b, c, state])
        assert np.isfinite(value) and all(np.isfinite(gradient).all() for gradient in gradients)


def test_computes_wide_and_answers_in_its_own_type():
    given = drawn(LONG, np.float32)
    narrow = [leaf.astype(jnp.bfloat16) for leaf in given]
    x, step, a, b, c, state = (leaf.astype(jnp.float32) for leaf in narrow)
    expected, last = scan(x, step, a, b, c, state)
    y, after = scan(narrow[0], step, a, narrow[3], narrow[4], state)
    assert (y.dtype, after.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(y, expected.astype(jnp.bfloat16))
    np.testing.assert_array_equal(after, last)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="XLA for GPUs keeps transposed copies of the inputs")
@WAYS
def test_the_gradient_does_not_keep_the_states_of_all_tokens(parallel):
    """What the compiled gradient needs beside its inputs and outputs, against the states of all tokens; and what a row
    that is twice as long needs more."""

    def needed(time):
        shapes = [(1, time, 8), (1, time, 8), (64, 8), (1, time, 64), (1, time, 64), (1, 64, 8)]
        given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        gradient = jax.grad(lambda given: jnp.sum(selective_scan(*given, parallel=parallel)[0]))
        return jax.jit(gradient).lower(given).compile().memory_analysis().temp_size_in_bytes

    time = 64 * CHUNK
    states = 4 * time * 64 * 8
    assert needed(time) < states / 3
    assert needed(2 * time) - needed(time) < 2 * states / CHUNK  # a state per chunk
