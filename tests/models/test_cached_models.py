"""Models whose memories are kept: in any block and precision, on a finished model, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from flax import nnx
from test_packed_documents import assert_documents_alone, pack
from test_streaming import read_in_pieces

from titans_jax.data.tokenizers import ByteTokenizer
from titans_jax.inference.reading import MemoryFileError, Reader
from titans_jax.models import LanguageModel, forward_flops_per_token, granularity
from titans_jax.models.flops import caching_flops, memory_read_flops
from titans_jax.studies.models import state_floats


def cached(*pattern, caching="gated", depth=1, **fields):
    memory = {"caching": caching, "cache_segment": 8, "gate_rank": 4} | fields.pop("memory", {})
    return small.config(*pattern, memory=memory, depth=depth, **fields)


@pytest.mark.exhaustive
def test_a_finished_model_is_read_with_the_average_of_its_caches():
    """The same parameters under the structure of another configuration."""
    plain = small.config("lmm", depth=1)
    config = dataclasses.replace(plain, memory=dataclasses.replace(plain.memory, caching="average", cache_segment=8))
    with jax.enable_x64(True):
        trained, tokens = small.build(plain), small.tokens()
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))
        model = nnx.merge(graphdef, nnx.state(trained))
        averaged, without = small.forward(model, tokens), small.forward(trained, tokens)
        np.testing.assert_allclose(averaged[:, :8], without[:, :8], rtol=1e-10, atol=1e-10)
        assert abs(averaged - without)[:, 8:].max() > 1e-3


OTHERS = [(preset, way) for preset in ("mesa", "delta_product", "rwkv7", "hgrn2") for way in ("soup", "sparse(k=2)")]


@pytest.mark.parametrize(
    "preset, caching", [("memora", "soup"), *(pytest.param(*other, marks=pytest.mark.exhaustive) for other in OTHERS)]
)
def test_every_kind_of_memory_is_kept_in_half_precision(preset, caching):
    """Dtypes and shapes of rows, of pieces and of the state, which no call changes; nothing is computed."""
    config = cached("lmm", caching=caching, dtype="bfloat16", memory={"preset": preset})

    def run(tokens):
        model = LanguageModel(config, rngs=nnx.Rngs(0))
        state = model.init_state(2, 64)
        return state, model(tokens), model.extend(tokens, state)

    state, logits, (more, after) = jax.eval_shape(run, small.tokens())
    assert (logits.dtype, logits.shape) == (more.dtype, more.shape) == (jnp.float32, (2, small.TIME, small.VOCAB))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", ["titans", "memora", "mesa", "rwkv7"])
@pytest.mark.parametrize("caching, cut", [("gated", "constant"), ("soup", "constant"), ("gated", "logarithmic")])
def test_streaming_equals_training_for_every_kind_of_memory(preset, caching, cut):
    with jax.enable_x64(True):
        memory = {"preset": preset, "cache_segmentation": cut}
        model, tokens = small.build(cached("lmm", caching=caching, memory=memory)), small.tokens()
        whole = small.forward(model, tokens)
        found = read_in_pieces(model, tokens, [5])
        np.testing.assert_allclose(found, whole, rtol=1e-8, atol=1e-8 * abs(whole).max())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind, cut", [("lmm", "constant"), ("mag", "constant"), ("mal", "constant"), ("lmm", "logarithmic")]
)
def test_packed_documents_equal_documents_alone(kind, cut):
    with jax.enable_x64(True):
        config = cached(kind, memory={"cache_segmentation": cut})
        assert granularity(config) == 8
        rows = [pack(lengths, 32, 8) for lengths in ([5, 9, 3], [8, 1, 7], [32], [16, 8])]
        assert_documents_alone(config, rows)
        rows = [pack(lengths, 32) for lengths in ([5, 9, 3], [32])]
        assert_documents_alone(dataclasses.replace(config, document_slack=32), rows)


def test_operations_are_counted():
    """A row of 3 segments and a half: tokens read 0, 1, 2 and 3 kept memories."""
    plain, config = small.config("mal", depth=1), cached("mal")
    reads = (8 * 0 + 8 * 1 + 8 * 2 + 4 * 3) / 28 * memory_read_flops(config)
    assert caching_flops(config, 28) == pytest.approx(reads + 2 * 16 * 16)
    added = forward_flops_per_token(config, 28) - forward_flops_per_token(plain, 28)
    assert added == pytest.approx(caching_flops(config, 28))
    assert caching_flops(plain, 28) == caching_flops(cached("lmm", caching="residual"), 8) == 0


def test_operations_of_logarithmic_segments_are_counted():
    """A row of 6 segments and a half: tokens read as many memories as their segment's number has bits set."""
    config = cached("lmm", caching="residual", memory={"cache_segmentation": "logarithmic"})
    reads = (8 * (0 + 1 + 1 + 2 + 1 + 2) + 4 * 2) / 52 * memory_read_flops(config)
    assert caching_flops(config, 52) == pytest.approx(reads)


def test_what_is_kept_counts_as_state():
    plain, config = small.config("lmm", depth=1, dtype="float32"), cached("lmm", dtype="float32")
    weights = 2 * (8 * 16 + 16 * 8)
    assert state_floats(config, 33) - state_floats(plain, 33) == 4 * weights
    fewer = cached("lmm", dtype="float32", memory={"cache_segmentation": "logarithmic"})
    assert state_floats(fewer, 8 * 1000) - state_floats(plain, 8 * 1000) == 10 * weights


def test_a_memory_file_of_constant_size_is_refused():
    config = cached("lmm", dtype="float32", vocab_size=320)
    graphdef, params = nnx.split(small.build(config))
    with pytest.raises(MemoryFileError, match="or caching, which keeps more and more memories; use"):
        Reader(graphdef, params, ByteTokenizer())
