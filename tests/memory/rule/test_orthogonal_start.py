"""Starts that are orthogonal: their singular values, what they change in a first write, and who has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax import memory
from titans_jax.config import MemoryConfig, memory_rule


@pytest.mark.parametrize("expansion", [2, 4])
def test_singular_values_are_equal_and_entries_as_large_as_independent_ones(expansion):
    rule = memory_rule(MemoryConfig(expansion=expansion))
    for key in jax.random.split(jax.random.key(0), 3):
        first, last = memory.init_params(rule, key, 64)["weights"]
        assert first.shape == (64, 64 * expansion) and last.shape == (64 * expansion, 64)
        for weights, size in ((first, expansion**0.5), (last, 1.0)):
            values = np.linalg.svd(np.asarray(weights), compute_uv=False) / size
            np.testing.assert_allclose(values, 1, atol=1e-5)
            assert np.mean(np.square(weights)) == pytest.approx(1 / len(weights), rel=1e-5)


def most_over_mean(rule, head_dim):
    """What a write to a fresh memory removes from one direction at most, over the mean of directions: the largest
    eigenvalue of J J^T over the mean one, J the derivative of a read by the weights. The mean of 200 starts."""

    def one(key):
        start, key = jax.random.split(key)
        params = memory.init_params(rule, start, head_dim)
        key = jax.random.normal(key, (head_dim,))
        key = key / jnp.linalg.norm(key)

        def read(weights):
            return rule.architecture.read(lambda i, x: x @ weights[i], params, key)

        by_weights = jax.jacrev(read)(params["weights"])
        by_weights = jnp.concatenate([j.reshape(head_dim, -1) for j in by_weights], axis=1)
        values = jnp.linalg.eigvalsh(by_weights @ by_weights.T)
        return values[-1] / jnp.mean(values)

    return float(jnp.mean(jax.lax.map(one, jax.random.split(jax.random.key(0), 200), batch_size=50)))


@pytest.mark.parametrize(("head_dim", "expansion"), [(16, 2), (32, 2), (16, 4)])
def test_a_first_write_removes_less_than_twice_its_error_from_any_direction(head_dim, expansion):
    """First steps remove just the error in the mean. Where entries are independent, heads with a hidden layer of twice
    their width lose more than twice that from one direction, which overshoots by more than the error was."""
    orthogonal, independent = (
        most_over_mean(memory_rule(MemoryConfig(expansion=expansion, orthogonal_start=start)), head_dim)
        for start in (True, False)
    )
    assert orthogonal < 1.8 and orthogonal < 0.93 * independent
    if expansion == 2:
        assert independent > 2


def test_every_memory_with_a_learned_start_has_it_unless_told_otherwise():
    for preset in ("titans", "yaad", "moneta", "memora", "ttt_mlp", "ttt_linear", "atlas", "lact"):
        assert memory_rule(MemoryConfig(preset=preset)).orthogonal_start
        assert not memory_rule(MemoryConfig(preset=preset, orthogonal_start=False)).orthogonal_start
