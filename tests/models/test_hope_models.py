"""Models of Hope's blocks: streaming, documents, precision, counts, and what writing is."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from flax import nnx
from test_packed_documents import assert_documents_alone, pack
from test_streaming import assert_same, read_in_pieces

from titans_jax.config import ConfigError
from titans_jax.models import LanguageModel, check_model, forward_flops_per_token, granularity, without_writes
from titans_jax.models.flops import continuum_flops, memory_flops, memory_read_flops, self_referential_flops
from titans_jax.studies.models import state_floats

MEMORY = {"preset": "hope", "continuum_chunks": (2, 8)}


def hope(block="hope", **fields):
    return small.config(block, memory=MEMORY | fields.pop("memory", {}), depth=1, num_persistent=0, **fields)


BLOCKS = ["hope_attention", pytest.param("hope", marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("block", BLOCKS)
def test_streaming_equals_training_with_and_without_writes(block):
    """A prompt that ends inside every window, then token by token."""
    with jax.enable_x64(True):
        model, tokens = small.build(hope(block)), small.tokens(time=11)
        graphdef, params = nnx.split(model)
        unwritten = nnx.merge(without_writes(graphdef), params)
        found = []
        for one in (model, unwritten):
            found.append(small.forward(one, tokens))
            assert_same(read_in_pieces(one, tokens, [7]), found[-1], 1e-9)
        assert abs(found[0] - found[1]).max() > 1e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize("block", ["hope", "hope_attention"])
def test_packed_documents_equal_documents_alone(block):
    with jax.enable_x64(True):
        config = hope(block)
        assert granularity(config) == 8
        assert_documents_alone(config, [pack(lengths, 32, 8) for lengths in ([5, 9, 3], [8, 1, 7], [32], [16, 8])])
        rows = [pack(lengths, 32) for lengths in ([5, 9, 3], [32])]
        assert_documents_alone(dataclasses.replace(config, document_slack=32), rows)


@pytest.mark.parametrize("block", [pytest.param("hope", marks=pytest.mark.exhaustive), "hope_attention"])
def test_half_precision_keeps_shapes_and_dtypes(block):
    """Rows, pieces and the state, which no call changes, and the report; nothing is computed."""
    config = hope(block, dtype="bfloat16", remat="full")

    def run(tokens):
        model = LanguageModel(config, rngs=nnx.Rngs(0))
        state = model.init_state(2, 64)
        return (
            state,
            model(tokens, return_diagnostics=True),
            model.extend(tokens, state),
            model.extend(tokens[:, :16], state, closed=True)[1],
        )

    state, (logits, report), (more, after), closed = jax.eval_shape(run, small.tokens())
    assert (logits.dtype, logits.shape) == (more.dtype, more.shape) == (jnp.float32, (2, small.TIME, small.VOCAB))
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert shapes(after) == shapes(state) == shapes(closed)
    expected = {"retention", "step_size", "inner_loss", "update_norm", "weight_norm"} if block == "hope" else set()
    assert set(report) == expected


def test_operations_and_state_are_counted():
    """By hand: heads of 8, expansion 2, two levels that share a feed-forward layer of 24: 18 channels each."""
    config, square = hope(dtype="float32"), 2 * 16 * 16
    reads = 2 * 2 * 2 * (8 * 16)
    assert memory_read_flops(config) == reads
    level = 2 * 2 * 16 * 18 * 2.5
    assert continuum_flops(config) == square + 2 * 2 * 16 * 2 + 2 * level
    memories = 5 * 2 * memory_flops(config) + (4 + 5 - 4) * reads
    assert self_referential_flops(config) == 3 * square + 2 * 2 * 4 * 16 + 4 * 16 + memories
    whole = self_referential_flops(config) + continuum_flops(config) + 2 * 16 * small.VOCAB
    assert forward_flops_per_token(config, 16) == pytest.approx(whole)
    memories, levels = 5 * 2 * 2 * 8 * 16, 2 * 2 * 16 * 18
    assert state_floats(config, 32) == 2 * (memories + levels)  # with the anchors


def test_packed_rows_begin_with_whole_windows_of_every_level():
    assert granularity(hope(memory={"chunk_size": 6})) == math.lcm(6, 8)
    assert granularity(hope("hope_attention", memory={"chunk_size": 6})) == 8
    assert np.isfinite(forward_flops_per_token(hope("hope_attention"), 10))


@pytest.mark.parametrize(
    "field, value",
    [("caching", "gated"), ("local_chunks", (4,)), ("log_linear_levels", 3)],
)
def test_memories_that_attention_has_not_are_refused_where_no_other_block_has_them(field, value):
    memory = {"preset": "gated_deltanet" if field == "log_linear_levels" else "titans", "shard": 8, field: value}
    for pattern in (("hope_attention",), ("window", "hope_attention")):
        with pytest.raises(ConfigError, match=f"^model.memory.{field} is .*, which hope_attention does not do, as its"):
            check_model(small.config(*pattern, memory=memory))
    check_model(small.config("lmm", "hope_attention", memory=memory))
