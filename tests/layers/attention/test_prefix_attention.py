"""The kernel of attention to a prefix against its definition, in interpret mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax.layers.attention.prefix_pallas import Prefix, prefix_attention
from titans_jax.layers.attention.xla import KeyValues

BATCH, HEADS, TIME, HEAD_DIM, BLOCK = 2, 3, 256, 24, 128


def rows(seed, *shape):
    return jnp.array(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def defined(queries, prefix):
    """softmax(q K^T) V of queries that are scaled already, and the log-sum-exp of the logits."""
    logits = jnp.einsum("bhtd,nhd->bhtn", queries, prefix.keys)
    outputs = jnp.einsum("bhtn,nhd->bhtd", jax.nn.softmax(logits, axis=-1), prefix.values)
    return Prefix(outputs, jax.nn.logsumexp(logits, axis=-1))


# Prefixes of a whole tile, of less, and of more than one.
@pytest.mark.parametrize("num_prefix", [16, 5, 19])
def test_outputs_sums_and_gradients_are_those_of_a_softmax(num_prefix):
    """Gradients through outputs and sums, and with them the sums of the prefix's over all rows and blocks."""
    queries = rows(0, BATCH, HEADS, TIME, HEAD_DIM)
    prefix = KeyValues(*(rows(seed, num_prefix, HEADS, HEAD_DIM) for seed in (1, 2)))
    cotangent = Prefix(rows(3, BATCH, HEADS, TIME, HEAD_DIM), rows(4, BATCH, HEADS, TIME))

    def run(attend):
        value, pull = jax.vjp(attend, queries, prefix)
        return value, pull(cotangent)

    actual = jax.jit(lambda: run(lambda *operands: prefix_attention(*operands, BLOCK)))()
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(jax.jit(lambda: run(defined))()), strict=True):
        assert jnp.linalg.norm(a - b) < 1e-6 * jnp.linalg.norm(b)  # float32 sums in another order


def test_large_logits_do_not_overflow():
    queries = 100 * rows(0, 1, 1, BLOCK, HEAD_DIM)
    prefix = KeyValues(rows(1, 7, 1, HEAD_DIM), rows(2, 7, 1, HEAD_DIM))
    outputs, sums = prefix_attention(queries, prefix, BLOCK)
    wanted = defined(queries, prefix)
    np.testing.assert_allclose(outputs, wanted.outputs, atol=1e-4)
    np.testing.assert_allclose(sums, wanted.sums, rtol=1e-6)
