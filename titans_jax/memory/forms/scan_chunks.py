"""The chunk grid: tokens laid out in blocks of whole chunks, wherever in a chunk the state stands.

The fast case (start at a chunk's first token, no padding, whole blocks) is a reshape. Otherwise tokens are shifted to
their place in the open chunk, the rest is masked, and the open chunk's start is followed for the state to return.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from titans_jax.memory.gates import Gates
from titans_jax.memory.state import MemoryState

# Blocks per rematerialisation group: of a long sequence the backward pass stores one state per group and, for one group
# at a time, one state per block (papers 1.6.9). What fits in one group stores a state per block and repeats nothing.
GROUP = 8


@dataclasses.dataclass(frozen=True)
class Grid:
    """Inputs in blocks: `inputs` (queries, keys, values, gates, resets), leaves [blocks, block_size, ...].

    last: slot of the last token that is no padding (-1: none), None when blocks are full and the state is closed.
    """

    inputs: tuple
    time: int
    offset: int | jax.Array
    last: jax.Array | None
    valid: jax.Array | None

    def unplace(self, blocks: jax.Array) -> jax.Array:
        """[blocks, block_size, ...] back to [time, ...]."""
        flat = blocks.reshape(-1, *blocks.shape[2:])
        if isinstance(self.offset, int):
            return flat[self.offset : self.offset + self.time]
        return jax.lax.dynamic_slice_in_dim(flat, self.offset, self.time)

    def reads(self, blocks: jax.Array) -> jax.Array:
        """`unplace`, and NaN everywhere if padding or a reset broke the grid's rules: never silently wrong."""
        flat = self.unplace(blocks)
        return flat if self.valid is None else jnp.where(self.valid, flat, jnp.nan)


def lay_out(chunk_size: int, block_size: int, state: MemoryState, queries, keys, values, gates: Gates, resets) -> Grid:
    """Place [time, ...] inputs on the grid of `block_size` slots (a multiple of `chunk_size`)."""
    time, offset = queries.shape[0], state.position
    inputs = (queries, keys, values, gates, resets)
    if starts_chunk(state) and time % block_size == 0 and gates.mask is None:
        valid = None if resets is None else ~jnp.any(resets & (jnp.arange(time, dtype=jnp.int32) % chunk_size > 0))
        return Grid(jax.tree.map(functools.partial(to_blocks, block_size), inputs), time, 0, None, valid)

    slots = time + (offset if isinstance(offset, int) else chunk_size - 1)
    slots = -(-slots // block_size) * block_size
    mask = jnp.ones((time,), bool) if gates.mask is None else gates.mask
    starts = jnp.zeros((time,), bool) if resets is None else resets
    resumed = mask[1:] & ~mask[:-1] & ~starts[1:]
    misplaced = starts & ((offset + jnp.arange(time, dtype=jnp.int32)) % chunk_size > 0)
    valid = ~(jnp.any(resumed) | jnp.any(misplaced))
    last = jnp.max(jnp.where(mask, offset + jnp.arange(time, dtype=jnp.int32), -1), initial=-1)

    def place(x):
        padded = jnp.zeros((slots, *x.shape[1:]), x.dtype)
        if isinstance(offset, int):
            return padded.at[offset : offset + time].set(x)
        return jax.lax.dynamic_update_slice_in_dim(padded, x, offset, axis=0)

    placed = jax.tree.map(place, (queries, keys, values, dataclasses.replace(gates, mask=mask), resets))
    return Grid(jax.tree.map(functools.partial(to_blocks, block_size), placed), time, offset, last, valid)


def starts_chunk(state: MemoryState) -> bool:
    """Whether it is known before compilation that the next token starts a chunk."""
    return isinstance(state.position, int) and state.position == 0


def to_blocks(block_size: int, x: jax.Array) -> jax.Array:
    return x.reshape(-1, block_size, *x.shape[1:])


def memorize_blocks(
    block,
    block_size: int,
    rule,
    params,
    state,
    queries,
    keys,
    values,
    gates,
    resets,
    initial,
    prepare=None,
    group=GROUP,
):
    """Scan `block` over the grid: (reads [time, head_dim], state, surprise [time]).

    block(rule, params, start, initial, inputs) -> ((weights, momentum, open chunk's start), reads, surprise) for one
    block's inputs (queries, keys, values, gates, resets, prepared). prepare(*inputs), leaves [blocks, ...], gives
    what can be computed for the blocks of a group at once because it does not depend on the state.
    """
    between_chunks = starts_chunk(state)
    layout = lay_out(rule.chunk_size, block_size, state, queries, keys, values, gates, resets)

    def step(carry, inputs):
        weights, momentum, opened = carry
        index, *inputs = inputs
        # Chunks begin where the last one ended; only a state that arrives inside a chunk brings an anchor of its own.
        anchor = (
            weights if between_chunks else jax.tree.map(functools.partial(jnp.where, index == 0), state.anchor, weights)
        )
        start = MemoryState(weights, momentum, anchor, 0)
        (weights, momentum, chunk_start), reads, surprise = block(rule, params, start, initial, inputs)
        mask = inputs[3].mask
        if mask is not None:
            opened = jax.tree.map(functools.partial(jnp.where, jnp.any(mask)), chunk_start, opened)
            surprise = jax.tree.map(lambda x: jnp.where(mask, x, 0), surprise)
        return (weights, momentum, opened), (reads, surprise)

    def scan(carry, inputs):
        prepared = prepare and prepare(*inputs[1:])
        return jax.lax.scan(rematerialised(step), carry, (*inputs, prepared))

    carry = (state.weights, state.momentum, None if layout.last is None else state.anchor)
    carry, (reads, surprise) = scan_groups(scan, group, carry, layout.inputs)
    surprise = jax.tree.map(layout.unplace, surprise)
    return layout.reads(reads), final_state(rule.chunk_size, layout, state, *carry), surprise


def scan_groups(scan, group: int, carry, inputs):
    """`scan` groups of `group` blocks, each rematerialised from its start: (carry, outputs [blocks, ...])."""
    blocks = inputs[0].shape[0]
    inputs = (jnp.arange(blocks, dtype=jnp.int32), *inputs)
    if blocks <= group:
        return scan(carry, inputs)
    scan = rematerialised(scan)
    whole = blocks - blocks % group
    grouped = jax.tree.map(lambda x: x[:whole].reshape(-1, group, *x.shape[1:]), inputs)
    carry, outputs = jax.lax.scan(scan, carry, grouped)
    outputs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)
    if whole == blocks:
        return carry, outputs
    carry, rest = scan(carry, jax.tree.map(lambda x: x[whole:], inputs))
    return carry, jax.tree.map(lambda *x: jnp.concatenate(x), outputs, rest)


def rematerialised(function):
    """`function` whose backward pass repeats all but solves: their solutions are no larger than what is read."""
    keep = lambda primitive, *_, **__: primitive.name == "custom_linear_solve"  # noqa: E731
    return jax.checkpoint(function, prevent_cse=False, policy=keep)


def final_state(chunk_size: int, grid: Grid, state: MemoryState, weights, momentum, anchor) -> MemoryState:
    """The state to return: closed after whole chunks, else open with the anchor that the scan followed."""
    if grid.last is None:
        return MemoryState(weights, momentum, weights, 0)
    position = jnp.where(grid.last < 0, state.position, (grid.last + 1) % chunk_size)
    anchor = jax.tree.map(lambda w, a: jnp.where(position == 0, w, a), weights, anchor)
    return MemoryState(weights, momentum, anchor, position.astype(jnp.int32))
