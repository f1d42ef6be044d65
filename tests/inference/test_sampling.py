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


@pytest.mark.parametrize(
    "field, value, works",
    [("temperature", -1.0, "0 for"), ("temperature", float("nan"), "0 for"), ("top_k", 0, "at least 1"),
     ("top_p", 0.0, r"\(0, 1\]"), ("top_p", 1.5, r"\(0, 1\]")],
)  # fmt: skip
def test_wrong_values_are_refused(field, value, works):
    with pytest.raises(ConfigError, match=f"{field} is {value}; use .*{works}"):
        Sampling(**{field: value})
