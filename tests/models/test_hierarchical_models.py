"""Models with local memories (TNT): in any block and precision, in a second stage, and what is refused."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from flax import nnx
from test_packed_documents import assert_documents_alone, pack
from test_streaming import read_in_pieces

from titans_jax.config import Config, ConfigError, DataConfig, TrainingConfig, gate_choices
from titans_jax.config.validate import validate
from titans_jax.models import LanguageModel, check_model, forward_flops_per_token, granularity
from titans_jax.models.flops import memory_flops
from titans_jax.studies.models import state_floats
from titans_jax.training import run as runs


def hierarchy(*pattern, depth=1, **fields):
    memory = {"chunk_size": 8, "local_chunks": (4,), "shard": 8, "gate_rank": 4} | fields.pop("memory", {})
    return small.config(*pattern, memory=memory, depth=depth, **fields)


@pytest.mark.parametrize(
    "preset", ["ttt_mlp", *(pytest.param(p, marks=pytest.mark.exhaustive) for p in ("yaad", "moneta", "memora"))]
)
def test_every_kind_of_memory_is_local_in_half_precision(preset):
    """Dtypes and shapes of rows, of pieces and of the state, which no call changes; nothing is computed."""
    config = hierarchy("lmm", dtype="bfloat16", memory={"preset": preset})

    def run(tokens):
        model = LanguageModel(config, rngs=nnx.Rngs(0))
        state = model.init_state(2, 64)
        return state, model(tokens), model.extend(tokens, state)

    state, logits, (more, after) = jax.eval_shape(run, small.tokens())
    assert (logits.dtype, logits.shape) == (more.dtype, more.shape) == (jnp.float32, (2, small.TIME, small.VOCAB))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["lmm", "mag", "mal"])
def test_streaming_equals_training(kind):
    with jax.enable_x64(True):
        model, tokens = small.build(hierarchy(kind)), small.tokens()
        whole = small.forward(model, tokens)
        np.testing.assert_allclose(read_in_pieces(model, tokens, [5]), whole, rtol=1e-8, atol=1e-8 * abs(whole).max())


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["lmm", "mag", "mal"])
def test_packed_documents_equal_documents_alone(kind):
    with jax.enable_x64(True):
        config = hierarchy(kind)
        assert granularity(config) == 8
        assert_documents_alone(config, [pack(lengths, 32, 8) for lengths in ([5, 9, 3], [8, 1, 7], [32], [16, 8])])


def test_documents_start_with_a_shard_and_with_a_chunk():
    assert granularity(hierarchy("lmm", memory={"shard": 16})) == 16
    assert granularity(hierarchy("lmm", memory={"chunk_size": 32})) == 32


def test_a_long_chunk_of_the_global_memory_is_kept_as_a_whole():
    """1/e of it at first, and never for longer than by a memory without local ones."""
    for chunk, kept in ((2048, np.exp(-1)), (8, (1 - 1 / (1 + np.exp(5))) ** 8)):
        choices = gate_choices(hierarchy("lmm", memory={"chunk_size": chunk}).memory)
        forgotten = 1 / (1 + np.exp(-choices.forget_bias))
        assert (1 - forgotten) ** chunk == pytest.approx(kept, rel=1e-3)


def test_operations_are_counted():
    """A stale memory reads W only; a local one is a memory of its own chunk, with its gates; P is 4 d^2 and a block."""
    config, plain = hierarchy("lmm"), small.config("lmm", depth=1)
    d, weights = 8, 2 * 8 * 16
    assert memory_flops(config) == 2 * (weights + weights // 2 + 2 * weights + weights)
    gates, projection = 2 * 16 * 2 * 6, 2 * (4 * d**2 + 4 * 8 * d)
    added = forward_flops_per_token(config, 16) - forward_flops_per_token(plain, 16)
    assert added == pytest.approx(2 * memory_flops(config) + gates + projection)


def test_local_memories_and_the_projection_count_as_state():
    config, plain = (make("lmm", dtype="float32", depth=1) for make in (hierarchy, small.config))
    weights = 2 * (8 * 16 + 16 * 8)
    assert state_floats(config, 32) - state_floats(plain, 32) == 3 * weights + 2 * 8 * 8  # weights, momentum, anchor


def test_a_second_stage_begins_with_the_weights_of_other_chunks(monkeypatch):
    first = hierarchy("lmm", dtype="float32", memory={"chunk_size": 16, "local_chunks": (8, 4), "shard": 16})
    second = dataclasses.replace(first, memory=dataclasses.replace(first.memory, local_chunks=(2, 1)))
    params = nnx.to_pure_dict(nnx.state(small.build(first)))
    of_first = SimpleNamespace(params=params, tokenizer_name="byte", step=7, config=Config(model=first))
    monkeypatch.setattr(runs, "load_run", lambda source: of_first)
    config = Config(model=second, data=DataConfig(), training=TrainingConfig(init_from="runs/first"))
    found, said = runs.initial_weights(config)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert said[0].endswith("runs/first, step 7")
    assert said[1:] == ["not as there: model.memory.local_chunks is (2, 1), was (8, 4)"]
    fewer = dataclasses.replace(second, memory=dataclasses.replace(second.memory, local_chunks=(2,)))
    with pytest.raises(ConfigError, match="whose .*memory.local.1.* is .*, and this model's is absent"):
        runs.initial_weights(dataclasses.replace(config, model=fewer))


@pytest.mark.parametrize(
    "fields, sentence",
    [
        (
            {"local_chunks": (3,)},
            "local_chunks is (3,); use chunks of 1 or more tokens that divide model.memory.shard 8",
        ),
        ({"local_chunks": (0,)}, "local_chunks is (0,); use chunks of 1 or more tokens"),
        ({"shard": 12}, "shard is 12; use a multiple or a divisor of model.memory.chunk_size 8, such as 8"),
        ({"shard": 0}, "shard is 0; use at least 1"),
        ({"caching": "gated", "cache_segment": 8}, "local_chunks is (4,), and model.memory.caching 'gated'; use one"),
        ({"preset": "gated_deltanet"}, "local_chunks is (4,); use (), as gated_deltanet has no chunks"),
        ({"preset": "omeganet", "omega_window": 2}, "use (), as omeganet takes no gradients of single tokens"),
    ],
)
def test_what_is_refused(fields, sentence):
    with pytest.raises(ConfigError) as error:
        validate(Config(model=hierarchy("lmm", memory=fields, dtype="float32")))
    assert sentence in str(error.value) and str(error.value).startswith("model.memory.")


def test_mac_refuses_local_memories():
    with pytest.raises(ConfigError, match=r"^model.memory.local_chunks is \(4,\), which mac does not do"):
        check_model(hierarchy("mac", segment=8))
