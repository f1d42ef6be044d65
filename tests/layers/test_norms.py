"""RMSNorm and the L2 norm, and that the implementations for heads agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from titans_jax.config import ModelConfig
from titans_jax.layers import RMSNorm, norms
from titans_jax.layers.norms import l2_normalize

CONFIG = ModelConfig(dim=8, num_heads=2, head_dim=4, depth=1, dtype="float32")


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_rms_norm_keeps_dtype_and_normalises_in_float32():
    layer = RMSNorm(CONFIG, 2, 4, rngs=nnx.Rngs(0))
    layer.scale[...] = 1.0 + jnp.arange(8, dtype=jnp.float32).reshape(2, 4)
    x = normal(0, 3, 2, 4)
    expected = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6) * layer.scale[...][None]
    np.testing.assert_allclose(layer(x), expected, rtol=1e-6)
    assert layer(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_l2_norm_of_zero_is_zero_with_a_finite_gradient():
    np.testing.assert_allclose(jnp.linalg.norm(l2_normalize(normal(0, 5, 4)), axis=-1), 1, atol=1e-5)
    zero = jnp.zeros((4,))
    assert not l2_normalize(zero).any()
    assert jnp.isfinite(jax.jacobian(l2_normalize)(zero)).all()


@pytest.mark.parametrize("width, count", [(48, 1), (64, 64)])
@pytest.mark.parametrize("scaled", [False, True])
def test_heads_side_by_side_are_normalised_alone(width, count, scaled):
    """As on a TPU, in value and gradient; a head of zeros has neither NaN nor its neighbours' numbers."""
    x = normal(0, 2, 7, 3, width).at[1, 2, 1].set(0)
    scale = normal(2, 3, width) if scaled else None
    cotangent = normal(1, 2, 7, 3, width)

    def value_and_gradient(implementation):
        y, pull = jax.vjp(lambda x: implementation(x, jnp.float32, count, 1e-6, scale), x)
        return y, pull(cotangent)[0]

    y, d = value_and_gradient(norms.normalize_side_by_side)
    wanted, d_wanted = value_and_gradient(norms.normalize_rows)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(d, d_wanted, rtol=1e-4, atol=1e-5 * np.abs(d_wanted).max())
    assert not y[1, 2, 1].any()
    if not scaled:
        lengths = np.linalg.norm(y, axis=-1).ravel()
        np.testing.assert_allclose(np.delete(lengths, (1 * 7 + 2) * 3 + 1), count**0.5, rtol=1e-4)
