"""MAC: its attention as a kernel, and what its memory is given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small

from titans_jax.layers.attention.segment_pallas import fused_segment_attention
from titans_jax.models import mac


@pytest.mark.slow
def test_attention_as_a_kernel_changes_nothing(monkeypatch):
    """In interpret mode. Three segments, the last one short; padding up to a border, and a second document."""
    model, tokens = small.build(small.config("mac", depth=1, dtype="float32")), small.tokens(time=22)
    ids = jnp.array([[1] * 5 + [0] * 3 + [2] * 14, [1] * 22], jnp.int32)

    def forward():
        return np.array(jax.jit(lambda tokens, ids: model(tokens, ids))(tokens, ids))[np.array(ids) > 0]

    plain, seen = forward(), []

    def attention(queries, context, prefix, index):
        assert index == 0  # known before it runs, as the kernel needs it
        seen.append([rows.shape[1] for rows in jax.tree.leaves((queries, context, prefix))])
        return fused_segment_attention(queries, context, prefix)

    monkeypatch.setattr(mac, "segment_attention", attention)
    np.testing.assert_allclose(forward(), plain, rtol=1e-4, atol=1e-4 * np.abs(plain).max())
    assert seen == [[size] * 5 + [3, 3] for size in (small.SEGMENT, 22 % small.SEGMENT)]


@pytest.mark.slow
def test_written_with_a_residual_around_the_attention():
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
