"""Reads of all tokens and the state at a chunk's end, against forming every token's matrix."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax.memory import Gates
from titans_jax.memory.forms.intra_chunk import intra_chunks
from titans_jax.ops.backend import CPU, PALLAS, TPU
from titans_jax.ops.matmul import Transposed

TOKENS, NARROW, WIDE = 12, 4, 6


def matrices(start, momentum, inner, deltas, gates):
    """([tokens, in, out], S): S_t = eta_t S_{t-1} - theta_t x_t^T delta_t and W_t = Diag(A_t) a_t W_{t-1} Diag(B_t) +
    m_t S_t, token by token; padding changes nothing."""
    weights, carried, formed = start, momentum, []
    for t in range(len(inner)):
        if gates["mask"][t]:
            old = gates["momentum"][t] * carried if "momentum" in gates else 0
            carried = old - gates["step_size"][t] * np.outer(inner[t], deltas[t])
            kept = gates["retention"][t] * weights
            if "key_retention" in gates:
                kept = np.diag(gates["key_retention"][t]) @ kept
            if "value_retention" in gates:
                kept = kept @ np.diag(gates["value_retention"][t])
            weights = kept + carried
        formed.append(weights)
    return np.array(formed), carried


def draw(names, inputs, outputs, seed=0):
    generator = np.random.default_rng(seed)
    shapes = {"key_retention": (TOKENS, inputs), "value_retention": (TOKENS, outputs)}
    gates = {name: generator.uniform(0.3, 1, shapes.get(name, (TOKENS,))) for name in ("retention", *names)}
    gates |= {"step_size": generator.uniform(0.1, 0.9, TOKENS), "mask": np.arange(TOKENS) < TOKENS - 2}
    start, momentum = generator.normal(size=(2, inputs, outputs))
    inner, queries = generator.normal(size=(2, TOKENS, inputs))
    return gates, start, momentum, inner, generator.normal(size=(TOKENS, outputs)), queries


def block_gates(gates):
    """`Gates` of one block and one matrix, leaves [1, tokens, ...]."""
    log = {name: jnp.log(jnp.asarray(gate))[None] for name, gate in gates.items() if name not in ("step_size", "mask")}
    return Gates(
        log_retention=log["retention"][..., None],
        log_momentum=log["momentum"][..., None] if "momentum" in log else None,
        step_size=jnp.asarray(gates["step_size"])[None, :, None],
        mask=jnp.asarray(gates["mask"])[None],
        log_key_retention=log.get("key_retention"),
        log_value_retention=log.get("value_retention"),
    )


CASES = {
    "scalar": (),
    "scalar-momentum": ("momentum",),
    "by-input": ("key_retention",),
    "by-output": ("value_retention",),
    "by-both": ("key_retention", "value_retention"),
    "every-input-momentum": ("key_retention", "momentum"),
    "every-output-momentum": ("value_retention", "momentum"),
}


def run(names, backend, arguments, learned):
    """(reads, reads of the change since `learned`, W, S) of the only block and matrix."""
    gates, start, momentum, inner, deltas, queries = arguments

    @jax.jit
    def answer(gates, start, momentum, inner, deltas, queries, learned):
        (matrix,) = intra_chunks(gates, backend)
        matrix = jax.tree.map(lambda leaf: leaf[0], matrix)
        momentum = momentum if "momentum" in names else None
        reads = [matrix.read(queries, start, momentum, inner, deltas, x, inner.dtype) for x in (None, learned)]
        return *reads, *matrix.carry(backend, start, momentum, inner, deltas, inner.dtype)

    with jax.enable_x64(True):
        start = jax.tree.map(jnp.asarray, start)
        return answer(block_gates(gates), start, *map(jnp.asarray, (momentum, inner, deltas, queries, learned)))


@pytest.mark.parametrize(
    "inputs, outputs, backend",
    [(NARROW, WIDE, CPU), (WIDE, NARROW, TPU)],
    ids=["wider-cpu", "narrower-tpu"],
)
@pytest.mark.parametrize("case", CASES)
def test_reads_and_state_are_those_of_the_formed_matrices(case, inputs, outputs, backend):
    arguments = draw(CASES[case], inputs, outputs)
    gates, start, momentum, inner, deltas, queries = arguments
    formed, pushed = matrices(start, momentum, inner, deltas, gates)
    learned = np.random.default_rng(2).normal(size=start.shape)
    reads, since_learned, weights, carried = run(CASES[case], backend, arguments, learned)
    np.testing.assert_allclose(reads, np.einsum("ti,tio->to", queries, formed), rtol=0, atol=1e-12)
    np.testing.assert_allclose(since_learned, np.einsum("ti,tio->to", queries, learned + formed), rtol=0, atol=1e-12)
    np.testing.assert_allclose(weights, formed[-1], rtol=0, atol=1e-12)
    if "momentum" in CASES[case]:
        np.testing.assert_allclose(carried, pushed, rtol=0, atol=1e-12)
    else:
        assert carried is None


@pytest.mark.parametrize("inputs, outputs", [(NARROW, WIDE), (WIDE, NARROW)], ids=["wider", "narrower"])
def test_numbers_that_fill_rows_of_lanes(inputs, outputs):
    """In a kernel the last beta, f, p are rows of equal numbers, and a narrow matrix may be kept transposed."""
    gates, start, momentum, inner, deltas, _ = draw(("momentum",), inputs, outputs)
    formed, pushed = matrices(start, momentum, inner, deltas, gates)
    transposed = outputs < inputs
    keep = (lambda x: Transposed(jnp.asarray(x).T)) if transposed else jnp.asarray

    @jax.jit
    def answer(gates, start, momentum, inner, deltas):
        (matrix,) = intra_chunks(gates, PALLAS)
        matrix = jax.tree.map(lambda leaf: leaf[0], matrix)
        matrix = dataclasses.replace(matrix, ends=jnp.repeat(matrix.ends, PALLAS.number_lanes, axis=1))
        return matrix.carry(PALLAS, start, momentum, inner, deltas, inner.dtype)

    with jax.enable_x64(True):
        ends = answer(block_gates(gates), keep(start), keep(momentum), jnp.asarray(inner), jnp.asarray(deltas))
    for got, wanted in zip(ends, (formed[-1], pushed), strict=True):
        np.testing.assert_allclose(got.array.T if transposed else got, wanted, rtol=0, atol=1e-12)


def test_of_several_matrices_the_first_has_inputs_and_the_last_outputs():
    """Channel-wise retention acts on the outer sides of a memory; what is between decays by numbers."""
    generator = np.random.default_rng(1)
    log = lambda *shape: jnp.asarray(np.log(generator.uniform(0.3, 1, shape)), jnp.float32)  # noqa: E731
    gates = Gates(log(2, TOKENS, 3), None, jnp.ones((2, TOKENS, 3)), None, None, log(2, TOKENS, 4), log(2, TOKENS, 4))
    made = jax.eval_shape(lambda: intra_chunks(gates, CPU))
    assert [(one.by_input is not None, one.by_output is not None) for one in made] == [
        (True, False), (False, False), (False, True)
    ]  # fmt: skip
    assert all(one.G.shape == (2, TOKENS, TOKENS) for one in made)
