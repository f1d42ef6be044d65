"""Values of a size of their own (`normalize_values`), and those that a memory's reads are added to (`value_skip`)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from flax import nnx
from test_packed_documents import assert_documents_alone, pack
from test_streaming import assert_same, read_in_pieces

from titans_jax.config import ConfigError
from titans_jax.layers import memory_layer
from titans_jax.models import LanguageModel

KINDS = {
    "plain": {},
    "cached": {"caching": "gated", "cache_segment": 8},
    "hierarchical": {"chunk_size": 8, "local_chunks": (4,), "shard": 8},
}
"""The layers with memories that values are written into."""
LETTER = {"tie_keys": False, "skip_projection": False}
BOTH = {"normalize_values": True, "value_skip": True} | LETTER
TIED = BOTH | {"tie_keys": True, "skip_projection": True}


def with_fields(config, **fields):
    return dataclasses.replace(config, memory=dataclasses.replace(config.memory, **fields))


def layer_of(config):
    return jax.jit(lambda: memory_layer(config, rngs=nnx.Rngs(0)))()


def inputs(config, time=11):
    return jnp.asarray(np.random.default_rng(0).normal(size=(2, time, config.dim)))


def test_values_have_the_size_of_what_a_memory_says():
    """Each one's root mean square is 1; their direction is that of the values that are left as they are."""
    with jax.enable_x64(True):
        config = small.config("lmm", memory=LETTER)
        plain, sized = (layer_of(with_fields(config, normalize_values=on)) for on in (False, True))
        x = inputs(config)
        features = jax.jit(lambda layer: layer.features(x, layer.init_state(2))[0])
        before, after = (jax.tree.map(np.asarray, features(layer)) for layer in (plain, sized))
    np.testing.assert_allclose(np.sqrt(np.mean(after["value"] ** 2, axis=-1)), 1, rtol=2e-3)  # l2_normalize's epsilon
    sizes = np.sqrt(np.mean(before["value"] ** 2, axis=-1, keepdims=True))
    np.testing.assert_allclose(after["value"], before["value"] / sizes, rtol=2e-3)
    for name in ("query", "key"):
        np.testing.assert_array_equal(after[name], before[name])


@pytest.mark.parametrize("writes", [True, False], ids=["written", "not_written"])
@pytest.mark.slow_but_for("plain-written", "hierarchical-not_written")
@pytest.mark.parametrize("kind", ["plain", "hierarchical"])
def test_a_skip_adds_a_tokens_own_values_to_what_is_read(kind, writes):
    """And to nothing else: state and report are as without it; its factor is one number of every head, 1/2 at first."""
    with jax.enable_x64(True):
        config = small.config("lmm", memory=KINDS[kind] | LETTER)
        plain, skipping = (layer_of(with_fields(config, value_skip=on)) for on in (False, True))
        np.testing.assert_array_equal(skipping.skip[...], np.full(config.num_heads, 0.5))
        factors = jnp.array([0.3, -2.0])
        skipping.skip[...] = factors
        plain.writes = skipping.writes = writes
        x = inputs(config)
        run = jax.jit(lambda layer, x: layer.memorize(x, layer.init_state(2)))
        ((before, _), *rest), ((after, _), *same) = run(plain, x), run(skipping, x)
        values = jax.jit(lambda layer, x: layer.features(x, running_of(layer.init_state(2)))[0]["value"])(plain, x)
        added = factors[None, None, :, None] * values
        np.testing.assert_allclose(after - before, added, rtol=1e-9, atol=1e-9 * float(abs(before).max()))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), rest, same)


def running_of(state):
    """The state of the memory that is read at every token."""
    return getattr(state, "running", state)


def test_memories_that_are_kept_add_them_too():
    """A finished model read with the average of its caches is the model itself until one is kept."""
    plain = small.config("lmm", depth=1, memory=BOTH)
    config = with_fields(plain, caching="average", cache_segment=8)
    with jax.enable_x64(True):
        trained, tokens = small.build(plain), small.tokens()
        model = nnx.merge(
            nnx.graphdef(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))), nnx.state(trained)
        )
        averaged, without = small.forward(model, tokens), small.forward(trained, tokens)
        assert_same(averaged[:, :8], without[:, :8], 1e-9)


each_keys = pytest.mark.parametrize("fields", [BOTH, TIED], ids=["own_keys", "tied_keys"])


@pytest.mark.slow_but_for("lmm-plain-own_keys", "lmm-plain-tied_keys", "mal-plain-tied_keys")
@each_keys
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", ["lmm", "mag", "mal"])
def test_reading_in_pieces_equals_reading_at_once(block, kind, fields):
    with jax.enable_x64(True):
        model, tokens = small.build(small.config(block, depth=1, memory=KINDS[kind] | fields)), small.tokens()
        whole = small.forward(model, tokens)
        for pieces in ([1], [5, 4]):
            assert_same(read_in_pieces(model, tokens, pieces), whole, 1e-9)


@pytest.mark.slow
@each_keys
def test_mac_reads_in_pieces_too(fields):
    """Whose first read of a segment, for which no token has values yet, nothing is added to."""
    with jax.enable_x64(True):
        model, tokens = small.build(small.config("mac", depth=1, memory=fields)), small.tokens()
        assert_same(read_in_pieces(model, tokens, [small.SEGMENT + 1]), small.forward(model, tokens), 1e-9)


def test_documents_of_a_row_do_not_meet():
    with jax.enable_x64(True):
        config = small.config("lmm", depth=1, memory=BOTH, document_slack=8)
        assert_documents_alone(config, [pack((7, 5), 20, small.CHUNK), pack((3, 9), 20, small.CHUNK)])


def test_mamba3_has_its_own():
    config = small.config("lmm", depth=1, dtype="float32", memory={"preset": "mamba3", "value_skip": True})
    with_both, alone = (
        nnx.eval_shape(lambda c=c: LanguageModel(c, rngs=nnx.Rngs(0)))
        for c in (config, with_fields(config, value_skip=False))
    )
    assert jax.tree.structure(nnx.state(with_both)) == jax.tree.structure(nnx.state(alone))


def test_several_values_a_token_are_refused():
    config = small.config("lmm", dtype="float32", memory={"preset": "delta_product", "value_skip": True})
    with pytest.raises(ConfigError, match="^model.memory.value_skip is True, and a token has 2 values"):
        memory_layer(config, rngs=nnx.Rngs(0))
