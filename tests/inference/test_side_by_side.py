"""Prompts of unequal length side by side: each is answered as it is alone."""

import jax
import numpy as np
import pytest

from tests.inference.test_generate import GREEDY, TOKENIZER, generator, tiny_model
from titans_jax.inference import Generator, NotFiniteLogits, Sampling
from titans_jax.models import LanguageModel

PROMPTS = ["It reads, it learns, it remembers.", "", "It forgets what it has read", "It reads, it learns"]


@pytest.mark.slow_but_for("attention")
@pytest.mark.parametrize("kind", ["lmm", "attention", "mac", "mag", "window"])
def test_each_has_the_tokens_it_has_alone(kind):
    """The shortest is empty, so that all are read token by token; without it a piece of 16 is read by all."""
    graphdef, params = tiny_model(kind)
    alone = ["".join(generator(kind).stream(params, prompt, 14)) for prompt in PROMPTS]
    assert generator(kind).complete(params, PROMPTS, 14) == alone and len(set(alone)) > 1
    assert generator(kind).complete(params, PROMPTS[2:], 14) == alone[2:]


def test_drawn_texts_do_not_depend_on_their_neighbours():
    graphdef, params = tiny_model("attention")
    warm = Generator(graphdef, TOKENIZER, Sampling(temperature=1.0))
    together = warm.complete(params, PROMPTS[:2], 12, seed=5)
    assert together == ["".join(warm.stream(params, prompt, 12, seed=5)) for prompt in PROMPTS[:2]]


def test_a_text_ends_before_what_ends_it():
    graphdef, params = tiny_model("attention")
    whole = generator("attention").complete(params, PROMPTS, 14)
    stop = whole[0][3:5]
    ended = generator("attention").complete(params, PROMPTS, 14, until=[stop, "never"])
    assert ended == [text.split(stop)[0] for text in whole] != whole
    assert generator("attention").complete(params, PROMPTS, 0) == [""] * 4


def test_two_functions_serve_all_lengths(monkeypatch):
    traced, extend = [], LanguageModel.extend
    monkeypatch.setattr(LanguageModel, "extend", lambda *inputs: traced.append(inputs[1].shape) or extend(*inputs))
    graphdef, params = tiny_model("attention")
    fresh = Generator(graphdef, TOKENIZER, GREEDY)
    for length in (20, 30, 50):
        fresh.complete(params, ["a" * length, "b" * (length + 7)], 3)
    assert traced == [(2, 16), (1, 1)]  # the second by a vmap over rows of one


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_end_in_a_sentence(value):
    graphdef, params = tiny_model("attention")
    broken = params | {"head": jax.tree.map(lambda x: x.at[0, 5].set(value), params["head"])}
    with pytest.raises(NotFiniteLogits, match="logits after 1 tokens are not finite; a learning rate"):
        generator("attention").complete(broken, ["", "ab"], 3)
    with pytest.raises(NotFiniteLogits):
        list(generator("attention").tokens(broken, "ab", 3))
