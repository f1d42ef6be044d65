"""The fused form: the chunked form in one Pallas TPU kernel, fast weights and momentum in VMEM from chunk to chunk.

The kernel runs `chunked.memorize_chunk` itself, so whatever memory, bias and retention it traces is here too, and its
backward kernel is `jax.vjp` of the same function, chunks taken from the last to the first. What is not the state's
(coefficients of the gates) is computed outside for all chunks at once. The grid is (groups of heads, groups of chunks);
of every group of chunks the forward kernel keeps the start state, from which the backward kernel runs it once more.

Not on a TPU, the kernel is interpreted: right and slow, for tests.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from titans_jax.memory import chunked, weighing
from titans_jax.memory.grid import final_state, lay_out, starts_chunk
from titans_jax.memory.platform import target_platform
from titans_jax.memory.types import Gates, MemoryRule, MemoryState, Surprise

TOKENS_PER_STEP = 512
"""Tokens, over heads and chunks, that one grid step aims at: starting a step costs as much as tens of tokens."""
MOST_HEADS = 8
"""Heads of a grid step: their matrix products are independent, so one's latency is the other's time."""
CHUNKS_PER_STATE = 4
"""Chunks of a grid step, at most; the backward pass stores one state for all of them."""
VMEM_BYTES = 100 * 2**20


class Chunks(NamedTuple):
    """What a chunk reads: leaves [n, chunks, rows, columns], n heads of any sequences.

    weighings: of every fast matrix. bias_gate: [.., chunk_size, 1 or head_dim] or None. starts, open: [.., 1, 1], 1 in
    a document's first chunk, and in the chunk that stays open at the end; None where there are no documents, or the end
    is a chunk's.
    """

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    weighings: tuple[weighing.Weighing, ...]
    bias_gate: jax.Array | None
    starts: jax.Array | None
    open: jax.Array | None


class Heads(NamedTuple):
    """What all chunks of a head read: leaves [n, rows, columns].

    slow: slow parameters, vectors as rows. start, initial: (weights, momentum) before the first token, and before a
    document's; anchor: gradients of the first chunk are taken there, None if at its start.
    """

    slow: dict[str, jax.Array]
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


def runs(rule: MemoryRule, gates: Gates) -> bool:
    """Whether the kernel can run the rule: scalar gates, and a retention that is linear to the chunk's end."""
    return rule.retention.linear and not gates.channel_wise and not rule.algorithm.decay_first


def memorize(rule: MemoryRule, params, state: MemoryState, queries, keys, values, gates, resets, initial):
    """One head; `jax.vmap` over it makes one kernel for all heads of all sequences."""
    if not runs(rule, gates):
        raise ValueError(
            f"form is 'fused': its kernel runs rules with scalar gates and linear retention, not {rule.retention} of "
            f"{rule.algorithm} with these gates; use form='chunked'."
        )
    size = rule.chunk_size
    layout = lay_out(size, size, state, queries, keys, values, gates, resets)
    queries, keys, values, gates, resets = layout.inputs
    count, column = len(queries), lambda flag: flag[:, None, None].astype(state.weights[0].dtype)
    weighings = weighing.of_blocks(gates, None)
    opened = None if layout.last is None else jnp.arange(count, dtype=jnp.int32) == layout.last // size
    chunks = Chunks(
        queries,
        keys,
        values,
        weighings,
        gates.bias_gate,
        None if resets is None else column(resets[:, 0]),
        None if opened is None else column(opened),
    )
    slow = {name: jnp.atleast_2d(x) for name, x in params.items() if name != "weights"}
    between_chunks = starts_chunk(state)
    heads = Heads(
        slow,
        (state.weights, state.momentum),
        None if between_chunks else state.anchor,
        None if resets is None else (initial.weights, initial.momentum),
    )
    chunks, heads = jax.tree.map(lambda x: x[None], (chunks, heads))
    found = jax.tree.map(lambda x: x[0], over_heads(rule)(chunks, heads))
    loss, norm = (jax.lax.stop_gradient(layout.unplace(found.surprise[..., i])) for i in range(2))
    if layout.last is not None:
        kept = layout.unplace(gates.mask)
        loss, norm = jnp.where(kept, loss, 0), jnp.where(kept, norm, 0)
    weights, momentum = found.end
    anchor = (
        found.opened
        if layout.last is None
        else jax.tree.map(lambda x, a: jnp.where(layout.last < 0, a, x), found.opened, state.anchor)
    )
    after = final_state(size, layout, state, weights, momentum, anchor)
    return layout.reads(found.reads), after, Surprise(loss, norm)


# One function of many heads, with a gradient of its own, whatever it is vmapped over


@functools.cache
def over_heads(rule: MemoryRule):
    """(chunks, heads) -> Results, differentiable."""
    forward = vmapped(functools.partial(run_forward, rule, False))
    forward_for_gradient = vmapped(functools.partial(run_forward, rule, True))
    backward = vmapped(functools.partial(run_backward, rule))

    @jax.custom_vjp
    def run(chunks, heads):
        return forward(chunks, heads)[0]

    def run_and_keep(chunks, heads):
        results, states = forward_for_gradient(chunks, heads)
        return results, (chunks, heads, states)

    def gradient(residuals, cotangents):
        chunks, heads, states = residuals
        return backward(chunks, heads, states, cotangents._replace(surprise=None))

    run.defvjp(run_and_keep, gradient)
    return run


def vmapped(function):
    """`function` of trees with leading heads; its vmap is itself, with more heads, where a kernel's own is a loop."""
    wrapped = jax.custom_batching.custom_vmap(function)

    @wrapped.def_vmap
    def more_heads(axis_size, in_batched, *arguments):
        def merge(x, batched):
            x = x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        found = wrapped(*jax.tree.map(merge, tuple(arguments), tuple(in_batched)))
        found = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), found)
        return found, jax.tree.map(lambda _: True, found)

    return wrapped


# The chunk function


def run_chunk(rule: MemoryRule, slow, weights, momentum, anchor, initial, chunk: Chunks):
    """One chunk of one head, leaves without their leading axes: ((weights, momentum), opened, reads, surprise)."""
    start = MemoryState(weights, momentum, weights if anchor is None else anchor, 0)
    if initial is not None:
        fresh = MemoryState(*initial, initial[0], 0)
        start = jax.tree.map(lambda new, old: jnp.where(chunk.starts > 0, new, old), fresh, start)
    gates = Gates(None, None, None, bias_gate=chunk.bias_gate)
    inputs = (chunk.queries, chunk.keys, chunk.values, gates, None, chunk.weighings)
    (weights, momentum, opened), reads, surprise = chunked.memorize_chunk(rule, slow, start, None, inputs)
    surprise = jnp.concatenate([surprise.loss[:, None], surprise.cotangent_norm[:, None]], axis=1)
    return (weights, momentum), opened, reads, surprise


# Kernels


class Steps(NamedTuple):
    """The grid: `heads` heads and `chunks` chunks per step."""

    heads: int
    chunks: int


def steps_of(chunks: Chunks) -> Steps:
    """Heads first, then chunks, until a step has enough to do."""
    n, count, size = chunks.queries.shape[:3]
    heads = math.gcd(n, MOST_HEADS)
    wanted = min(max(1, TOKENS_PER_STEP // (heads * size)), CHUNKS_PER_STATE)
    return Steps(heads, max(g for g in range(1, wanted + 1) if count % g == 0))


def run_forward(rule: MemoryRule, keep: bool, chunks: Chunks, heads: Heads) -> tuple[Results, tuple]:
    """(results, states): the state before every group of chunks, [n, groups, rows, columns], if `keep`, else ()."""
    steps = steps_of(chunks)
    n, count, size, head_dim = chunks.queries.shape
    groups, dtype = count // steps.chunks, heads.start[0][0].dtype
    start = heads.start
    states = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, groups, *x.shape[1:]), dtype), start) if keep else ()
    end = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), start)
    results = Results(
        jax.ShapeDtypeStruct((n, count, size, head_dim), dtype),
        jax.ShapeDtypeStruct((n, count, size, 2), dtype),
        end,
        None if chunks.open is None else end[0],
    )

    def kernel(chunks, heads, results, states, carried):
        first, group = pl.program_id(1) == 0, pl.program_id(1)

        @pl.when(first)
        def _():
            copy(heads.start, carried)

        for h in range(steps.heads):
            slow, initial, anchor = read((heads.slow, heads.initial, heads.anchor), h)
            weights, momentum = read(carried, h)
            if keep:
                write(states, (weights, momentum), h, 0)
            for j in range(steps.chunks):
                chunk = read(chunks, h, j)
                begins = anchor and jax.tree.map(lambda a, w: jnp.where(first & (j == 0), a, w), anchor, weights)  # noqa: B023
                (weights, momentum), opened, reads, surprise = run_chunk(
                    rule, slow, weights, momentum, begins, initial, chunk
                )
                write((results.reads, results.surprise), (reads, surprise), h, j)
                if chunk.open is not None:
                    before = read(results.opened, h)
                    now = jax.tree.map(lambda x, y: jnp.where(chunk.open > 0, x, y), opened, before)  # noqa: B023
                    write(results.opened, now, h)
            write(carried, (weights, momentum), h)

        @pl.when(group == groups - 1)
        def _():
            copy(carried, results.end)

    return call(kernel, steps, groups, (chunks, heads), (results, states), start, backwards=False)


def run_backward(rule: MemoryRule, chunks: Chunks, heads: Heads, states: tuple, cotangents: Results):
    """Cotangents of chunks and heads; `cotangents.surprise` is None."""
    steps = steps_of(chunks)
    groups = chunks.queries.shape[1] // steps.chunks
    flags = {"starts": None, "open": None}
    like = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)  # noqa: E731
    out = (like(chunks._replace(**flags)), like(heads))

    def kernel(chunks, heads, states, cotangents, d_chunks, d_heads, carried):
        step = pl.program_id(1)
        first = step == groups - 1  # the sequence's first group, the grid's last
        summed = (d_heads.slow, d_heads.initial, d_heads.anchor)

        @pl.when(step == 0)
        def _():
            copy(cotangents.end, carried)
            clear(summed)

        for h in range(steps.heads):
            slow, initial, anchor = read((heads.slow, heads.initial, heads.anchor), h)
            starts = [read(states, h, 0)]
            at = [read(chunks, h, j) for j in range(steps.chunks)]

            def one(j, slow, state, initial, anchor, differentiable):
                chunk = differentiable._replace(starts=at[j].starts, open=at[j].open)  # noqa: B023
                begins = anchor and jax.tree.map(lambda a, w: jnp.where(first & (j == 0), a, w), anchor, state[0])
                state, opened, reads, _ = run_chunk(rule, slow, *state, begins, initial, chunk)
                return state, opened, reads

            for j in range(steps.chunks - 1):
                starts.append(one(j, slow, starts[j], initial, anchor, at[j])[0])
            d_state, totals = read(carried, h), read(summed, h)
            for j in reversed(range(steps.chunks)):
                plain = at[j]._replace(**flags)
                primals = (slow, starts[j], initial, anchor, plain)
                (_, opened, reads), pull = jax.vjp(functools.partial(one, j), *primals)
                d_opened = jax.tree.map(jnp.zeros_like, opened)
                if cotangents.opened is not None:
                    d_opened = jax.tree.map(lambda d: jnp.where(at[j].open > 0, d, 0), read(cotangents.opened, h))  # noqa: B023
                d_reads = read(cotangents.reads, h, j)
                d_slow, d_state, d_initial, d_anchor, d_chunk = pull((d_state, d_opened, d_reads))
                totals = jax.tree.map(jnp.add, totals, (d_slow, d_initial, d_anchor))
                write(d_chunks, d_chunk, h, j)
            write(carried, d_state, h)
            write(summed, totals, h)

        @pl.when(first)
        def _():
            copy(carried, d_heads.start)

    d_chunks, d_heads = call(
        kernel, steps, groups, (chunks, heads, states, cotangents), out, heads.start, backwards=True
    )
    zeros = {name: None if (x := getattr(chunks, name)) is None else jnp.zeros_like(x) for name in flags}
    return d_chunks._replace(**zeros), d_heads


def call(kernel, steps: Steps, groups: int, inputs: tuple, outputs: tuple, carried: Any, backwards: bool):
    """Run `kernel(*inputs, *outputs, carried)` on trees of references, over the grid.

    Leaves with four axes are taken in groups of chunks, or of states; those with three stay for all of a head's steps.
    carried: the shapes of what stays in VMEM from one step to the next.
    """

    def spec(x):
        if x.ndim == 3:
            return pl.BlockSpec((steps.heads, *x.shape[1:]), lambda i, g: (i, 0, 0))
        per_step = x.shape[1] // groups
        index = (lambda i, g: (i, groups - 1 - g, 0, 0)) if backwards else (lambda i, g: (i, g, 0, 0))
        return pl.BlockSpec((steps.heads, per_step, *x.shape[2:]), index)

    inputs_flat, in_tree = jax.tree.flatten(inputs)
    outputs_flat, out_tree = jax.tree.flatten(outputs)
    carried_flat, carried_tree = jax.tree.flatten(carried)

    def flat_kernel(*references):
        split = len(inputs_flat), len(inputs_flat) + len(outputs_flat)
        ins, outs, state = references[: split[0]], references[split[0] : split[1]], references[split[1] :]
        kernel(*in_tree.unflatten(ins), *out_tree.unflatten(outs), carried_tree.unflatten(state))

    n = inputs_flat[0].shape[0]
    found = pl.pallas_call(
        flat_kernel,
        grid=(n // steps.heads, groups),
        in_specs=[spec(x) for x in inputs_flat],
        out_specs=[spec(x) for x in outputs_flat],
        out_shape=outputs_flat,
        scratch_shapes=[pltpu.VMEM((steps.heads, *x.shape[1:]), x.dtype) for x in carried_flat],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=target_platform() != "tpu",
        name="memorize_backward" if backwards else "memorize",
    )(*inputs_flat)
    return out_tree.unflatten(found)


# Trees of references


def read(references, *index):
    """The values at [head] or [head, chunk]."""
    return jax.tree.map(lambda ref: ref[index], references)


def write(references, values, *index):
    """Store values at [head] or [head, chunk]."""

    def store(ref, x):
        ref[index] = x.astype(ref.dtype)

    jax.tree.map(store, references, values)


def copy(source, target):
    """Store all of one tree of references in another."""

    def store(a, b):
        b[...] = a[...]

    jax.tree.map(store, source, target)


def clear(references):
    """Store zeros."""

    def store(ref):
        ref[...] = jnp.zeros(ref.shape, ref.dtype)

    jax.tree.map(store, references)
