"""MAC's attention as a kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small

from titans_jax.layers.attention.segment_pallas import fused_segment_attention
from titans_jax.models import mac

pytestmark = pytest.mark.slow


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
