"""Weights at the ends of segments: those of a sequence that is read in as many calls, with their gradients."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests.memory.pallas.test_fused import CHUNK, FLOAT64, assert_equal, draw, gates_of, linear, probed, titans
from titans_jax import memory
from titans_jax.memory import presets
from titans_jax.memory.pallas import kernels
from titans_jax.ops import backend

SEGMENT, SEGMENTS = 4 * CHUNK, 3
RULES = {
    "titans": titans(),
    "moneta": presets.moneta(expansion=2, chunk_size=CHUNK),
    "window": presets.omeganet(chunk_size=CHUNK),
    "linear": linear(CHUNK),
}


def found(rule, params, inputs, form, resets=None, in_calls=False):
    """(reads, ends), and their gradients by params and inputs; in_calls: of a segment each."""

    def run(params, inputs):
        arguments = [inputs[name] for name in ("queries", "keys", "values")]
        arguments.append(gates_of(inputs))
        state = memory.init_state(rule, params)
        call = functools.partial(memory.memorize, rule, params, form=form)
        if not in_calls:
            reads, _, ends = call(state, *arguments, resets=resets, segment=SEGMENT)
            return reads, ends
        reads, ends = [], []
        for part in range(SEGMENTS):
            cut = lambda x: x[part * SEGMENT : (part + 1) * SEGMENT]  # noqa: B023, E731
            now, state = call(state, *jax.tree.map(cut, arguments), resets=None if resets is None else cut(resets))
            reads.append(now)
            ends.append(state.weights)
        return jax.numpy.concatenate(reads), tuple(map(jax.numpy.stack, zip(*ends, strict=True)))

    def loss(params, inputs):
        results = run(params, inputs)
        return probed(results), results

    with jax.enable_x64():
        arrays = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, inputs))
        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*arrays)


@pytest.mark.slow_but_for("titans-fused", "moneta-chunked")
@pytest.mark.parametrize("form", ["fused", "chunked", "recurrent"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_ends_are_those_of_as_many_calls(rule, form, monkeypatch):
    """A segment is two groups of chunks that share a stored state; of a linear memory, less than a kernel's block."""
    monkeypatch.setattr(kernels, "STATE_TOKENS", 2 * CHUNK)
    params, inputs = draw(rule, time=SEGMENTS * SEGMENT, head_dim=8)
    assert_equal(found(rule, params, inputs, form), found(rule, params, inputs, "chunked", in_calls=True), FLOAT64)


@pytest.mark.slow
def test_a_linear_memory_has_two_blocks_in_a_segment(monkeypatch):
    sizes = {name: backend.BlockSize(SEGMENT // 2, 4) for name in ("delta_rule", "gated_delta_rule")}
    monkeypatch.setattr(backend, "PALLAS", dataclasses.replace(backend.PALLAS, **sizes))
    rule = linear(CHUNK)
    params, inputs = draw(rule, time=SEGMENTS * SEGMENT, head_dim=8)
    assert_equal(found(rule, params, inputs, "fused"), found(rule, params, inputs, "chunked", in_calls=True), FLOAT64)


@pytest.mark.slow
def test_documents_begin_anew():
    """At a segment's start, and inside another."""
    rule, resets = titans(), np.zeros(SEGMENTS * SEGMENT, bool)
    resets[[SEGMENT, 2 * SEGMENT + CHUNK]] = True
    params, inputs = draw(rule, time=SEGMENTS * SEGMENT, head_dim=8)
    expected = found(rule, params, inputs, "chunked", resets, in_calls=True)
    for form in ("fused", "chunked"):
        assert_equal(found(rule, params, inputs, form, resets), expected, FLOAT64)


@pytest.mark.parametrize(
    "time, position, segment, sentence",
    [
        (24, 0, 12, "segment is 12: it must be a multiple of the chunk's 8 tokens that divides the 24 tokens."),
        (24, 0, 16, "segment is 16: it must be a multiple of the chunk's 8 tokens that divides the 24 tokens."),
        (24, 0, 0, "segment is 0: it must be a multiple of the chunk's 8 tokens that divides the 24 tokens."),
        (24, 3, 8, "state.position is 3, and segment 8: segments need a state that is known to be at a chunk's start; "
         "use start_chunk(state), or segment=None."),
    ],
)  # fmt: skip
def test_what_is_no_whole_segment_is_refused(time, position, segment, sentence):
    rule = titans()
    params, inputs = draw(rule, time=time, head_dim=8)
    state = memory.init_state(rule, params)
    state = memory.MemoryState(state.weights, state.momentum, state.weights, position)
    tokens = (inputs[name] for name in ("queries", "keys", "values"))
    with pytest.raises(ValueError) as refused:
        memory.memorize(rule, params, state, *tokens, gates_of(inputs), segment=segment)
    assert str(refused.value) == sentence
