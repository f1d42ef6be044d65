"""Keys that are the queries of the token before (`tie_keys`), and a projection of its own for what is added to a
memory's reads (`skip_projection`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from flax import nnx
from test_memory_values import TIED, inputs, layer_of, with_fields
from test_packed_documents import assert_documents_alone, pack

from titans_jax.config import Config, ConfigError, MemoryConfig, from_saved, projects_skip, ties_keys, to_dict
from titans_jax.layers import memory_layer
from titans_jax.memory.rule.presets import PRESETS
from titans_jax.models import LanguageModel
from titans_jax.training.run import count_params


def test_a_key_is_the_query_of_the_token_before():
    """To the bit, across calls too; before the first token there is none, and so a key of zeros."""
    config = small.config("lmm", dtype="float32", memory={"tie_keys": True})
    layer, x = layer_of(config), inputs(config, 9).astype(jnp.float32)
    features = jax.jit(lambda layer, x, state: layer.features(x, state))
    first, state = features(layer, x[:, :4], layer.init_state(2))
    second, _ = features(layer, x[:, 4:], state)
    keys, queries = (np.concatenate([first[name], second[name]], axis=1) for name in ("key", "query"))
    np.testing.assert_array_equal(keys[:, 1:], queries[:, :-1])
    assert not keys[:, 0].any()


def test_a_document_begins_with_the_query_of_its_start():
    """That of the last persistent token, as where a text stands alone."""
    with jax.enable_x64(True):
        config = small.config("lmm", depth=1, memory=TIED, document_slack=8)
        assert config.num_persistent > 0
        assert_documents_alone(config, [pack((7, 5), 20, small.CHUNK), pack((3, 9), 20, small.CHUNK)])


def test_what_is_added_is_no_value_of_the_memory():
    """Another projection of it changes the reads by itself, times the head's factor, and what is written not at all."""
    with jax.enable_x64(True):
        config = with_fields(small.config("lmm"), **TIED)
        layer, x = layer_of(config), inputs(config)
        layer.skip[...] = jnp.array([0.3, -2.0])
        run = jax.jit(lambda layer: layer.memorize(x, layer.init_state(2)))
        added = jax.jit(lambda layer: layer.features(x, layer.init_state(2))[0]["skip"])
        ((before, _), *rest), was = run(layer), added(layer)
        kernel = layer.skip_value.projection.kernel
        kernel[...] = kernel[...][::-1]
        ((after, _), *same), now = run(layer), added(layer)
        before, after, was, now = (np.asarray(x) for x in (before, after, was, now))
    np.testing.assert_allclose(after - before, np.array([0.3, -2.0])[:, None] * (now - was), rtol=1e-9, atol=1e-9)
    assert np.max(np.abs(now - was)) > 0.1
    states = [jax.tree.leaves((each[0].memory, each[1])) for each in (rest, same)]
    for one, other in zip(*states, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_model_has_as_many_parameters_with_both_as_with_neither():
    config = small.config("lmm", dtype="float32", memory={"value_skip": True, "normalize_values": True})
    tied, both, neither = (
        count_params(with_fields(config, tie_keys=keys, skip_projection=skip, prediction_gate=False))
        for keys, skip in ((True, False), (True, True), (False, False))
    )
    assert both == neither > tied


def test_memories_behind_a_norm_have_both():
    """And a linear one that starts from learned weights. Linear recurrent models, to which nothing is added, keep their
    keys, as do runs that were saved before."""
    both = {name for name in PRESETS if ties_keys(MemoryConfig(preset=name))}
    assert both == {name for name in PRESETS if projects_skip(MemoryConfig(preset=name))}
    assert both >= {"titans", "moneta", "yaad", "ttt_linear", "ttt_mlp", "memora", "omeganet", "atlas", "dla"}
    assert not both & {"gated_deltanet", "gla", "hgrn2", "delta_product", "mamba3", "mesa", "lact"}
    linear = MemoryConfig(architecture="linear")
    assert ties_keys(linear) and projects_skip(linear)
    from_zero = MemoryConfig(architecture="linear", start="zero")
    assert not ties_keys(from_zero) and not projects_skip(from_zero)
    saved = to_dict(Config())
    for name in ("tie_keys", "skip_projection"):
        del saved["model"]["memory"][name]
    memory = from_saved(saved).model.memory
    assert (memory.tie_keys, memory.skip_projection) == (False, False)


def test_every_parameter_learns_and_no_token_sees_a_later_one():
    with jax.enable_x64(True):
        model, tokens = small.build(small.config("lmm", memory=TIED)), small.tokens()
        graphdef, params = nnx.split(model, nnx.Param)

        @jax.jit
        def gradient(params, tokens):
            def loss(params):
                return jnp.mean(jnp.square(nnx.merge(graphdef, params)(tokens)))

            return jax.grad(loss)(params)

        for path, leaf in jax.tree.leaves_with_path(gradient(params, tokens)):
            assert bool(jnp.all(jnp.isfinite(leaf))) and float(jnp.max(jnp.abs(leaf))) > 0, jax.tree_util.keystr(path)
        changed = tokens.at[:, 6].add(1)
        before, after = (np.asarray(small.forward(model, each)) for each in (tokens, changed))
        np.testing.assert_array_equal(before[:, :6], after[:, :6])
        assert np.any(before[:, 6:] != after[:, 6:])


@pytest.mark.parametrize(
    "memory, message",
    [
        ({"preset": "delta_product", "tie_keys": True}, "^model.memory.tie_keys is True, and a token has several keys"),
        ({"preset": "hgrn2", "tie_keys": True}, "^model.memory.tie_keys is True, and a token has keys that are gates"),
        ({"skip_projection": True, "value_skip": False}, "^model.memory.skip_projection is True, and nothing is added"),
    ],
)
def test_what_cannot_be_is_refused(memory, message):
    config = small.config("lmm", dtype="float32", memory=memory)
    with pytest.raises(ConfigError, match=message):
        memory_layer(config, rngs=nnx.Rngs(0))


def test_what_is_not_projected_has_no_parameters():
    config = small.config("lmm", dtype="float32", memory=TIED)
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    names = {
        str(entry.key) for path, _ in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model))) for entry in path
    }
    assert "skip_value" in names and "query" in names and "key" not in names
