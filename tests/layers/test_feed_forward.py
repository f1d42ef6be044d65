"""SwiGLU: its width, its numbers, and how its weights start."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from titans_jax.config import ModelConfig
from titans_jax.layers import FeedForward
from titans_jax.layers.feed_forward import hidden_width


def test_width():
    assert hidden_width(ModelConfig(dim=768)) == 2048
    assert hidden_width(ModelConfig(dim=256)) == 704
    assert hidden_width(ModelConfig(hidden_dim=100)) == 100


def test_numbers():
    """x through `gate`, 3 x through `up`, `down` a shift: silu of 1, -1, 2 is 0.7310586, -0.2689414, 1.7615942."""
    layer = FeedForward(ModelConfig(dim=4, hidden_dim=4, num_heads=1, dtype="float32"), rngs=nnx.Rngs(0))
    identity = jnp.eye(4, dtype=jnp.float32)
    layer.gate.kernel[...], layer.up.kernel[...] = identity, 3 * identity
    layer.down.kernel[...] = jnp.roll(identity, 1, axis=1)
    y = layer(jnp.array([[1.0, -1.0, 2.0, 0.0]]))
    np.testing.assert_allclose(y, [[0, 3 * 0.7310586, 3 * 0.2689414, 6 * 1.7615942]], rtol=1e-6)


def test_weights_that_write_the_residual_stream_start_smaller():
    """By sqrt(2 depth), so that the sum of all layers' outputs starts with the same variance at every depth."""
    layer = FeedForward(ModelConfig(dim=256, depth=8, num_heads=4, head_dim=64), rngs=nnx.Rngs(0))
    deviations = [float(jnp.std(module.kernel[...])) for module in (layer.gate, layer.up, layer.down)]
    np.testing.assert_allclose(deviations[0], deviations[1], rtol=0.02)
    np.testing.assert_allclose(deviations[0] / deviations[2], 4, rtol=0.02)
