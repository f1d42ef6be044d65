"""A scan over chunks, for layers whose tokens read their memories at the chunk's start.

The inputs of such a layer's memories depend on the memories, so a chunk's inputs are made only after the chunk before
is written. From a chunk's start on (the fast case) rows are cut into chunks by a reshape; from a state inside a chunk,
by slices.

Shapes: b batch, t time, c tokens of a part of a chunk.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from titans_jax import memory
from titans_jax.layers.segments import from_segments, to_segments
from titans_jax.memory.forms.scan_chunks import BLOCKS_PER_GROUP, scan_groups
from titans_jax.ops.backend import BlockSize

Step = Callable[[memory.MemoryState, Any, Any, jax.Array | None], tuple[memory.MemoryState, Any, Any]]


def scan_chunks(
    step: Step, chunk_size: int, state: memory.MemoryState, extra: Any, inputs: Any
) -> tuple[memory.MemoryState, Any, Any]:
    """Take inputs [b, t, ...] chunk by chunk: the state and `extra` after them, and outputs [b, t, ...].

    Args:
      step: (state, extra, inputs, valid) -> (state, extra, outputs), for tokens of one chunk: inputs, outputs [b, c,
        ...]; valid: bool [c], True at the first slots, which hold tokens, False at the others (None: all hold tokens).
        The position of the state that it returns is ignored.
      state: of memories with leading axes of any kind. Its position, a number for all of them, is that of the first
        token; where it is a Python 0, chunks need no anchor and groups of them are rematerialised.
    """
    time = jax.tree.leaves(inputs)[0].shape[1]
    if isinstance(state.position, int) and state.position == 0:
        return _whole_chunks(step, chunk_size, state, extra, inputs, time)

    # Slots of chunks from the open one's first token on: the first `position` of them were read before.
    width, count = min(chunk_size, time), -(-(time + chunk_size - 1) // chunk_size)
    position = jnp.asarray(state.position, jnp.int32)
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, width), *((0, 0),) * (x.ndim - 2))), inputs)

    def part(carry: tuple, number: jax.Array) -> tuple[tuple, Any]:
        state, extra = carry
        begin = jnp.maximum(number * chunk_size - position, 0)
        end = jnp.minimum((number + 1) * chunk_size - position, time)
        cut = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, begin, width, axis=1), padded)
        valid = None if time == 1 else begin + jnp.arange(width, dtype=jnp.int32) < end
        after, extra, outputs = step(state, extra, cut, valid)
        now = (state.position + jnp.maximum(end - begin, 0)) % chunk_size
        return (at(after, now), extra), outputs

    numbers = jnp.arange(count, dtype=jnp.int32)
    (state, extra), outputs = jax.lax.scan(part, (at(state, position), extra), numbers)
    slots = position + jnp.arange(time, dtype=jnp.int32)
    number = slots // chunk_size
    place = slots - jnp.maximum(number * chunk_size, position)
    return state, extra, jax.tree.map(lambda x: jnp.moveaxis(x[number, :, place], 0, 1), outputs)


def _whole_chunks(
    step: Step, chunk_size: int, state: memory.MemoryState, extra: Any, inputs: Any, time: int
) -> tuple[memory.MemoryState, Any, Any]:
    """`scan_chunks` from a chunk's start on."""
    whole, rest = divmod(time, chunk_size)

    def at_start(weights: Any, momentum: Any) -> memory.MemoryState:
        return memory.MemoryState(weights, momentum, weights, 0)

    def chunk(carry: tuple, numbered: tuple[jax.Array, Any]) -> tuple[tuple, Any]:
        *carried, extra = carry
        after, extra, outputs = step(at_start(*carried), extra, numbered[1], None)
        return (after.weights, after.momentum, extra), outputs

    parts = []
    if whole:
        cut = jax.tree.map(lambda x: to_segments(whole, chunk_size, x), inputs)
        scan = lambda carry, group: jax.lax.scan(chunk, carry, group)  # noqa: E731
        size = BlockSize(chunk_size, BLOCKS_PER_GROUP)
        (*carried, extra), outputs = scan_groups(scan, size, (state.weights, state.momentum, extra), cut)
        state = at_start(*carried)
        parts.append(jax.tree.map(from_segments, outputs))
    if rest:
        state, extra, outputs = step(state, extra, jax.tree.map(lambda x: x[:, time - rest :], inputs), None)
        parts.append(outputs)
    return at(state, rest), extra, jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)


def at(state: memory.MemoryState, position: int | jax.Array | None) -> memory.MemoryState:
    """The state with another position."""
    return dataclasses.replace(state, position=position)
