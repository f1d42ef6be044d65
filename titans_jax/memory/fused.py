"""The fused form: the chunked form in one Pallas TPU kernel, fast weights and momentum in VMEM from chunk to chunk.

The kernel runs `chunked.memorize_chunk` itself, so whatever memory, bias and retention it traces is here too, and its
backward kernel is `jax.vjp` of the same function, chunks taken from the last to the first, the coefficients of the
gates included. The grid is (groups of heads, groups of chunks); of every group of chunks the forward kernel keeps the
start state, from which the backward kernel runs it once more.

Not on a TPU, the kernel is interpreted: right and slow, for tests.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from titans_jax.memory import chunked, engine, weighing
from titans_jax.memory.coefficients import Cumulative, summed, tile
from titans_jax.memory.grid import final_state, lay_out, starts_chunk
from titans_jax.memory.platform import LANES, SUBLANES, target_platform
from titans_jax.memory.types import Gates, MemoryRule, MemoryState, Surprise

FORWARD_TOKENS, BACKWARD_TOKENS = 2048, 1024
"""Tokens, over heads, that a kernel takes at once. Their matrix products are independent, so one head's latency is the
others' time; the backward kernel has more to keep."""
MOST_HEADS = 32
"""Heads, at most: more are no faster and take minutes to compile."""
STATE_TOKENS, MOST_CHUNKS = 256, 8
"""Tokens, and chunks at most, for which one state is stored for the backward pass, which runs them once more."""
VMEM_SHARE = 0.8
"""Of a core's VMEM, what a kernel may use; the rest is the compiler's."""
BLOCKS_SHARE = 0.75
"""Of that, what its blocks may take; the rest is for values on their way."""


class Chunks(NamedTuple):
    """What a chunk reads: leaves [n, chunks, rows, columns], n heads of any sequences.

    rows: the scalar gates, padding and flags (`pack`), in one array because a small one fills a whole tile of memory.
    bias_gate: [.., chunk_size, 1 or head_dim] or None.
    """

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    rows: jax.Array
    bias_gate: jax.Array | None


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


def memorize(rule: MemoryRule, params, state: MemoryState, queries, keys, values, gates, resets, initial, watch):
    """One head; `jax.vmap` over it makes one kernel for all heads of all sequences."""
    if not runs(rule, gates):
        raise ValueError(
            f"form is 'fused': its kernel runs rules with scalar gates and linear retention, not {rule.retention} of "
            f"{rule.algorithm} with these gates; use form='chunked'."
        )
    size = rule.chunk_size
    layout = lay_out(size, size, state, queries, keys, values, gates, resets)
    queries, keys, values, gates, resets = layout.inputs
    flags = [] if resets is None else [resets[:, 0]]
    if layout.last is not None:
        flags.append(jnp.arange(len(queries), dtype=jnp.int32) == layout.last // size)
    chunks = Chunks(queries, keys, values, pack(gates, flags), gates.bias_gate)
    slow = {name: jnp.atleast_2d(x) for name, x in params.items() if name != "weights"}
    between_chunks = starts_chunk(state)
    heads = Heads(
        slow,
        fill_lanes((state.weights, state.momentum)),
        None if between_chunks else fill_lanes(state.anchor),
        None if resets is None else fill_lanes((initial.weights, initial.momentum)),
    )
    chunks, heads = jax.tree.map(lambda x: x[None], (chunks, heads))
    found = jax.tree.map(lambda x: x[0], over_heads(rule, watch, layout.last is not None)(chunks, heads))
    surprise = None
    if watch:
        loss, norm = (layout.unplace(jax.lax.stop_gradient(found.surprise[..., i])) for i in range(2))
        surprise = Surprise(loss, norm)
        if gates.mask is not None:
            kept = layout.unplace(gates.mask)
            surprise = jax.tree.map(lambda x: jnp.where(kept, x, 0), surprise)
    (weights, momentum), anchor = upright((found.end, found.opened))
    if layout.last is not None:
        anchor = jax.tree.map(lambda new, old: jnp.where(layout.last < 0, old, new), anchor, state.anchor)
    after = final_state(size, layout, state, weights, momentum, anchor)
    return layout.reads(found.reads), after, surprise


# One function of many heads, with a gradient of its own, whatever it is vmapped over


@functools.cache
def over_heads(rule: MemoryRule, watch: bool, opens: bool):
    """(chunks, heads) -> Results, differentiable; surprise is None unless `watch`, opened unless `opens`."""
    forward = vmapped(functools.partial(run_forward, rule, watch, opens, False))
    forward_for_gradient = vmapped(functools.partial(run_forward, rule, watch, opens, True))
    backward = vmapped(functools.partial(run_backward, rule))

    @jax.custom_vjp
    def run(chunks, heads):
        return forward(chunks, heads)[0]

    def run_and_keep(chunks, heads):
        results, states = forward_for_gradient(chunks, heads)
        return results, (chunks, heads, states)

    def gradient(residuals, cotangents):
        return backward(*residuals, cotangents._replace(surprise=None))

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


def run_chunks(rule: MemoryRule, watch: bool, opens: bool, slow, state, anchor, initial, chunk: Chunks, is_first):
    """`run_chunk` of several heads at once; the anchor of the sequence's first chunk may be another than its start."""
    if anchor is not None:
        anchor = jax.tree.map(lambda a, w: jnp.where(is_first, a, w), anchor, state[0])
    one = functools.partial(run_chunk, rule, watch, opens)
    return jax.vmap(one)(slow, state, anchor, initial, chunk)


def run_chunk(rule: MemoryRule, watch: bool, opens: bool, slow, state, anchor, initial, chunk: Chunks):
    """One chunk of one head, leaves without their leading axes: ((weights, momentum), opened, reads, surprise)."""
    weights, momentum = state
    weighings, flags = unpack(chunk.rows, len(weights), rule.algorithm.has_momentum, opens, chunk.keys.dtype)
    start = MemoryState(weights, momentum, weights if anchor is None else anchor, 0)
    if initial is not None:
        fresh = MemoryState(*initial, initial[0], 0)
        start = jax.tree.map(lambda new, old: jnp.where(flags[0] > 0, new, old), fresh, start)
    gates = Gates(None, None, None, bias_gate=chunk.bias_gate)
    inputs = (chunk.queries, chunk.keys, chunk.values, gates, None, weighings)
    (weights, momentum, opened), reads, surprise = chunked.memorize_chunk(rule, slow, start, None, inputs)
    # The last flag is set in the chunk whose start is asked for; the sum over chunks is that one's.
    opened = jax.tree.map(lambda w: flags[-1] * w, opened) if opens else None
    watched = jnp.stack([surprise.loss, surprise.cotangent_norm], axis=1) if watch else None
    return (weights, momentum), opened, reads, watched


# Kernels


class Steps(NamedTuple):
    """A head's part of the grid: `groups` groups of `chunks` chunks; `most_heads` at a time, or what VMEM holds."""

    most_heads: int
    chunks: int
    groups: int


def steps_of(chunks: Chunks, tokens: int) -> Steps:
    """As many heads as make `tokens` tokens of a chunk, as many chunks as share a stored state."""
    count, size = chunks.queries.shape[1:3]
    group = largest_divisor(count, min(STATE_TOKENS // size, MOST_CHUNKS))
    return Steps(min(tokens // size, MOST_HEADS), group, count // group)


def largest_divisor(n: int, most: int) -> int:
    return max(d for d in range(1, max(most, 1) + 1) if n % d == 0)


def run_forward(
    rule: MemoryRule, watch: bool, opens: bool, keep: bool, chunks: Chunks, heads: Heads
) -> tuple[Results, tuple]:
    """(results, states): the state before every group of chunks, [n, groups, rows, columns], if `keep`, else ()."""
    steps = steps_of(chunks, FORWARD_TOKENS)
    n, count, size, head_dim = chunks.queries.shape
    start, dtype = heads.start, jax.tree.leaves(heads.start)[0].dtype
    end = like(start)
    results = Results(
        jax.ShapeDtypeStruct((n, count, size, head_dim), dtype),
        jax.ShapeDtypeStruct((n, count, size, 2), dtype) if watch else None,
        end,
        end[0] if opens else None,
    )
    states = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, steps.groups, *x.shape[1:]), dtype), start) if keep else ()

    def kernel(chunks, heads, results, states, carried):
        group = pl.program_id(1)

        @pl.when(group == 0)
        def _():
            copy(heads.start, carried)
            clear(results.opened)

        if keep:
            write(states, read(carried), 0)
        slow, initial, anchor = read((heads.slow, heads.initial, heads.anchor))

        def one(j):
            chunk = read(chunks, j)
            state, opened, reads, surprise = run_chunks(
                rule, watch, opens, slow, read(carried), anchor, initial, chunk, first(group, j)
            )
            write((results.reads, results.surprise), (reads, surprise), j)
            write(results.opened, jax.tree.map(jnp.add, read(results.opened), opened))
            write(carried, state)

        repeat(steps.chunks, one)

        @pl.when(group == steps.groups - 1)
        def _():
            copy(carried, results.end)

    return call(kernel, "memorize", steps, (chunks, heads), (results, states), [start], backwards=False)


def run_backward(rule: MemoryRule, chunks: Chunks, heads: Heads, states: tuple, cotangents: Results):
    """Cotangents of chunks and heads; `cotangents.surprise` is None: it is a measurement."""
    steps = steps_of(chunks, BACKWARD_TOKENS)
    opens = cotangents.opened is not None

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
            return run_chunks(rule, False, opens, slow, state, anchor, initial, chunk, first(group, j))[:3]

        def again(j):
            state, *_ = one(j, slow, read(starts, j), initial, anchor, read(chunks, j))
            write(starts, state, j + 1)

        def back(j):
            j = steps.chunks - 1 - j
            primals = (slow, read(starts, j), initial, anchor, read(chunks, j))
            _, pull = jax.vjp(functools.partial(one, j), *primals)
            d_slow, d_state, d_initial, d_anchor, d_chunk = pull(
                (read(carried), read(cotangents.opened), read(cotangents.reads, j))
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
    inputs, outputs = (chunks, heads._replace(start=None), states, cotangents), like((chunks, heads))
    return call(kernel, "memorize_backward", steps, inputs, outputs, [heads.start, every], backwards=True)


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


def call(kernel, name: str, steps: Steps, inputs: tuple, outputs: tuple, scratch: list, backwards: bool):
    """Run `kernel(*inputs, *outputs, *scratch)` on trees of references, over the grid.

    Leaves with four axes are taken in groups of chunks, or of states; those with three stay for all of a head's steps.
    scratch: trees of shapes [n, ...] of what stays in VMEM from one step to the next.
    """

    parts = [jax.tree.flatten(tree) for tree in (inputs, outputs, scratch)]
    (inputs, _), (outputs, structure), (scratch, _) = parts

    def of_head(x):
        return x.shape[1:] if x.ndim == 3 else (x.shape[1] // steps.groups, *x.shape[2:])

    # What comes and goes has two buffers.
    head_bytes = sum(2 * tiled_bytes(of_head(x), x.dtype) for x in inputs + outputs)
    head_bytes += sum(tiled_bytes(x.shape[1:], x.dtype) for x in scratch)
    n, vmem = inputs[0].shape[0], VMEM_SHARE * vmem_bytes()
    heads = largest_divisor(n, min(steps.most_heads, int(BLOCKS_SHARE * vmem / head_bytes)))

    def spec(x):
        if x.ndim == 3:
            return pl.BlockSpec((heads, *of_head(x)), lambda i, g: (i, 0, 0))
        index = (lambda i, g: (i, steps.groups - 1 - g, 0, 0)) if backwards else (lambda i, g: (i, g, 0, 0))
        return pl.BlockSpec((heads, *of_head(x)), index)

    def flat_kernel(*references):
        trees, references = [], iter(references)
        for leaves, treedef in parts:
            trees += treedef.unflatten([next(references) for _ in leaves])
        kernel(*trees)

    found = pl.pallas_call(
        flat_kernel,
        grid=(n // heads, steps.groups),
        in_specs=[spec(x) for x in inputs],
        out_specs=[spec(x) for x in outputs],
        out_shape=outputs,
        scratch_shapes=[pltpu.VMEM((heads, *x.shape[1:]), x.dtype) for x in scratch],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=int(vmem)),
        interpret=target_platform() != "tpu",
        name=name,
    )(*inputs)
    return structure.unflatten(found)


def vmem_bytes() -> int:
    """VMEM of a core of what is compiled for; of a large one where there is none."""
    return pltpu.get_tpu_info().vmem_capacity_bytes if target_platform() == "tpu" else 128 * 2**20


def tiled_bytes(shape: tuple[int, ...], dtype) -> int:
    """Bytes of an array in VMEM, where its last two axes are whole tiles."""
    *rest, rows, columns = shape
    tiles = -(-rows // SUBLANES) * -(-columns // LANES)
    return math.prod(rest) * tiles * SUBLANES * LANES * jnp.dtype(dtype).itemsize


def pack(gates: Gates, flags: list) -> jax.Array:
    """What coefficients of gates [chunks, tokens, matrices] are made of, padding [chunks, tokens] and flags [chunks],
    as rows [chunks, n, tokens]."""
    by_matrix = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2)[:, :, None], gates.scalars())
    mask = None if gates.mask is None else gates.mask[:, None]
    of_matrices = jax.vmap(summed, in_axes=(0, 0, 0, None, None))
    *both, step_size = jax.vmap(of_matrices)(*by_matrix, mask, None)
    rows = [x for gate in both if gate is not None for x in (gate.total, gate.reach, gate.first)] + [step_size]
    rows = [jnp.broadcast_to(x, step_size.shape)[:, :, 0] for x in rows]
    others = ([] if mask is None else [mask]) + [flag[:, None, None] for flag in flags]
    shape = len(step_size), 1, step_size.shape[-1]
    return jnp.concatenate(rows + [jnp.broadcast_to(x, shape).astype(step_size.dtype) for x in others], axis=1)


def unpack(rows: jax.Array, matrices: int, with_momentum: bool, masked: bool, operand_dtype) -> tuple[tuple, list]:
    """The weighings of one chunk, and its flags [1, 1], of `pack`'s rows."""
    kinds = 7 if with_momentum else 4
    columns = rows[: kinds * matrices].T
    others = [jax.lax.stop_gradient(rows[i : i + 1]) for i in range(kinds * matrices, len(rows))]
    mask = others.pop(0) > 0 if masked else None
    weighings = []
    for i in range(matrices):
        at = range(i, kinds * matrices, matrices)

        def gate(total, reach, first):
            row = lambda k: rows[k : k + 1]  # noqa: E731
            return Cumulative(row(total), columns[:, total : total + 1], row(reach), row(first)[:, :1], None)

        c = tile(gate(*at[:3]), gate(*at[3:6]) if with_momentum else None, rows[at[-1] :][:1], mask, operand_dtype)
        # Numbers that scale matrices fill a row of lanes, by way of whole registers: a kernel's gradient of a scalar
        # does not compile.
        ends = [jnp.broadcast_to(x[-SUBLANES:], (SUBLANES, LANES))[-1:] for x in (c.beta, c.f, c.p) if x is not None]
        weighings.append(weighing.Weighing(c.beta, c.f, c.G, c.N, jnp.concatenate(ends)))
    return tuple(weighings), [flag[:, :1] for flag in others]


def fill_lanes(matrices):
    """Fast matrices [in, out] whose out is narrow as [out, in]."""
    return jax.tree.map(lambda w: engine.Transposed(w.T) if w.shape[1] < w.shape[0] else w, matrices)


def upright(matrices):
    """`fill_lanes` undone."""
    is_transposed = lambda w: isinstance(w, engine.Transposed)  # noqa: E731
    return jax.tree.map(lambda w: w.array.T if is_transposed(w) else w, matrices, is_leaf=is_transposed)


# Trees of references


def read(references, *chunk):
    """The values of all heads, at one chunk."""
    return jax.tree.map(lambda ref: ref[(slice(None), *chunk)], references)


def write(references, values, *chunk):
    """Store values of all heads, at one chunk."""

    def store(ref, x):
        ref[(slice(None), *chunk)] = x.astype(ref.dtype)

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
