"""Likelihoods of many continuations at once against the model's own, one at a time."""

import dataclasses

import jax
import numpy as np
import pytest

from tests import child
from tests.evaluation.test_positions import run_of
from titans_jax.evaluation import scoring
from titans_jax.evaluation.scoring import Score, Scorer
from titans_jax.models import LanguageModel

LENGTHS = [(1, 5), (9, 1), (40, 30), (3, 0), (1, 90), (20, 4), (20, 6)]
SHARED = [(30, 3), (30, 25), (30, 7), (41, 2), (41, 9), (41, 1)]


def make_requests(lengths=(*LENGTHS, *SHARED), seed=0):
    """Contexts of one length are the same one."""
    draw = lambda seed, count: np.random.default_rng(seed).integers(0, 256, count).astype(np.int32)  # noqa: E731
    return [(draw(context, context), draw((seed, number), after)) for number, (context, after) in enumerate(lengths)]


def own_scores(run, requests):
    """Of the model's logits for a whole text alone, padded to one length."""
    forward = jax.jit(lambda tokens: jax.nn.log_softmax(run.model(tokens)))
    found = []
    for context, continuation in requests:
        text = np.concatenate([context, continuation])
        logits = np.asarray(forward(np.pad(text, (0, 96 - len(text)))[None]))[0, len(context) - 1 : len(text) - 1]
        own = logits[np.arange(len(continuation)), continuation]
        found.append((own.sum(dtype=np.float64), bool((logits.argmax(axis=1) == continuation).all())))
    return found


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(scoring, "WINDOW", 16)
    monkeypatch.setattr(scoring, "ROWS", 4)
    monkeypatch.setattr(scoring, "FEW", 2)


@pytest.mark.slow_but_for("attention")
@pytest.mark.parametrize("kind", ["lmm", "mac", "mag", "attention"])
def test_scores_are_the_model_s_own_and_one_window_of_tokens_is_compiled(tmp_path, kind, small_windows, monkeypatch):
    run, requests = run_of(tmp_path, kind), make_requests()
    expected = own_scores(run, requests)
    traced, read, extend = [], [], LanguageModel.extend
    monkeypatch.setattr(
        LanguageModel, "extend", lambda *inputs, **how: traced.append(inputs[1].shape) or extend(*inputs, **how)
    )
    scorer = Scorer(run)
    compiled, scorer._read = scorer._read, lambda *inputs: read.append(1) or compiled(*inputs)
    found = dict(scorer.score(requests))
    assert sorted(found) == list(range(len(requests)))
    for number, (nats, greedy) in enumerate(expected):
        np.testing.assert_allclose(found[number].log_likelihood, nats, rtol=1e-5, atol=1e-4)
        assert found[number].greedy == greedy and found[number].finite
    assert found[3] == Score(0, True, True)  # no tokens
    assert traced == [(4, 16)]
    # Of 4 rows of 24 to 91 tokens 6 windows, of three of 3 to 10 tokens 1; those of a context of 20 tokens are among
    # them, of which one window in all would be saved. The contexts of 30 and 41 tokens share 1 of theirs, and their 6
    # continuations, four at a time, are read in 3 and 2 more.
    assert len(read) == 6 + 1 + 1 + 3 + 2


def test_windows_are_whole_chunks_and_segments_and_rows_those_that_memory_holds(tmp_path, monkeypatch):
    run = run_of(tmp_path, "lmm")  # chunks of 4
    assert Scorer(run).window == 64 and Scorer(run).rows == 64
    monkeypatch.setattr(scoring, "WINDOW", 6)
    assert Scorer(run).window == 4
    monkeypatch.setattr(scoring, "WINDOW", 2)
    assert Scorer(run).window == 4 and list(Scorer(run)._pieces(9)) == [(0, 4), (4, 4), (8, 2)]
    monkeypatch.setattr(scoring, "STATE_BYTES", 1000)
    assert Scorer(run).rows == 1


def test_logits_that_are_not_finite_are_told(tmp_path, small_windows):
    run = run_of(tmp_path, "lmm", depth=1)
    table = run.params["embedding"]["embedding"]
    broken = dataclasses.replace(run, params=run.params | {"embedding": {"embedding": table.at[7].set(np.nan)}})
    seven, other = np.full(3, 7, np.int32), np.full(3, 9, np.int32)
    found = dict(Scorer(broken).score([(other, other), (seven, other)]))
    assert found[0].finite and np.isfinite(found[0].log_likelihood) and not found[1].finite


DEVICES = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
from pathlib import Path
import numpy as np
from tests.evaluation import test_positions, test_scoring
from titans_jax.evaluation import scoring
from titans_jax.evaluation.evaluators import on_all_devices
from titans_jax.inference import Generator, Sampling
scoring.WINDOW, scoring.ROWS, scoring.FEW = 16, 4, 2
run, requests = test_positions.run_of(Path("."), "lmm"), test_scoring.make_requests()
prompts = ["ab", "abcdefghijklmnopqrstuvw"]

def measure(run):
    generator = Generator(run.graphdef, run.tokenizer, Sampling(temperature=0))
    scorer = scoring.Scorer(run)
    scores = dict(scorer.score(requests))
    return scores, generator.complete(run.params, prompts, 5), scorer._read._cache_size()

alone, text, _ = measure(run)
with on_all_devices(run) as spread:
    assert len(jax.tree.leaves(spread.params)[0].sharding.device_set) == 2
    with on_all_devices(spread) as same:  # as in a training, whose parameters are spread its own way
        assert same is spread
    state = scoring.Scorer(spread)._empty(4, 64)
    assert any(len({str(s.index) for s in leaf.addressable_shards}) == 2 for leaf in jax.tree.leaves(state))
    shared, again, compiled = measure(spread)
assert compiled == 1 and text == again, (compiled, text, again)
for number, score in alone.items():
    np.testing.assert_allclose(shared[number].log_likelihood, score.log_likelihood, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.processes
@pytest.mark.slow
def test_two_devices_share_the_rows():
    child.run(DEVICES)
