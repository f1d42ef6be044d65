"""The scan over blocks of chunks, wherever in a chunk the state stands.

The fast case (start at a chunk's first token, no padding, whole blocks) is a reshape. Otherwise tokens are shifted to
their place in the open chunk, the other slots are padding, and the anchor of the chunk that stays open is kept for the
state to return.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.chunk_algorithm import ChunkAlgorithm, MemoryInputs, MemoryOutputs
from titans_jax.memory.forms.omega_window import add_window, last_window
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import Matrices, MemoryState, Params, WindowTokens
from titans_jax.ops.backend import BlockSize
from titans_jax.ops.recursive_blocks import to_blocks

BLOCKS_PER_GROUP = 8
"""Blocks of a rematerialisation group: of a long sequence the backward pass stores one state per group and, for one
group at a time, one state per block. A sequence that fits in one group stores a state per block and repeats nothing."""


def scan_blocks(
    algorithm: ChunkAlgorithm,
    params: Params,
    state: MemoryState,
    initial: MemoryState | None,
    inputs: MemoryInputs,
) -> MemoryOutputs:
    """Prepare groups of blocks and step from block to block."""
    between_chunks = starts_chunk(state)
    rule, chunk_size, size = algorithm.rule, algorithm.rule.chunk_size, algorithm.block_size
    layout = with_window(rule, lay_out(chunk_size, size.tokens, state, inputs), state, initial)
    initial = None if initial is None else dataclasses.replace(initial, window=None)

    def step(carry, block):
        weights, momentum, opened = carry  # opened: the anchor and `step_total` of the chunk that stays open
        index, inputs, prepared = block
        # Chunks begin where the last one ended; only a state that arrives inside a chunk brings an anchor of its own.
        anchor = (
            weights if between_chunks else jax.tree.map(functools.partial(jnp.where, index == 0), state.anchor, weights)
        )
        total = state.step_total
        if total is not None:
            total = jnp.zeros_like(total) if between_chunks else jnp.where(index == 0, total, 0)
        start = MemoryState(weights, momentum, anchor, 0, step_total=total)
        end, reads, surprise = algorithm.step(params, start, initial, inputs.tokens(), prepared)
        mask = inputs.gates.mask
        if mask is not None:
            now = end.anchor, end.step_total
            opened = jax.tree.map(functools.partial(jnp.where, jnp.any(mask)), now, opened)
            surprise = jax.tree.map(lambda x: jnp.where(mask, x, 0), surprise)
        return (end.weights, end.momentum, opened), (reads, surprise)

    def scan(carry, group):
        index, inputs = group
        return jax.lax.scan(rematerialised(step), carry, (index, inputs, algorithm.prepare(inputs)))

    carry = (state.weights, state.momentum, None if layout.last is None else (state.anchor, state.step_total))
    carry, (reads, surprise) = scan_groups(scan, size, carry, layout.inputs)
    surprise = jax.tree.map(layout.unplace, surprise)
    weights, momentum, opened = carry
    anchor, total = (None, state.step_total) if opened is None else opened
    after = final_state(chunk_size, layout, state, weights, momentum, anchor, total)
    return MemoryOutputs(layout.reads(reads), after, surprise)


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """Inputs in blocks, leaves [blocks, tokens, ...].

    last: slot of the last token that is no padding (-1: none), None when blocks are full and no chunk stays open.
    valid: whether padding and resets stand where the layout allows them; None: they do. window: that after the last
    token, for an algorithm with one. step_totals: for the kernel of an algorithm that steps by chunks, sums of each
    chunk's step sizes, [blocks, matrices].
    """

    inputs: MemoryInputs
    time: int
    offset: int | jax.Array
    last: jax.Array | None
    valid: jax.Array | None
    window: WindowTokens | None = None
    step_totals: jax.Array | None = None

    def unplace(self, blocks: jax.Array) -> jax.Array:
        """[blocks, tokens, ...] back to [time, ...]."""
        flat = blocks.reshape(-1, *blocks.shape[2:])
        if isinstance(self.offset, int):
            return flat[self.offset : self.offset + self.time]
        return jax.lax.dynamic_slice_in_dim(flat, self.offset, self.time)

    def reads(self, blocks: jax.Array) -> jax.Array:
        """`unplace`, and NaN everywhere if padding or a reset is misplaced: never silently wrong."""
        flat = self.unplace(blocks)
        return flat if self.valid is None else jnp.where(self.valid, flat, jnp.nan)


def lay_out(chunk_size: int, block_size: int, state: MemoryState, inputs: MemoryInputs) -> BlockLayout:
    """Place inputs [time, ...] in blocks of `block_size` slots, a multiple of `chunk_size`."""
    gates, resets = inputs.gates, inputs.resets
    time, offset = inputs.queries.shape[0], state.position
    if starts_chunk(state) and time % block_size == 0 and gates.mask is None:
        valid = None if resets is None else ~jnp.any(resets & (jnp.arange(time, dtype=jnp.int32) % chunk_size > 0))
        return BlockLayout(jax.tree.map(functools.partial(to_blocks, block_size), inputs), time, 0, None, valid)

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

    placed = jax.tree.map(place, dataclasses.replace(inputs, gates=dataclasses.replace(gates, mask=mask)))
    return BlockLayout(jax.tree.map(functools.partial(to_blocks, block_size), placed), time, offset, last, valid)


def with_window(rule: MemoryRule, layout: BlockLayout, state: MemoryState, initial: MemoryState | None) -> BlockLayout:
    """The layout whose keys, values and step sizes begin with the window before each chunk; without a window itself."""
    if rule.algorithm.window == 1:
        return layout
    inputs = add_window(rule, layout.inputs, layout.offset, state, initial)
    return dataclasses.replace(layout, inputs=inputs, window=last_window(rule, inputs, layout.last, state))


def starts_chunk(state: MemoryState) -> bool:
    """Whether it is known before compilation that the next token starts a chunk."""
    return isinstance(state.position, int) and state.position == 0


def scan_groups(scan, size: BlockSize, carry, inputs):
    """`scan` run over groups of blocks, each rematerialised from its start, from inputs with leaves [blocks, ...]:
    (carry, outputs [blocks, ...])."""
    blocks, group = len(jax.tree.leaves(inputs)[0]), size.group
    inputs = (jnp.arange(blocks, dtype=jnp.int32), inputs)
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
    """`function` with a backward pass that repeats all but linear solves, whose solutions are no larger than reads."""
    keep = lambda primitive, *_, **__: primitive.name == "custom_linear_solve"  # noqa: E731
    return jax.checkpoint(function, prevent_cse=False, policy=keep)


def final_state(
    chunk_size: int,
    layout: BlockLayout,
    state: MemoryState,
    weights: Matrices,
    momentum: Matrices,
    anchor: Matrices,
    step_total: jax.Array | None,
) -> MemoryState:
    """The state to return: at a chunk's start after whole chunks, else in one, with the anchor and the `step_total` of
    the chunk that stays open."""
    if layout.last is None:
        step_total = None if step_total is None else jnp.zeros_like(step_total)
        return MemoryState(weights, momentum, weights, 0, layout.window, step_total)
    position = jnp.where(layout.last < 0, state.position, (layout.last + 1) % chunk_size)
    anchor = jax.tree.map(lambda w, a: jnp.where(position == 0, w, a), weights, anchor)
    step_total = None if step_total is None else jnp.where(position == 0, 0, step_total)
    return MemoryState(weights, momentum, anchor, position.astype(jnp.int32), layout.window, step_total)
