"""Which tokens can be drawn, and how often."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax.config import ConfigError
from titans_jax.inference import Sampling, sample

PROBABILITIES = np.array([0.4, 0.1, 0.3, 0.15, 0.05])


def frequencies(sampling: Sampling, vocab_size: int | None = None, draws: int = 4000) -> np.ndarray:
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(PROBABILITIES, jnp.float32)), (draws, 5))
    tokens = sample(logits, jax.random.key(0), sampling, vocab_size)
    assert tokens.shape == (draws,) and tokens.dtype == jnp.int32
    return np.bincount(np.asarray(tokens), minlength=5) / draws


@pytest.mark.parametrize(
    "sampling, expected",
    [
        (Sampling(temperature=1.0), PROBABILITIES),
        (Sampling(temperature=0.5), PROBABILITIES**2),
        (Sampling(temperature=0), [1, 0, 0, 0, 0]),
        (Sampling(temperature=1e-38), [1, 0, 0, 0, 0]),
        (Sampling(temperature=1e-37, top_k=3), [1, 0, 0, 0, 0]),
        (Sampling(temperature=1.0, top_k=2), [0.4, 0, 0.3, 0, 0]),
        (Sampling(temperature=1.0, top_k=99), PROBABILITIES),
        (Sampling(temperature=1.0, top_p=0.39), [1, 0, 0, 0, 0]),
        (Sampling(temperature=1.0, top_p=0.6), [0.4, 0, 0.3, 0, 0]),
        (Sampling(temperature=1.0, top_p=0.75), [0.4, 0, 0.3, 0.15, 0]),
        (Sampling(temperature=1.0, top_p=1.0), PROBABILITIES),
        # Of the two most likely tokens, renormalised to 4/7 and 3/7, the first alone reaches one half.
        (Sampling(temperature=1.0, top_k=2, top_p=0.5), [1, 0, 0, 0, 0]),
    ],
)
def test_frequencies(sampling, expected):
    expected = np.asarray(expected) / np.sum(expected)
    # Five standard deviations of a frequency of 4,000 draws.
    np.testing.assert_allclose(frequencies(sampling), expected, atol=5 * 0.5 / np.sqrt(4000))
    assert (frequencies(sampling)[expected == 0] == 0).all()


def test_ids_beyond_the_tokenizer_are_never_drawn():
    assert frequencies(Sampling(temperature=1.0), vocab_size=2)[2:].sum() == 0
    assert frequencies(Sampling(temperature=0), vocab_size=2)[0] == 1
    for hottest in (1e30, 1e38, 1e300):
        np.testing.assert_allclose(frequencies(Sampling(temperature=hottest), vocab_size=2)[:2], 0.5, atol=0.04)


def test_the_smallest_top_p_keeps_the_likeliest_token():
    """1e-40 is 0 to a device."""
    logits = jnp.log(jnp.array([[0.1, 0.6, 0.3]]))
    for top_p in (1e-30, 1e-40, 1e-300):
        assert int(sample(logits, jax.random.key(0), Sampling(temperature=1.0, top_p=top_p))[0]) == 1


@pytest.mark.parametrize(
    "field, value, works",
    [("temperature", -1.0, "0 for"), ("temperature", float("nan"), "0 for"), ("top_k", 0, "at least 1"),
     ("top_p", 0.0, r"\(0, 1\]"), ("top_p", 1.5, r"\(0, 1\]")],
)  # fmt: skip
def test_wrong_values_are_refused(field, value, works):
    with pytest.raises(ConfigError, match=f"{field} is {value}; use .*{works}"):
        Sampling(**{field: value})


def test_min_p_keeps_what_is_likely_beside_the_likeliest():
    """Probabilities 0.5, 0.3, 0.15, 0.05: at least 0.2 times 0.5 are the first three."""
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    drawn = {int(sample(logits, jax.random.key(seed), Sampling(temperature=1.0, min_p=0.2))[0]) for seed in range(100)}
    assert drawn == {0, 1, 2}


def test_a_repetition_penalty_is_for_seen_tokens_only():
    """Divided above 0, multiplied below."""
    seen = jnp.array([[True, False, True, False]])
    greedy = Sampling(temperature=0, repetition_penalty=2.0)
    key = jax.random.key(0)
    assert int(sample(jnp.array([[3.0, 2.0, 0.0, 0.0]]), key, greedy, seen=seen)[0]) == 1  # 1.5 against 2
    assert int(sample(jnp.array([[5.0, 2.0, 0.0, 0.0]]), key, greedy, seen=seen)[0]) == 0  # 2.5 against 2
    assert int(sample(jnp.array([[-1.0, -1.5, -3.0, -9.0]]), key, greedy, seen=seen)[0]) == 1  # -2 against -1.5


@pytest.mark.parametrize("fields", [{"min_p": 0.0}, {"min_p": 1.5}, {"repetition_penalty": 0.0}])
def test_wrong_values_are_refused_too(fields):
    with pytest.raises(ConfigError, match=f"{next(iter(fields))} is "):
        Sampling(**fields)
