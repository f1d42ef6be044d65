"""Kept memories read together: shares and sums against loops in numpy, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from titans_jax import memory
from titans_jax.config import Config, ConfigError, MemoryConfig, ModelConfig
from titans_jax.config.validate import validate
from titans_jax.memory.caching import AGGREGATIONS, read_together, sum_over_kept
from titans_jax.models import check_model

RNG = np.random.default_rng(0)
TIME, KEPT = 5, 4
SCORES, OPENING = RNG.normal(size=(TIME, KEPT + 1)), RNG.normal(size=(TIME, KEPT))
VISIBLE = np.array(
    [[False] * 4, [True, False, False, False], [True] * 3 + [False], [False, True, True, True], [True] * 4]
)


def shares_of(name, **arguments):
    visible = np.concatenate([VISIBLE, np.ones((TIME, 1), bool)], axis=1)
    with jax.enable_x64(True):
        return np.array(AGGREGATIONS[name](**arguments).shares(*map(jnp.asarray, (SCORES, OPENING, visible))))


def test_residual_and_average_take_all_alike():
    seen = np.concatenate([VISIBLE, np.ones((TIME, 1))], axis=1)
    np.testing.assert_array_equal(shares_of("residual"), seen)
    np.testing.assert_allclose(shares_of("average"), seen / seen.sum(axis=1, keepdims=True), rtol=1e-15)


@pytest.mark.parametrize("name, most", [("gated", 4), ("soup", 4), ("sparse", 2), ("sparse", 4)])
def test_gates_are_a_softmax_of_what_is_seen_and_chosen(name, most):
    found = shares_of(name, **({"k": most} if name == "sparse" else {}))
    for t in range(TIME):
        seen = sorted(np.flatnonzero(VISIBLE[t]), key=lambda i: -OPENING[t, i])[:most]
        expected = np.zeros(KEPT + 1)
        for i in [*seen, KEPT]:
            expected[i] = np.exp(SCORES[t, i])
        np.testing.assert_allclose(found[t], expected / expected.sum(), rtol=1e-12)


@pytest.mark.parametrize("time", [9, 23, 35])
def test_a_row_reads_the_ends_of_its_earlier_segments(time):
    """By halves it is the sum over all, of which a token's own and later segments have no share; segments of 4."""
    count = (time - 1) // 4
    kept, rows = RNG.normal(size=(count, 3, 2)), RNG.normal(size=(time, 3))
    shares = RNG.normal(size=(time, count)) * (np.arange(time)[:, None] // 4 > np.arange(count))
    expected = np.einsum("ti,td,ide->te", shares, rows, kept)
    product = jax.jit(lambda *arrays: sum_over_kept(lambda matrix, x: x @ matrix, *arrays, 4))
    with jax.enable_x64(True):
        found = product(*map(jnp.asarray, (kept, rows, shares)))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("architecture", ["residual_mlp", "linear"])
def test_answers_and_soups(architecture):
    """Against reads of numpy memories; a linear soup is the sum of answers."""
    preset = {"linear": "deltanet", "residual_mlp": "ttt_mlp"}[architecture]
    rule = memory.presets.PRESETS[preset].make()
    shapes = rule.shapes(4)
    kept = [RNG.normal(size=(3, *shape)) for shape in shapes]
    queries, running, shares = RNG.normal(size=(2, 4)), RNG.normal(size=(2, 4)), RNG.uniform(size=(2, 4))
    norm_scale = RNG.normal(size=4)
    numpy_rule = oracle.Rule({"linear": "mlp"}.get(architecture, architecture), "l2", False, 1)

    def read(weights, query):
        return oracle.read(numpy_rule, weights, norm_scale, query)

    answers, soups = shares[:, 3:] * running, shares[:, 3:] * running
    for t in range(2):
        past = shares[t, :3]
        answers[t] += sum(share * read([w[i] for w in kept], queries[t]) for i, share in enumerate(past))
        mean = [np.tensordot(past / past.sum(), w, 1) for w in kept]
        soups[t] += past.sum() * read(mean, queries[t])
    with jax.enable_x64(True):
        arrays = ({"norm_scale": jnp.asarray(norm_scale)}, tuple(map(jnp.asarray, kept)))
        arrays += tuple(map(jnp.asarray, (shares, queries, running)))
        found = {name: read_together(AGGREGATIONS[name](), rule, *arrays) for name in ("gated", "soup")}
    np.testing.assert_allclose(found["gated"], answers, rtol=1e-12)
    np.testing.assert_allclose(found["soup"], soups, rtol=1e-12)
    if architecture == "linear":
        np.testing.assert_allclose(found["soup"], found["gated"], rtol=1e-12)


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"caching": "gate"}, "model.memory.caching is 'gate'; use residual, average, gated, soup or sparse; did you "
         "mean gated?"),
        ({"caching": "sparse(k=True)"}, "model.memory.caching is 'sparse(k=True)', and k is True; use a whole number"),
        ({"caching": "sparse(n=3)"}, "model.memory.caching is 'sparse(n=3)', which takes k, not n"),
        ({"caching": "sparse(k=0)"}, "model.memory.caching is 'sparse(k=0)'; k is 0: use a whole number of 1 or more, "
         "for example 4"),
        ({"caching": "gated", "cache_segment": 40}, "model.memory.cache_segment is 40; use a multiple of "
         "model.memory.chunk_size 16, such as 32"),
        ({"cache_segment": 0}, "model.memory.cache_segment is 0; use at least 1"),
        ({"cache_segmentation": "binary"}, "model.memory.cache_segmentation is 'binary'; use constant or logarithmic"),
        ({"caching": "gated", "cache_segmentation": "logarithmic", "cache_restart": True}, "model.memory.cache_restart "
         "is True, and model.memory.cache_segmentation 'logarithmic', whose memories have read many segments; use "
         "False, or constant"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(fields, sentence):
    model = ModelConfig(pattern=("lmm",), memory=MemoryConfig(**fields))
    with pytest.raises(ConfigError) as refused:
        validate(Config(model=model))
    assert str(refused.value) == sentence


def test_a_block_that_keeps_nothing_refuses_caching():
    model = ModelConfig(pattern=("lmm", "mac"), memory=MemoryConfig(caching="gated"))
    with pytest.raises(
        ConfigError, match=r"^model\.memory\.caching is 'gated', which mac does not do.* lmm, mag, mal or retrofit$"
    ):
        check_model(model)
