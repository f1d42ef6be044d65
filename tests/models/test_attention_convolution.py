"""`attention_conv`: attention's queries, keys and values behind a causal convolution, in every block with attention."""

import jax
import pytest
import small_models as small
from flax import nnx
from test_packed_documents import assert_documents_alone, pack
from test_streaming import assert_same, read_in_pieces

from titans_jax.models import LanguageModel, granularity

REST = ("mag", "mal", "attention", "retrofit")
KINDS = ("mac", "window", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in REST))


def convolved(kind, **fields):
    return small.config(kind, attention_conv=True, depth=1, **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_reading_in_pieces_equals_the_whole(kind):
    with jax.enable_x64(True):
        model, tokens = small.build(convolved(kind)), small.tokens()
        whole = small.forward(model, tokens)
        for pieces in ([1], [small.SEGMENT - 1], [5, 4, 7]):
            assert_same(read_in_pieces(model, tokens, pieces), whole, 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_do_not_reach_into_each_other(kind):
    with jax.enable_x64(True):
        config = convolved(kind)
        rows = [pack(lengths, 32, granularity(config)) for lengths in ([5, 9, 3], [8, 1, 7], [16, 8])]
        assert_documents_alone(config, rows)


@pytest.mark.parametrize("kind", ["mac", "attention"])
def test_it_starts_as_attention_without_it(kind):
    with jax.enable_x64(True):
        without = small.build(small.config(kind, depth=1))
        shared = dict(nnx.to_flat_state(nnx.state(without)))
        graphdef, state = nnx.split(LanguageModel(convolved(kind), rngs=nnx.Rngs(0)))
        leaves = {path: shared.get(path, leaf) for path, leaf in nnx.to_flat_state(state)}
        new = set(leaves) - set(shared)
        assert {path[-2] for path in new} == {f"{name}_convolution" for name in ("query", "key", "value")}
        model = nnx.merge(graphdef, nnx.from_flat_state(leaves))
        assert_same(small.forward(model, small.tokens()), small.forward(without, small.tokens()), 1e-9)
