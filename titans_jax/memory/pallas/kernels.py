"""The kernels of the fused form: a group of chunks of several heads in every step of their grid.

They run `chunked.memorize_chunk` itself, so whatever memory, bias and retention it traces is here too, and the backward
kernel is `jax.vjp` of the same function, chunks taken from the last to the first, the coefficients of the gates
included. The grid is (groups of heads, groups of chunks); of every group of chunks the forward kernel keeps the start
state, from which the backward kernel runs it once more. Where nothing shall be kept between the two, a third kernel
makes the states again, which takes no reads.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from titans_jax.memory.forms import chunked, intra_chunk
from titans_jax.memory.forms.decay import Coefficients, Cumulative, summed, tile
from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState
from titans_jax.ops import channel_decay_pallas, recursive_blocks
from titans_jax.ops.backend import LANES, SUBLANES
from titans_jax.ops.pallas_tpu import (
    Beside,
    Steps,
    call,
    clear,
    copy,
    read,
    tiled_bytes,
    write,
)

FORWARD_TOKENS, BACKWARD_TOKENS = 2048, 1024
"""Tokens, over heads, that a kernel takes at once. Their matrix products are independent, so one head's latency is the
others' time; the backward kernel has more to keep."""
MOST_HEADS = 32
"""Heads, at most: more are no faster and take minutes to compile."""
STATE_TOKENS, MOST_CHUNKS = 64, 8
"""Tokens, and chunks at most, for which one state is stored for the backward pass, which runs them once more but for
the last: storing runs beside a kernel's work, repeating does not."""


class Values(NamedTuple):
    """Float32 numbers on their way that a kernel was found to need of VMEM beside its blocks.

    lanes: per token and lane of the fast matrices. matrices: copies of a head's matrices, where their retention is not
    linear. sums: of log gates, per border that a token is beside, channel and retention of channels.
    """

    lanes: int
    matrices: int
    sums: int


FORWARD_VALUES, BACKWARD_VALUES = Values(8, 1, 1), Values(27, 3, 2)


class Chunks(NamedTuple):
    """What a chunk reads: leaves [n, chunks, rows, columns], n heads of any sequences.

    rows: the scalar gates, padding and flags (`pack`), in one array because a small one fills a whole tile of memory.
    bias_gate: [.., chunk_size, 1 or head_dim] or None. log_key_retention .. value_step_size: [.., chunk_size, head_dim]
    or None; retentions are 0 at padding.
    """

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    rows: jax.Array
    bias_gate: jax.Array | None
    log_key_retention: jax.Array | None
    log_value_retention: jax.Array | None
    key_step_size: jax.Array | None
    value_step_size: jax.Array | None


CHANNELS = ("log_key_retention", "log_value_retention", "key_step_size", "value_step_size")
TOKENS = ("queries", "keys", "values", *CHANNELS)


class Heads(NamedTuple):
    """What all chunks of a head read: leaves [n, rows, columns].

    slow: slow parameters, vectors as rows; numbers of matrices as rows that they fill. start, initial: (weights,
    momentum) before the first token, and before a document's; anchor: gradients of the first chunk are taken there,
    None if at its start.
    """

    slow: dict[str, jax.Array | tuple]
    start: tuple
    anchor: tuple | None
    initial: tuple | None


class Results(NamedTuple):
    """reads, surprise: [n, chunks, chunk_size, head_dim or 2]; end, opened: (weights, momentum), and the weights at the
    start of the chunk that stays open (None if none is)."""

    reads: jax.Array
    surprise: jax.Array
    end: tuple
    opened: tuple | None


# The chunk function


def run_chunks(run, slow, state, anchor, initial, chunk: Chunks, is_first):
    """A block function, such as `run_chunk`, of several heads at once; the anchor of the sequence's first chunk may be
    another than its start."""
    if anchor is not None:
        anchor = jax.tree.map(lambda a, w: jnp.where(is_first, a, w), anchor, state[0])
    return jax.vmap(run)(slow, state, anchor, initial, chunk)


def run_chunk(rule: MemoryRule, watch: bool, opens: bool, slow, state, anchor, initial, chunk: Chunks):
    """One chunk of one head, leaves without their leading axes: ((weights, momentum), opened, reads, surprise)."""
    weights, momentum = state
    flags = opens + (initial is not None)
    weighings, last, flags = unpack(chunk.rows, len(weights), rule.algorithm.has_momentum, flags, chunk.keys.dtype)
    start = MemoryState(weights, momentum, weights if anchor is None else anchor, 0)
    if initial is not None:
        fresh = MemoryState(*initial, initial[0], 0)
        start = jax.tree.map(lambda new, old: jnp.where(flags[0] > 0, new, old), fresh, start)
    for side, i, log_gate in (("by_input", 0, chunk.log_key_retention), ("by_output", -1, chunk.log_value_retention)):
        if log_gate is not None:
            weighings[i] = dataclasses.replace(weighings[i], **{side: channel_decay_pallas.ChannelDecay(log_gate)})
    steps = {"key_step_size": chunk.key_step_size, "value_step_size": chunk.value_step_size}
    gates = Gates(None, None, None, last, chunk.bias_gate, **steps)
    inputs = (chunk.queries, chunk.keys, chunk.values, gates, None, tuple(weighings))
    (weights, momentum, opened), reads, surprise = chunked.memorize_chunk(rule, slow, start, None, inputs)
    # The last flag is set in the chunk whose start is asked for; the sum over chunks is that one's.
    opened = jax.tree.map(lambda w: flags[-1] * w, opened) if opens else None
    watched = jnp.stack([surprise.loss, surprise.cotangent_norm], axis=1) if watch else None
    return (weights, momentum), opened, reads, watched


# Kernels


def steps_of(rule: MemoryRule, chunks: Chunks, weights: tuple, together: int, tokens: int, values: Values) -> Steps:
    """As many heads as make `tokens` tokens of a chunk, as many chunks as share a stored state."""
    n, count, size, head_dim = chunks.queries.shape
    group = largest_divisor(count, min(STATE_TOKENS // size, MOST_CHUNKS))
    shapes = [w.shape[1:] for w in jax.tree.leaves(weights)]
    sides = sum(x is not None for x in (chunks.log_key_retention, chunks.log_value_retention))
    needed = [(size, max(shape)) for shape in shapes] * values.lanes
    needed += shapes * (0 if rule.retention.linear else values.matrices)
    needed += [(size, head_dim)] * (sides * recursive_blocks.levels(size) * values.sums)
    head_bytes = sum(tiled_bytes(shape, jnp.float32) for shape in needed)
    return Steps(n // together, together, min(tokens // size, MOST_HEADS), group, count // group, head_bytes)


def largest_divisor(n: int, most: int) -> int:
    return max(d for d in range(1, max(most, 1) + 1) if n % d == 0)


def run_forward(
    block, rule: MemoryRule, watch: bool, opens: bool, keep: bool, together: int, chunks: Chunks, heads: Heads
) -> tuple[Results, tuple]:
    """(results, states): the state before every group of chunks, [n, groups, rows, columns], if `keep`, else ().

    together: heads that are neighbours in n, which lie side by side in a model.
    """
    steps = steps_of(rule, chunks, heads.start[0], together, FORWARD_TOKENS, FORWARD_VALUES)
    n, count, size, head_dim = chunks.queries.shape
    end, dtype = like(heads.start), jax.tree.leaves(heads.start)[0].dtype
    results = Results(
        Beside(jax.ShapeDtypeStruct((steps.rows, count, size, together * head_dim), chunks.queries.dtype), head_dim),
        jax.ShapeDtypeStruct((n, count, size, 2), dtype) if watch else None,
        end,
        end[0] if opens else None,
    )
    states = states_of(rule, steps, chunks, heads) if keep else ()
    run = functools.partial(block, rule, watch, opens)
    results, states = go_forward(run, "memorize", steps, beside(chunks, together), heads, results, states)
    return results._replace(reads=results.reads.astype(dtype).apart()), states


def run_states(block, rule: MemoryRule, opens: bool, together: int, chunks: Chunks, heads: Heads) -> tuple:
    """`run_forward`'s states, and nothing read."""
    steps = steps_of(rule, chunks, heads.start[0], together, FORWARD_TOKENS, FORWARD_VALUES)
    states = states_of(rule, steps, chunks, heads)
    run = functools.partial(block, rule, False, opens)
    return go_forward(run, "memorize_states", steps, beside(chunks, together), heads, (), states)[1]


def states_of(rule: MemoryRule, steps: Steps, chunks: Chunks, heads: Heads):
    """Shapes of the states before every group of chunks."""
    # A chunk's products take its start state in the operands' dtype anyway; what is run on from there would not.
    narrow = rule.retention.linear and steps.chunks == 1

    def shape(x):
        dtype = chunks.keys.dtype if narrow else x.dtype
        return jax.ShapeDtypeStruct((x.shape[0], steps.groups, *x.shape[1:]), dtype)

    return jax.tree.map(shape, heads.start)


def go_forward(run, name: str, steps: Steps, chunks: Chunks, heads: Heads, results, states):
    """The forward kernel, for results, states or both, () for what is not asked for."""

    def kernel(chunks, heads, results, states, carried):
        group = pl.program_id(1)

        @pl.when(group == 0)
        def _():
            copy(heads.start, carried)
            if results:
                clear(results.opened)

        if states:
            write(states, read(carried), 0)
        slow, initial, anchor = read((heads.slow, heads.initial, heads.anchor))

        def one(j):
            state, opened, reads, surprise = run_chunks(
                run, slow, read(carried), anchor, initial, read(chunks, j), first(group, j)
            )
            write(carried, state)
            if results:
                write((results.reads, results.surprise), (reads, surprise), j)
                write(results.opened, jax.tree.map(jnp.add, read(results.opened), opened))

        repeat(steps.chunks, one)

        if results:

            @pl.when(group == steps.groups - 1)
            def _():
                copy(carried, results.end)

    return call(kernel, name, steps, (chunks, heads), (results, states), [like(heads.start)], backwards=False)


def run_backward(
    block, rule: MemoryRule, together: int, chunks: Chunks, heads: Heads, states: tuple, cotangents: Results
):
    """Cotangents of chunks and heads; `cotangents.surprise` is None: it is a measurement."""
    steps = steps_of(rule, chunks, heads.start[0], together, BACKWARD_TOKENS, BACKWARD_VALUES)
    opens, dtype = cotangents.opened is not None, jax.tree.leaves(heads.start)[0].dtype

    def kernel(chunks, heads, states, cotangents, d_chunks, d_heads, carried, starts):
        step = pl.program_id(1)
        group = steps.groups - 1 - step
        summed = (d_heads.slow, d_heads.initial, d_heads.anchor)

        @pl.when(step == 0)
        def _():
            copy(cotangents.end, carried)
            clear(summed)

        slow, initial, anchor = read((heads.slow, heads.initial, heads.anchor))

        def one(j, slow, state, initial, anchor, chunk):
            run = functools.partial(block, rule, False, opens)
            return run_chunks(run, slow, state, anchor, initial, chunk, first(group, j))[:3]

        def again(j):
            state, *_ = one(j, slow, read(starts, j), initial, anchor, read(chunks, j))
            write(starts, state, j + 1)

        def back(j):
            j = steps.chunks - 1 - j
            primals = (slow, read(starts, j), initial, anchor, read(chunks, j))
            _, pull = jax.vjp(functools.partial(one, j), *primals)
            d_slow, d_state, d_initial, d_anchor, d_chunk = pull(
                (read(carried), read(cotangents.opened), read(cotangents.reads, j).astype(dtype))
            )
            write(d_chunks, d_chunk, j)
            write(carried, d_state)
            write(summed, jax.tree.map(jnp.add, read(summed), (d_slow, d_initial, d_anchor)))

        write(starts, read(states, 0), 0)
        if steps.chunks > 1:
            repeat(steps.chunks - 1, again)
        repeat(steps.chunks, back)

        @pl.when(group == 0)
        def _():
            copy(carried, d_heads.start)

    every = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0], steps.chunks, *x.shape[1:]), x.dtype), heads.start)
    chunks = beside(chunks, together)
    reads = Beside.of(cotangents.reads, together).astype(chunks.queries.array.dtype)
    cotangents = cotangents._replace(reads=reads)
    inputs, outputs = (chunks, heads._replace(start=None), states, cotangents), like((chunks, heads))
    d_chunks, d_heads = call(kernel, "memorize_backward", steps, inputs, outputs, [heads.start, every], backwards=True)
    return d_chunks._replace(**on_tokens(Beside.apart, d_chunks)), d_heads


def beside(chunks: Chunks, together: int) -> Chunks:
    """Tokens with neighbouring heads side by side."""
    return chunks._replace(**on_tokens(lambda x: Beside.of(x, together), chunks))


def on_tokens(function, chunks: Chunks) -> dict:
    """What has head_dim numbers per token, each by a function."""
    arrays = {name: getattr(chunks, name) for name in TOKENS}
    return {name: function(x) for name, x in arrays.items() if x is not None}


def first(group, j):
    """Whether this is the sequence's first chunk."""
    return (group == 0) & (j == 0)


def repeat(times: int, body) -> None:
    """body(0), body(1), ..., compiled once."""
    if times == 1:
        body(0)
    else:
        jax.lax.fori_loop(0, times, lambda j, _: body(j), None)


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


# Gates


def pack(gates: Gates, others: list, resets=None) -> jax.Array:
    """What coefficients of gates [blocks, tokens, matrices] are made of, padding, and other numbers of blocks or of
    their tokens, as rows [blocks, n, tokens]. resets: [blocks, tokens], if documents may start inside a block."""
    by_matrix = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2)[:, :, None], gates.scalars())
    mask, resets = jax.tree.map(lambda x: x[:, None], (gates.mask, resets))
    of_matrices = jax.vmap(summed, in_axes=(0, 0, 0, None, None))
    *both, step_size = jax.vmap(of_matrices)(*by_matrix, mask, resets)
    sums = [x for gate in both if gate is not None for x in (gate.total, gate.reach, gate.first, gate.began)]
    rows = [x for x in sums if x is not None] + [step_size]
    rows = [jnp.broadcast_to(x, step_size.shape)[:, :, 0] for x in rows]
    others = ([] if mask is None else [mask]) + [jnp.reshape(x, (len(x), 1, -1)) for x in others]
    shape = len(step_size), 1, step_size.shape[-1]
    return jnp.concatenate(rows + [jnp.broadcast_to(x, shape).astype(step_size.dtype) for x in others], axis=1)


def coefficients(
    rows: jax.Array, matrices: int, with_momentum: bool, restarted: bool, others: int, operand_dtype
) -> tuple[list[Coefficients], jax.Array | None, list[jax.Array]]:
    """Of `pack`'s rows: the coefficients of one block for every matrix, its padding, and so many other rows [1,
    tokens]."""
    sums = 4 if restarted else 3
    kinds = sums * (1 + with_momentum) + 1
    columns = rows[: kinds * matrices].T
    behind = [jax.lax.stop_gradient(rows[i : i + 1]) for i in range(kinds * matrices, len(rows))]
    mask = behind.pop(0) > 0 if len(behind) > others else None
    row = lambda k: rows[k : k + 1]  # noqa: E731

    def gate(total, reach, first, began=None):
        began = None if began is None else row(began)
        return Cumulative(row(total), columns[:, total : total + 1], row(reach), row(first)[:, :1], began)

    found = []
    for i in range(matrices):
        at = range(i, kinds * matrices, matrices)
        momentum = gate(*at[sums : 2 * sums]) if with_momentum else None
        found.append(tile(gate(*at[:sums]), momentum, row(at[-1]), mask, operand_dtype))
    return found, mask, behind


def unpack(rows: jax.Array, matrices: int, with_momentum: bool, flags: int, operand_dtype) -> tuple:
    """Of `pack`'s rows: the weighings of one chunk, whether its last slot holds a token (None: it does), and its flags,
    each [1, 1]."""
    found, mask, flags = coefficients(rows, matrices, with_momentum, False, flags, operand_dtype)
    weighings = []
    for c in found:
        # Numbers that scale matrices fill a row of lanes, by way of whole registers: a kernel's gradient of a scalar
        # does not compile.
        ends = [jnp.broadcast_to(x[-SUBLANES:], (SUBLANES, LANES))[-1:] for x in (c.beta, c.f, c.p) if x is not None]
        weighings.append(intra_chunk.Weighing(c.beta, c.f, c.G, c.N, jnp.concatenate(ends)))
    return weighings, None if mask is None else mask[:, -1:], [flag[:, :1] for flag in flags]
