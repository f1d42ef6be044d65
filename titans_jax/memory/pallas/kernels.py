"""The kernels of the fused form: a group of chunks of several heads in every step of their grid.

They run the chunked form's own step, so they run every memory, bias and retention that it does. The backward kernel is
`jax.vjp` of the same function, the coefficients of the gates included, over chunks from the last to the first. The grid
is (groups of heads, groups of chunks); the forward kernel keeps the start state of every group of chunks, from which
the backward kernel runs the group once more. Where nothing is to be kept between the two, a third kernel computes these
states again, without reads.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from titans_jax.memory.pallas.kernel_algorithm import TOKENS, Asked, Chunks, Heads, HeadState, KernelAlgorithm, Results
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.ops import recursive_blocks
from titans_jax.ops.pallas_tpu import (
    SideBySide,
    Steps,
    call,
    clear,
    copy,
    largest_divisor,
    read,
    tiled_bytes,
    usable_vmem,
    write,
)

STATE_TOKENS, MOST_CHUNKS = 64, 8
"""For so many tokens, and at most so many chunks, one state is stored. The backward pass runs all of these chunks but
the last once more: storing overlaps with a kernel's work, repeating does not."""
SHARED_STATE = 1 / 64
"""Share of a kernel's VMEM of a head's state up to which chunks share a stored one: the backward kernel that repeats
chunks needs much more than the one that does not, and with heads of 256 more than there is."""
MOST_HEADS = 32
"""The most heads at a time: more are no faster and take minutes to compile."""


class KernelSize(NamedTuple):
    """How much a kernel takes at once, and how many float32 values it was found to need in VMEM beside its blocks.

    tokens: that all heads write. Heads' matrix products are independent, so others run during one head's latency.
    lanes: values per token and per row or column, whichever are more, of every fast matrix. matrices: copies of a
    head's matrices, where their retention is not linear. sums: of log gates, per level of halving, token, channel and
    side with channel-wise retention. directions: copies of a head's matrices, where whole chunks step.
    """

    tokens: int
    lanes: int
    matrices: int
    sums: int
    directions: int


FORWARD, BACKWARD = KernelSize(2048, 8, 1, 1, 3), KernelSize(1024, 27, 8, 2, 12)


def grid_steps(
    rule: MemoryRule,
    chunks: Chunks,
    start: HeadState,
    neighbours: int,
    size: KernelSize,
    segment: int | None = None,
) -> Steps:
    """As many heads as write `size.tokens` tokens together in a chunk, and as many chunks as share a stored state, none
    of them across a segment's end."""
    n, count, tokens, head_dim = chunks.queries.shape
    shapes = [w.shape[1:] for w in jax.tree.leaves(start.weights)]
    state_bytes = sum(tiled_bytes(x.shape[1:], x.dtype) for x in jax.tree.leaves(start))
    most = min(STATE_TOKENS // tokens, MOST_CHUNKS) if state_bytes <= SHARED_STATE * usable_vmem() else 1
    group = largest_divisor(segment or count, most)
    sides = sum(x is not None for x in (chunks.log_key_retention, chunks.log_value_retention))
    written = chunks.keys.shape[2]  # with those of a window before the chunk
    needed = [(written, max(shape)) for shape in shapes] * size.lanes
    needed += shapes * (0 if rule.retention.linear else size.matrices)
    needed += shapes * (size.directions if rule.algorithm.steps_by_chunk else 0)
    needed += [(tokens, head_dim)] * (sides * recursive_blocks.levels(tokens) * size.sums)
    head_bytes = sum(tiled_bytes(shape, jnp.float32) for shape in needed)
    heads = min(size.tokens // written, MOST_HEADS)
    return Steps(n // neighbours, neighbours, heads, group, count // group, head_bytes)


def run_forward(
    algorithm: KernelAlgorithm, asked: Asked, stores_states: bool, neighbours: int, chunks: Chunks, heads: Heads
) -> tuple[Results, tuple]:
    """(results, states): the state before every group of chunks, [n, groups, rows, columns], if they are stored, else
    (). neighbours: heads that follow each other in n, which lie side by side in a model."""
    steps = grid_steps(algorithm.rule, chunks, heads.start, neighbours, FORWARD, asked.segment)
    n, count, size, head_dim = chunks.queries.shape
    end, dtype = like(heads.start), jax.tree.leaves(heads.start)[0].dtype
    reads = jax.ShapeDtypeStruct((steps.rows, count, size, neighbours * head_dim), chunks.queries.dtype)
    results = Results(
        SideBySide(reads, head_dim),
        jax.ShapeDtypeStruct((n, count, size, 2), dtype) if asked.surprise else None,
        end,
        end.weights if asked.anchor else None,
        None if asked.segment is None else each(count // asked.segment, end.weights),
    )
    states = state_shapes(algorithm.rule, steps, chunks, heads) if stores_states else ()
    step = functools.partial(algorithm.step, asked)
    results, states = go_forward(step, asked, steps, side_by_side(chunks, neighbours), heads, (results, states))
    return results._replace(reads=results.reads.astype(dtype).apart()), states


def run_states(algorithm: KernelAlgorithm, asked: Asked, neighbours: int, chunks: Chunks, heads: Heads) -> tuple:
    """The states of `run_forward`, without reads."""
    steps = grid_steps(algorithm.rule, chunks, heads.start, neighbours, FORWARD, asked.segment)
    states = state_shapes(algorithm.rule, steps, chunks, heads)
    step = functools.partial(algorithm.step, asked._replace(surprise=False))
    return go_forward(step, asked, steps, side_by_side(chunks, neighbours), heads, ((), states))[1]


def state_shapes(rule: MemoryRule, steps: Steps, chunks: Chunks, heads: Heads):
    """Shapes of the states before every group of chunks."""
    # A chunk's products take its start state in the operands' dtype anyway; later chunks run from it would not.
    narrow = rule.retention.linear and steps.chunks == 1

    def shape(x):
        dtype = chunks.keys.dtype if narrow else x.dtype
        return jax.ShapeDtypeStruct((x.shape[0], steps.groups, *x.shape[1:]), dtype)

    return jax.tree.map(shape, heads.start)


def step_heads(step, slow, state, anchor, initial, chunk: Chunks, is_first):
    """`KernelAlgorithm.step` for several heads at once; the anchor of the sequence's first chunk may differ from its
    start state."""
    if anchor is not None:
        anchor = jax.tree.map(lambda a, w: jnp.where(is_first, a, w), anchor, state.weights)
    return jax.vmap(step)(slow, state, anchor, initial, chunk)


def go_forward(step, asked: Asked, steps: Steps, chunks: Chunks, heads: Heads, outputs: tuple):
    """The forward kernel, for outputs (results, states), either of them () where it is not asked for."""

    def kernel(chunks, heads, results, states, carried):
        group = pl.program_id(1)

        @pl.when(group == 0)
        def _():
            copy(heads.start, carried)
            if results:
                clear(results.anchor)

        if states:
            write(states, read(carried), 0)
        slow, initial, anchor = read((heads.slow, heads.initial, heads.anchor))

        def one(j):
            state, opened, reads, surprise = step_heads(
                step, slow, read(carried), anchor, initial, read(chunks, j), first(group, j)
            )
            write(carried, state)
            if results:
                write((results.reads, results.surprise), (reads, surprise), j)
                add(results.anchor, opened)

        repeat(steps.chunks, one)

        if results:
            if asked.segment is not None:

                @pl.when(ends_segment(asked, steps, group))
                def _():
                    write(results.ends, read(carried).weights, 0)

            @pl.when(group == steps.groups - 1)
            def _():
                copy(carried, results.end)

    name = "memorize" if outputs[0] else "memorize_states"
    return call(kernel, name, steps, (chunks, heads), outputs, [like(heads.start)], backwards=False)


def run_backward(
    algorithm: KernelAlgorithm,
    asked: Asked,
    neighbours: int,
    chunks: Chunks,
    heads: Heads,
    states: tuple,
    cotangents: Results,
) -> tuple[Chunks, Heads]:
    """Cotangents of chunks and heads; `cotangents.surprise` is None: it is a measurement."""
    steps = grid_steps(algorithm.rule, chunks, heads.start, neighbours, BACKWARD, asked.segment)
    dtype = jax.tree.leaves(heads.start)[0].dtype

    def kernel(chunks, heads, states, cotangents, d_chunks, d_heads, carried, starts):
        turn = pl.program_id(1)
        group = steps.groups - 1 - turn
        summed = (d_heads.slow, d_heads.initial, d_heads.anchor)

        @pl.when(turn == 0)
        def _():
            copy(cotangents.end, carried)
            clear(summed)

        if asked.segment is not None:

            @pl.when(ends_segment(asked, steps, group))
            def _():
                add(carried.weights, read(cotangents.ends, 0))

        slow, initial, anchor = read((heads.slow, heads.initial, heads.anchor))

        def one(j, slow, state, initial, anchor, chunk):
            step = functools.partial(algorithm.step, asked._replace(surprise=False))
            return step_heads(step, slow, state, anchor, initial, chunk, first(group, j))[:3]

        def forward(j):
            state, *_ = one(j, slow, read(starts, j), initial, anchor, read(chunks, j))
            write(starts, state, j + 1)

        def back(j):
            j = steps.chunks - 1 - j
            primals = (slow, read(starts, j), initial, anchor, read(chunks, j))
            _, pull = jax.vjp(functools.partial(one, j), *primals)
            d_slow, d_state, d_initial, d_anchor, d_chunk = pull(
                (read(carried), read(cotangents.anchor), read(cotangents.reads, j).astype(dtype))
            )
            write(d_chunks, d_chunk, j)
            write(carried, d_state)
            add(summed, (d_slow, d_initial, d_anchor))

        write(starts, read(states, 0), 0)
        if steps.chunks > 1:
            repeat(steps.chunks - 1, forward)
        repeat(steps.chunks, back)

        @pl.when(group == 0)
        def _():
            copy(carried, d_heads.start)

    every = each(steps.chunks, heads.start)
    chunks = side_by_side(chunks, neighbours)
    reads = SideBySide.of(cotangents.reads, neighbours).astype(chunks.queries.array.dtype)
    cotangents = cotangents._replace(reads=reads)
    inputs, outputs = (chunks, heads._replace(start=None), states, cotangents), like((chunks, heads))
    d_chunks, d_heads = call(kernel, "memorize_backward", steps, inputs, outputs, [heads.start, every], backwards=True)
    return d_chunks._replace(**on_tokens(SideBySide.apart, d_chunks)), d_heads


def side_by_side(chunks: Chunks, neighbours: int) -> Chunks:
    """Tokens with neighbouring heads side by side."""
    return chunks._replace(**on_tokens(lambda x: SideBySide.of(x, neighbours), chunks))


def on_tokens(function, chunks: Chunks) -> dict:
    """The leaves of chunks with head_dim numbers per token, by name, with `function` applied to each."""
    arrays = {name: getattr(chunks, name) for name in TOKENS}
    return {name: function(x) for name, x in arrays.items() if x is not None}


def first(group, j):
    """Whether this is the sequence's first chunk."""
    return (group == 0) & (j == 0)


def ends_segment(asked: Asked, steps: Steps, group):
    """Whether this group is the last of a segment."""
    return (group + 1) % (asked.segment // steps.chunks) == 0


def add(references, values) -> None:
    """Add values to what references to all of an array hold."""
    write(references, jax.tree.map(jnp.add, read(references), values))


def repeat(times: int, body) -> None:
    """body(0), body(1), ..., compiled once."""
    if times == 1:
        body(0)
    else:
        jax.lax.fori_loop(0, times, lambda j, _: body(j), None)


def each(times: int, tree):
    """The shapes and dtypes of so many for each head of a tree of arrays, [n, times, ...]."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0], times, *x.shape[1:]), x.dtype), tree)


def like(tree):
    """The shapes and dtypes of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
