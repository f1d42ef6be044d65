"""Generated text against the model's own forward pass, and text that streams out whole."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from tests.training.tiny import MODEL
from titans_jax.config import ConfigError
from titans_jax.data import load_tokenizer
from titans_jax.inference import Generator, Sampling, decode_step, decoding, prefill
from titans_jax.inference.generate import PIECES, cut_before, split_prompt, stream_before, stream_text
from titans_jax.training.run import init_model

TOKENIZER = load_tokenizer("byte")
GREEDY = Sampling(temperature=0)
LETTERS = "It reads, it learns, it remembers. "


@functools.cache
def tiny_model(kind: str):
    """Random weights, larger than initial ones, so that the most likely token depends on the context."""
    graphdef, params = init_model(dataclasses.replace(MODEL, pattern=(kind,), depth=1), 0)
    return graphdef, jax.tree.map(lambda x: 3.0 * x, params)


@functools.cache
def generator(kind: str) -> Generator:
    return Generator(tiny_model(kind)[0], TOKENIZER, GREEDY)


@pytest.mark.slow_but_for("20-attention", "20-mamba")
@pytest.mark.parametrize("kind", ["mac", "attention", "mamba"])
@pytest.mark.parametrize("prompt_tokens", [0, 20])
def test_greedy_text_is_what_the_forward_pass_finds_likeliest(kind, prompt_tokens):
    """Decoding never compiled for the whole length gives the tokens that the whole length gives.

    20 tokens need a compiled piece of 16 and four single steps, and cross a chunk (8) and a segment (16).
    """
    prompt = LETTERS[:prompt_tokens]
    tokens = list(generator(kind).tokens(tiny_model(kind)[1], prompt, max_tokens=14))
    if len(tokens) < 14:  # the text ends where the end of a document is likeliest
        tokens.append(TOKENIZER.eos_id)
    ids = np.array([[TOKENIZER.bos_id, *TOKENIZER.encode(prompt), *tokens[:-1]]], np.int32)
    logits = np.asarray(jax.jit(nnx.merge(*tiny_model(kind)).__call__)(ids))[0, prompt_tokens:, : TOKENIZER.vocab_size]
    # The two are equal to rounding, so a tie could go either way: ours must be as likely as the likeliest.
    chosen = logits[np.arange(len(tokens)), tokens]
    assert (chosen >= logits.max(axis=1) - 1e-4 * np.abs(logits).max()).all()
    assert len(set(tokens)) > 1  # not a model that repeats itself whatever it reads


def test_same_seed_same_text_and_max_tokens():
    graphdef, params = tiny_model("attention")
    warm = Generator(graphdef, TOKENIZER, Sampling(temperature=1.0))
    first, again, other = (list(warm.tokens(params, "ab", 12, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert list(warm.tokens(params, "ab", 5, 1)) == first[:5]
    assert list(warm.tokens(params, "ab", 0)) == []
    with pytest.raises(ConfigError, match="^max_tokens is -1; use at least 0$"):
        warm.stream(params, "ab", -1)
    with pytest.raises(ConfigError, match="^until has ''; use"):
        warm.stream(params, "ab", 1, until=[""])
    with pytest.raises(ConfigError, match="^max_tokens is -1; use at least 0$"):
        warm.complete(params, ["ab"], -1)
    with pytest.raises(ConfigError, match="^until has ''; use"):
        warm.complete(params, ["ab"], 1, until=["x", ""])
    assert warm.complete(params, [], 1) == []


def test_generation_ends_with_the_document():
    graphdef, params = tiny_model("attention")
    params = dict(params, head={"kernel": np.zeros_like(params["head"]["kernel"])})
    # Without a preference greedy takes the first id; a tokenizer whose documents end with it writes nothing.

    class EndsWithZero:
        vocab_size, bos_id, eos_id = 257, 256, 0
        encode, decode = TOKENIZER.encode, TOKENIZER.decode

    assert list(Generator(graphdef, EndsWithZero(), GREEDY).tokens(params, "ab", 5)) == []


@pytest.mark.slow
def test_prefill_and_decode_step_continue_one_another():
    model = nnx.merge(*tiny_model("mac"))
    tokens = np.frombuffer(LETTERS.encode(), np.uint8)[None, :18].astype(np.int32)
    expected = np.asarray(model(tokens))[0]
    logits, state = jax.jit(prefill)(model, tokens[:, :17], model.init_state(1))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(logits[0], expected[16], atol=1e-4 * scale)
    logits, _ = jax.jit(decode_step)(model, tokens[:, 17], state)
    np.testing.assert_allclose(logits[0], expected[17], atol=1e-4 * scale)


@pytest.mark.slow
def test_layers_in_a_scan_say_the_same(monkeypatch):
    """As accelerators decode; two prompts of different lengths side by side."""
    graphdef, params = tiny_model("mac")
    said = []
    for unrolls in (True, False):
        monkeypatch.setattr(decoding, "unrolls", lambda unrolls=unrolls: unrolls)
        said.append(Generator(graphdef, TOKENIZER, GREEDY).complete(params, [LETTERS[:20], LETTERS[:3]], 12))
    assert said[0] == said[1] and all(said[0])


@pytest.mark.parametrize("length", [1, 16, 17, 18, 256, 257, 600])
def test_prompt_pieces(length):
    pieces = list(split_prompt(np.arange(length)))
    np.testing.assert_array_equal(np.concatenate(pieces), np.arange(length))
    assert all(len(piece) in PIECES for piece in pieces[:-1]) and 1 <= len(pieces[-1]) <= min(PIECES)


@pytest.mark.parametrize("text", ["", "plain", "naïve — 日本語 🐍 end", "🐍" * 40, "x\ufffdy"])
def test_streamed_text_is_the_whole_text(text):
    pieces = list(stream_text(iter(TOKENIZER.encode(text).tolist()), TOKENIZER))
    assert "".join(pieces) == text
    assert all(pieces)


def test_streamed_bytes_that_are_no_text():
    ids = [0xFF, 0xFF, 0x41, 0xE2, 0x82, 0xAC, 0xE2, 0x42, 0xF0, 0x9F]
    pieces = list(stream_text(iter(ids), TOKENIZER))
    assert "".join(pieces) == TOKENIZER.decode(ids)
    # What is certain comes at once: the euro sign with its third byte, not before and not later.
    assert pieces[:2] == ["\ufffd\ufffdA", "€"]


@pytest.mark.parametrize("until", [["END"], ["a", "nd"], ["xyz"], ["\n\n", "."], ["nd the"]])
@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_text_that_comes_in_pieces_is_cut_as_the_whole_is(until, size):
    text = "EN and the END of it.\n\nE"
    pieces = list(stream_before((text[i : i + size] for i in range(0, len(text), size)), until))
    assert "".join(pieces) == cut_before(text, until) and all(pieces)
