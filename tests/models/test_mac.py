"""MAC: its attention as a kernel, and what its memory is given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from flax import nnx

from titans_jax.layers.attention.segment_pallas import fused_segment_attention
from titans_jax.layers.neural_memory import NeuralMemory
from titans_jax.models import LanguageModel, mac


@pytest.mark.slow
def test_attention_as_a_kernel_changes_nothing(monkeypatch):
    """In interpret mode. Three segments, the last one short; padding up to a border, and a second document."""
    model, tokens = small.build(small.config("mac", depth=1, dtype="float32")), small.tokens(time=22)
    ids = jnp.array([[1] * 5 + [0] * 3 + [2] * 14, [1] * 22], jnp.int32)

    def forward():
        return np.array(small.compiled(lambda tokens, ids: model(tokens, ids))(tokens, ids))[np.array(ids) > 0]

    plain, seen = forward(), []

    def attention(queries, context, prefix, index):
        assert index == 0  # known before it runs, as the kernel needs it
        seen.append([rows.shape[1] for rows in jax.tree.leaves((queries, context, prefix))])
        return fused_segment_attention(queries, context, prefix)

    monkeypatch.setattr(mac, "segment_attention", attention)
    np.testing.assert_allclose(forward(), plain, rtol=1e-4, atol=1e-4 * np.abs(plain).max())
    assert seen == [[size] * 5 + [3, 3] for size in (small.SEGMENT, 22 % small.SEGMENT)]


def test_written_in_the_residual_stream():
    """Reading in pieces equals reading at once, and no token changes what is before it."""
    with jax.enable_x64(True):
        model, tokens = small.build(small.config("mac", depth=1, mac_write="residual")), small.tokens()
        whole = small.forward(model, tokens)
        state, parts = small.init_state(model, len(tokens)), []
        for begin, end in ((0, 5), (5, small.SEGMENT + 1), (small.SEGMENT + 1, tokens.shape[1])):
            logits, state = small.extend(model, tokens[:, begin:end], state)
            parts.append(logits)
        np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-9, atol=1e-9 * abs(whole).max())
        changed = small.forward(model, tokens.at[:, 11].add(1) % small.VOCAB)
        np.testing.assert_array_equal(changed[:, :11], whole[:, :11])
        assert not np.array_equal(changed[:, 12:], whole[:, 12:])


def test_keys_in_the_residual_stream_tell_tokens_apart():
    """At initialisation, over a row of 64 tokens, two keys that attention's output alone writes are nearly the same."""

    def mean_cosine(mac_write):
        fields = {"dim": 128, "num_heads": 4, "head_dim": 32, "segment": 64, "vocab_size": 256, "num_persistent": 16}
        config = small.config("mac", depth=1, dtype="float32", mac_write=mac_write, **fields)
        model = LanguageModel(config, rngs=nnx.Rngs(0))
        block = jax.tree.map(lambda x: x[0], model.cycles).blocks[0]
        x = model.embedding(jax.random.permutation(jax.random.key(1), 256)[None, :64])
        written = []
        memorize = NeuralMemory.memorize
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                NeuralMemory,
                "memorize",
                lambda self, y, *rest, **named: (written.append(y), memorize(self, y, *rest, **named))[1],
            )
            block(x)
        keys, _ = block.memory.key(written[0], jnp.zeros((1, 3, 128)))
        cosines = np.einsum("thd,ihd->hti", keys[0], keys[0])
        return float((cosines.sum() - 4 * 64) / (4 * 64 * 63))

    assert mean_cosine("attention") > 0.9
    assert mean_cosine("residual") < 0.3
