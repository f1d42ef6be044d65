"""Log-linear attention as a layer: its scales, streaming, documents, state, and what is refused."""

import dataclasses

import drawn_layers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from drawn_layers import PERSISTENT, close_to, in_pieces, init_state, kinds, layer_of, read_on, row, run, with_memory
from flax import nnx
from test_log_linear import recurrence
from test_packed_documents import assert_documents_alone, pack
from test_streaming import assert_same, read_in_pieces

from titans_jax.config import Config, ConfigError, MemoryConfig, ModelConfig
from titans_jax.config.validate import validate
from titans_jax.layers import memory_layer
from titans_jax.layers.document_layout import find_documents
from titans_jax.models import LanguageModel, check_model, forward_flops_per_token
from titans_jax.models.flops import memory_flops
from titans_jax.studies.models import state_floats

LEVELS, TIME, ROWS = 3, 20, 3
CONFIG = ModelConfig(
    pattern=("lmm",), dim=8, depth=1, num_heads=2, head_dim=4, num_persistent=3, dtype="float64",
    memory=MemoryConfig(preset="gated_deltanet", log_linear_levels=LEVELS, gate_rank=2),
)  # fmt: skip
SUM = {"preset": "titans", "architecture": "linear", "bias": "dot_product", "start": "zero", "momentum": False}
"""A memory that may have chunks and is a sum over values all the same."""
ONE = np.log(np.e - 1)  # whose softplus is 1


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


def configured(**fields):
    return with_memory(CONFIG, **fields)


def copy_of(layer):
    return nnx.merge(*nnx.split(layer))


def inputs(time=TIME):
    return drawn_layers.inputs(ROWS, time)


def test_scales_are_one_at_first():
    layer = jax.jit(lambda: memory_layer(CONFIG, rngs=nnx.Rngs(0)))()
    assert layer.scale.shape == (8, 2, LEVELS + 1) and layer.scale_bias.shape == (2, LEVELS + 1)
    bias = np.array(layer.scale_bias[...])
    np.testing.assert_allclose(np.log1p(np.exp(bias)), 1, rtol=4 * np.finfo(bias.dtype).eps)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="gated_deltanet"),
        *(pytest.param({"preset": p}, id=p, marks=pytest.mark.exhaustive) for p in ("mamba2", "gla", "comba")),
    ],
)
def test_with_scales_of_one_it_is_the_layer_without_levels(fields):
    layer, x = copy_of(layer_of(configured(**fields))), inputs()
    assert np.abs(row(layer, x)).max() > 1e-3
    layer.scale[...] = jnp.zeros(layer.scale.shape)
    layer.scale_bias[...] = jnp.full(layer.scale_bias.shape, ONE)
    graphdef, _ = nnx.split(layer_of(configured(**fields, log_linear_levels=0)))
    own = ("scale", "scale_bias")
    params = {path: leaf for path, leaf in nnx.to_flat_state(nnx.state(layer)) if path[0] not in own}
    plain = nnx.merge(graphdef, nnx.from_flat_state(params))
    found, state, report = run(layer, x)
    expected, after, expected_report = run(plain, x)
    close_to(found, expected, 1e-12)
    jax.tree.map(close_to, report, expected_report)
    close_to(state.memory.parts.sum(2), after.memory.weights[0], 1e-12)
    jax.tree.map(np.testing.assert_array_equal, state.tails, after.tails)


def test_reads_are_the_recurrence_s_by_scales_of_the_input():
    """What the memories of a row are given is as of any layer; the levels and their scales are numpy's."""
    layer, x = layer_of(CONFIG), inputs()

    @jax.jit
    def parts_of(layer, x):
        first = layer.init_state(ROWS)
        features, state = layer.features(x, first)
        given, _ = layer.head_inputs(x, features, state)
        (reads, _), after, _ = layer.memorize(x, first)
        return reads, after, given, layer.with_skip(jnp.zeros_like(reads), features["skip"])

    reads, after, given, skip = jax.tree.map(np.array, parts_of(layer, x))
    logits = np.einsum("btd,dhl->bthl", x, layer.scale[...]) + np.array(layer.scale_bias[...])
    for b, h in np.ndindex(ROWS, CONFIG.num_heads):
        of_head = {name: getattr(given, name)[b, :, h] for name in ("queries", "keys", "values")}
        of_head["retention"] = np.exp(given.gates.log_retention[b, :, h, 0])
        of_head |= {"step": given.gates.step_size[b, :, h, 0], "scales": np.log1p(np.exp(logits[b, :, h]))}
        expected, parts = recurrence("gated_deltanet", of_head)
        close_to(reads[b, :, h] - skip[b, :, h], expected)
        close_to(after.memory.parts[b, h], parts)
    assert int(after.memory.position) == TIME


def test_persistent_tokens_are_the_first_of_a_document():
    layer, x = layer_of(CONFIG), inputs()
    first = jnp.broadcast_to(PERSISTENT, (ROWS, *PERSISTENT.shape))
    reads, after = read_on(layer, jnp.concatenate([first, x], axis=1), jax.jit(lambda: layer.init_state(ROWS))())
    found, state, _ = run(layer, x)
    close_to(found, reads[:, len(PERSISTENT) :])
    close_to(state.memory.parts, after.memory.parts)
    assert int(state.memory.position) == int(after.memory.position) == TIME + len(PERSISTENT)


@pytest.mark.parametrize("pieces", [[9, 1, 1, 9], pytest.param([1] * 11 + [9], marks=pytest.mark.exhaustive)])
def test_pieces_equal_the_whole(pieces):
    layer, x = layer_of(CONFIG), inputs()
    reads, state = in_pieces(layer, x, pieces, init_state(layer, ROWS))
    whole, after, _ = run(layer, x)
    close_to(reads, whole)
    close_to(state.memory.parts, after.memory.parts)
    assert int(state.memory.position) == int(after.memory.position)
    assert kinds(state) == kinds(init_state(layer, ROWS))


def test_documents_keep_to_themselves():
    """Wherever they begin, each is as alone, after the persistent tokens; padding between them changes nothing."""
    layer, x = layer_of(CONFIG), inputs()[:1]
    ids = jnp.asarray([1] * 5 + [2] + [0] * 2 + [3] * 11 + [0], jnp.int32)[None]
    packed = jax.jit(lambda x, ids: layer(x, documents=find_documents(ids), persistent=jnp.asarray(PERSISTENT))[0])
    found, places = packed(x, ids), [slice(0, 5), slice(5, 6), slice(8, 19)]
    alone = np.zeros((ROWS, TIME, CONFIG.dim))
    for document, place in zip(alone, places, strict=True):
        document[: place.stop - place.start] = x[0, place]
    expected = row(layer, jnp.asarray(alone))
    for document, place in zip(expected, places, strict=True):
        close_to(found[0, place], document[: place.stop - place.start])
    padding = packed(x.at[:, 6:8].add(1.0), ids)
    np.testing.assert_array_equal(padding[ids > 0], found[ids > 0])


def test_without_writes_the_memory_stays_empty():
    layer, x = copy_of(layer_of(CONFIG)), inputs()
    layer.writes = False
    y, state, report = run(layer, x)
    more, after = read_on(layer, x, init_state(layer, ROWS))
    assert report == {} and not np.any(state.memory.parts) and not np.any(after.memory.parts)
    assert layer.skip is None and not np.any(y) and not np.any(more)  # an empty memory says nothing
    assert kinds(after) == kinds(init_state(layer, ROWS))


def levelled(*pattern, depth=1, **fields):
    memory = {"preset": "gated_deltanet", "log_linear_levels": LEVELS, "gate_rank": 4} | fields.pop("memory", {})
    return small.config(*pattern, memory=memory, depth=depth, **fields)


@pytest.mark.parametrize(
    "preset", ["gated_deltanet", *(pytest.param(p, marks=pytest.mark.exhaustive) for p in ("mamba2", "gla"))]
)
def test_no_call_changes_the_state_s_kind_in_half_precision(preset):
    """Dtypes and shapes; nothing is computed."""
    config = levelled("lmm", dtype="bfloat16", memory={"preset": preset})

    def run(tokens):
        model = LanguageModel(config, rngs=nnx.Rngs(0))
        state = model.init_state(2, 64)
        return state, model(tokens), model.extend(tokens, state), model.extend(tokens[:, :1], state)

    with jax.enable_x64(False):  # as it is trained
        state, logits, (more, after), (_, after_one) = jax.eval_shape(run, small.tokens())
    assert (logits.dtype, logits.shape) == (more.dtype, more.shape) == (jnp.float32, (2, small.TIME, small.VOCAB))
    assert kinds(after) == kinds(after_one) == kinds(state)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["lmm", "mag", "mal"])
def test_a_model_streams(kind):
    model, tokens = small.build(levelled(kind)), small.tokens()
    assert_same(read_in_pieces(model, tokens, [5]), small.forward(model, tokens), 1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["lmm", "mag", "mal"])
def test_a_model_reads_packed_documents_as_alone(kind):
    assert_documents_alone(levelled(kind), [pack(lengths, 32) for lengths in ([5, 9, 3], [8, 1, 7], [32], [16, 8])])


def test_all_levels_count_as_state():
    config = levelled("lmm", dtype="float32")
    for time in (32, 1024):
        assert state_floats(config, time) == config.num_heads * LEVELS * config.head_dim**2


@pytest.mark.parametrize("levels", [1, 11])
def test_operations_are_counted(levels):
    config, plain = (levelled("lmm", memory={"log_linear_levels": count}) for count in (levels, 0))
    matrix, scales = 2 * config.head_dim**2, 2 * config.dim * (levels + 1)
    added = config.num_heads * (memory_flops(config) + (3 * levels + 1) * matrix + scales)
    assert forward_flops_per_token(config, 16) - forward_flops_per_token(plain, 16) == pytest.approx(added, rel=1e-12)


NO_SUM = ("titans", "mesa", "dfw", "rwkv7", "delta_product", "mamba3", "ttt_linear")


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"log_linear_levels": -1}, "is -1; use 0 to 31"),
        ({"log_linear_levels": 32}, "is 32; use 0 to 31"),
        ({"caching": "gated"}, "is 3, and model.memory.caching 'gated'; use one of them"),
        (SUM | {"chunk_size": 8}, "is 3, and what titans holds is no sum over its tokens' values, one a token"),
        *(({"preset": name}, f"is 3, and what {name} holds is no sum over its tokens' values") for name in NO_SUM),
    ],
)
def test_what_is_refused(fields, sentence):
    with pytest.raises(ConfigError) as error:
        validate(Config(model=configured(**fields)))
    assert str(error.value).startswith(f"model.memory.log_linear_levels {sentence}")
    assert "\n" not in str(error.value)


def test_local_memories_are_refused():
    with pytest.raises(ConfigError, match="^model.memory.log_linear_levels is 3, and model.memory.local_chunks"):
        validate(Config(model=configured(**SUM, chunk_size=1, local_chunks=(4,))))
    with pytest.raises(ConfigError, match=r"^model.memory.local_chunks is \(4,\); use \(\), as gated_deltanet has no"):
        validate(Config(model=configured(local_chunks=(4,))))


def test_mac_refuses_levels():
    with pytest.raises(ConfigError, match="^model.memory.log_linear_levels is 3, which mac does not do"):
        check_model(dataclasses.replace(CONFIG, pattern=("lmm", "mac"), depth=2))


@pytest.mark.parametrize("preset", ["linear_attention", "retnet", "gla", "mamba2", "deltanet", "kimi_delta_attention"])
@pytest.mark.parametrize("levels", [0, 1, 31])
def test_what_is_not_refused(preset, levels):
    config = configured(preset=preset, log_linear_levels=levels)
    validate(Config(model=config))
    check_model(dataclasses.replace(config, pattern=("lmm", "mag", "mal"), depth=3))
