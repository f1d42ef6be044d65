"""Softmax attention is the non-parametric case of Miras: an L2 bias over a growing set of tokens (Miras eq 1-2 and
table 1)."""

import jax
import jax.numpy as jnp
import numpy as np

from titans_jax.layers.attention.xla import KeyValues, attend

TIME, HEAD_DIM = 9, 6


def test_attention_minimises_the_l2_bias_weighted_by_the_softmax_kernel():
    """y_i = argmin_y sum_{j<=i} exp(q_i k_j / sqrt(d)) ||y - v_j||^2, by least squares: Nadaraya-Watson."""
    generator = np.random.default_rng(0)
    queries, keys, values = generator.normal(size=(3, TIME, HEAD_DIM))
    with jax.enable_x64(True):
        none = KeyValues(*jnp.zeros((2, 0, 1, HEAD_DIM)))
        rows = [jnp.asarray(x)[None, :, None] for x in (queries, keys, values)]
        reads = attend(rows[0], KeyValues(*rows[1:]), none, jnp.tril(jnp.ones((1, TIME, TIME), bool)))[0, :, 0]
    for i in range(TIME):
        roots = np.exp(0.5 * keys[: i + 1] @ queries[i] / np.sqrt(HEAD_DIM))[:, None]
        best, *_ = np.linalg.lstsq(roots, roots * values[: i + 1], rcond=None)
        np.testing.assert_allclose(reads[i], best[0], rtol=1e-12)
