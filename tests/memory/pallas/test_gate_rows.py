"""Gates packed in rows and unpacked again weigh tokens as unpacked gates do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax.memory import Gates
from titans_jax.memory.forms.decay import block_coefficients
from titans_jax.memory.pallas.gate_rows import RowLayout, pack_rows, unpack_rows

BLOCKS, TOKENS, MATRICES = 2, 8, 2


@pytest.mark.parametrize("with_momentum", [True, False], ids=["momentum", "descent"])
@pytest.mark.parametrize("restarts", [True, False], ids=["documents", "one-document"])
def test_rows_are_the_coefficients_of_their_gates(with_momentum, restarts):
    generator = np.random.default_rng(0)
    shape = (BLOCKS, TOKENS, MATRICES)
    log_retention, log_momentum = np.log(generator.uniform(0.3, 1, (2, *shape)))
    mask = np.arange(TOKENS) < np.array([[TOKENS], [TOKENS - 3]])
    resets = np.isin(np.arange(TOKENS), [0, 3])[None] & np.ones((BLOCKS, 1), bool) if restarts else None
    flag = generator.uniform(size=(BLOCKS, TOKENS))
    layout = RowLayout(MATRICES, with_momentum, restarts, flags=1)

    @jax.jit
    def answer(gates, resets, flag):
        rows = pack_rows(gates, [flag], resets)
        packed = [unpack_rows(rows[block], layout, rows.dtype) for block in range(BLOCKS)]
        return packed, block_coefficients(gates, resets, None)

    with jax.enable_x64(True):
        step_size = generator.uniform(0.1, 1, shape)
        gates = Gates(log_retention, log_momentum if with_momentum else None, step_size, mask)
        packed, wanted = answer(jax.tree.map(jnp.asarray, gates), resets, flag)
    for block in range(BLOCKS):
        np.testing.assert_array_equal(packed[block].mask[0], mask[block])
        np.testing.assert_array_equal(packed[block].flags[0][0], flag[block])
        for matrix in range(MATRICES):
            pairs = jax.tree.map(lambda leaf: leaf[block, matrix], wanted), packed[block].coefficients[matrix]  # noqa: B023
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-14), *pairs)
