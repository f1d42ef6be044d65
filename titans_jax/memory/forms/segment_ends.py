"""The weights at the ends of segments, from a form that has no place to keep them: a scan over the segments."""

from __future__ import annotations

import jax

from titans_jax.memory.forms.chunk_algorithm import Form, FormOptions, MemoryInputs, MemoryOutputs
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import Carried, MemoryState, Params
from titans_jax.ops.recursive_blocks import to_blocks


def by_segments(
    form: Form,
    rule: MemoryRule,
    params: Params,
    state: MemoryState,
    initial: MemoryState | None,
    inputs: MemoryInputs,
    options: FormOptions,
) -> MemoryOutputs:
    """`form` from a chunk's start on, for whole segments of `options.segment` tokens, with their `ends`."""

    whole = options._replace(segment=None)

    def one(carry: Carried, segment: MemoryInputs) -> tuple[Carried, tuple]:
        reads, after, surprise, _ = form(rule, params, carry.state(), initial, segment, whole)
        return Carried.of(after), (reads, surprise, after.weights)

    segments = jax.tree.map(lambda x: to_blocks(options.segment, x), inputs)
    carry, (reads, surprise, ends) = jax.lax.scan(one, Carried.of(state), segments)
    reads, surprise = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (reads, surprise))
    return MemoryOutputs(reads, carry.state(), surprise, ends)
