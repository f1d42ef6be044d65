"""Channel-wise decay in both implementations, against the sums over past tokens written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax.ops import channel_decay, channel_decay_pallas

IMPLEMENTATIONS = {
    "xla": channel_decay.ChannelDecay,
    "xla-by-products": channel_decay.ChannelDecayByProducts,
    "pallas": channel_decay_pallas.ChannelDecay,
}
CHANNELS = 3
each = pytest.mark.parametrize("implementation", ["xla", "pallas"])
every = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)  # where columns are broadcast
# One token, a register's eight rows, and more of them that are no power of two.
each_length = pytest.mark.parametrize("tokens", [1, 8, 21])


def left(gates, t, i):
    """What is left at token t of token i, [channels]: the product of the gates of i + 1 .. t."""
    return np.prod(gates[i + 1 : t + 1], axis=0)


def summed(gates, x, y):
    """[t, i] = sum_c x_tc y_ic times what is left, 0 above the diagonal."""
    tokens = range(len(x))
    return np.array([[np.sum(x[t] * y[i] * left(gates, t, i)) if i <= t else 0 for i in tokens] for t in tokens])


def draw(tokens, channels=CHANNELS, seed=0):
    generator = np.random.default_rng(seed)
    gates = generator.uniform(0.05, 1, (tokens, channels))
    x, other, y = generator.normal(size=(3, tokens, channels))
    return gates, x, other, y


def documents(tokens):
    """bool [tokens, tokens]: whether i <= t is in t's document; documents start at 0, 3 and 9."""
    number = np.searchsorted([3, 9], np.arange(tokens), side="right")
    return (number[:, None] == number) & np.tri(tokens, dtype=bool)


@functools.partial(jax.jit, static_argnames=("implementation", "steps"))
def compute(implementation, gates, xs, y, mixed_scores=None, visible=None, steps=1):
    """All that an implementation has."""
    found = IMPLEMENTATIONS[implementation](channel_decay.clipped(jnp.log(gates)), visible)
    return {
        "since_start": found.since_start(),
        "to_end": found.to_end(),
        "whole": found.whole(),
        "scores": found.scores(xs, y, y.dtype, steps),
        "mix": None if mixed_scores is None else found.mix(mixed_scores, y, y.dtype),
    }


@functools.cache
def problem(tokens):
    """Gates, two readers, what they read, and the scores that mix it."""
    return *draw(tokens), np.tril(np.random.default_rng(1).normal(size=(tokens, tokens)))


@functools.cache
def answer(implementation, tokens, packed):
    gates, x, other, y, scores = problem(tokens)
    visible = documents(tokens) if packed else None
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, compute(implementation, gates, (x, other), y, scores, visible))


def assert_close(got, wanted, atol=1e-12):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=atol)


@each
@each_length
def test_what_is_left_of_the_start_and_at_the_end(implementation, tokens):
    gates, *_ = problem(tokens)
    found = answer(implementation, tokens, False)
    assert_close(found["since_start"], np.cumprod(gates, axis=0))
    assert_close(found["to_end"], [left(gates, tokens - 1, i) for i in range(tokens)])
    assert_close(found["whole"], np.prod(gates, axis=0)[:, None])


@each
@pytest.mark.parametrize("tokens, packed", [(1, False), (8, False), (21, False), (21, True)])
def test_scores(implementation, tokens, packed):
    """Several readers at once; what is not visible is 0."""
    gates, x, other, y, _ = problem(tokens)
    visible = documents(tokens) if packed else np.tri(tokens, dtype=bool)
    for reader, found in zip((x, other), answer(implementation, tokens, packed)["scores"], strict=True):
        assert_close(found, np.where(visible, summed(gates, reader, y), 0))


@every
@pytest.mark.parametrize("tokens", [8, 21])
def test_mix(implementation, tokens):
    gates, *_, deltas, scores = problem(tokens)
    wanted = [sum(scores[t, i] * deltas[i] * left(gates, t, i) for i in range(t + 1)) for t in range(tokens)]
    assert_close(answer(implementation, tokens, False)["mix"], wanted)


@each
def test_documents_start_anew(implementation):
    """A token has left of its document's start the product of the gates since then."""
    tokens = 21
    gates, *_ = problem(tokens)
    wanted = [np.prod(gates[documents(tokens)[t]], axis=0) for t in range(tokens)]
    assert_close(answer(implementation, tokens, True)["since_start"], wanted)


@each
@pytest.mark.parametrize("tokens, steps", [(8, 2), (9, 2), (9, 3)])
def test_scores_of_tokens_with_inner_steps(implementation, tokens, steps):
    """Only the first step of a token has a gate; also where the last token misses a step."""
    gates, x, _, y = draw(tokens)
    gates = np.where(np.arange(tokens)[:, None] % steps == 0, gates, 1)
    with jax.enable_x64(True):
        (found,) = compute(implementation, gates, (x,), y, steps=steps)["scores"]
    assert_close(found, summed(gates, x, y))


@every
def test_scores_of_one_channel(implementation):
    gates, x, _, y = draw(13, channels=1)
    with jax.enable_x64(True):
        (found,) = compute(implementation, gates, (x,), y)["scores"]
    assert_close(found, summed(gates, x, y))


@each
def test_quotients_of_tiny_products(implementation):
    """1e-8^8 is nothing in float32; between neighbours the decay is still 1e-8, and no 0 / 0."""
    gates, ones = np.full((8, CHANNELS), 1e-8, np.float32), np.ones((8, CHANNELS), np.float32)
    (found,) = compute(implementation, gates, (ones,), ones)["scores"]
    steps = np.subtract.outer(np.arange(8), np.arange(8))
    np.testing.assert_allclose(found, CHANNELS * 1e-8 ** np.where(steps >= 0, steps, np.inf), rtol=1e-4, atol=1e-30)


def test_clipped():
    """Padding keeps all, and what would be -inf is the cut."""
    log_gate = channel_decay.clipped(jnp.asarray([[-jnp.inf, -1.0], [-2.0, -3.0]]), jnp.asarray([True, False]))
    np.testing.assert_array_equal(log_gate, [[channel_decay.LOG_CUT, -1], [0, 0]])


@each
def test_gradients(implementation):
    """Along a random direction of the log gates, as a difference of the sums."""
    tokens = 8
    gates, x, _, y = draw(tokens)
    generator = np.random.default_rng(2)
    probe, direction = np.tril(generator.normal(size=(tokens, tokens))), generator.normal(size=gates.shape)

    @jax.jit
    def slope(log_gate):
        def total(log_gate):
            found = IMPLEMENTATIONS[implementation](log_gate)
            (scores,) = found.scores((jnp.asarray(x),), jnp.asarray(y), x.dtype)
            mixed = found.mix(jnp.asarray(probe), jnp.asarray(y), x.dtype)
            return jnp.sum(scores * probe) + jnp.sum(mixed * x) + jnp.sum(found.to_end() * x)

        return jnp.sum(jax.grad(total)(log_gate) * direction)

    def total(by):
        moved = gates * np.exp(by * direction)
        return sum(
            probe[t, i] * np.sum(2 * x[t] * y[i] * left(moved, t, i)) for t in range(tokens) for i in range(t + 1)
        ) + sum(np.sum(left(moved, tokens - 1, i) * x[i]) for i in range(tokens))

    wanted = (total(1e-5) - total(-1e-5)) / 2e-5
    with jax.enable_x64(True):
        np.testing.assert_allclose(slope(jnp.log(gates)), wanted, rtol=1e-7)
