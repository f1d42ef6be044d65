"""The fused form: the chunked form in one Pallas TPU kernel, fast weights and momentum in VMEM from chunk to chunk.

This is one head, and what makes one kernel of all heads of all sequences; the kernels themselves are in `kernels`.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from titans_jax.memory.forms.scan_chunks import Grid, final_state, lay_out, starts_chunk
from titans_jax.memory.gates import Gates
from titans_jax.memory.pallas import delta_rule, gated_delta_rule, kernels
from titans_jax.memory.pallas.kernels import Chunks, Heads
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, Surprise
from titans_jax.ops import channel_decay
from titans_jax.ops.backend import KERNELS
from titans_jax.ops.matmul import Transposed

EXACT = (delta_rule, gated_delta_rule)


def runs(rule: MemoryRule, gates: Gates) -> bool:
    """Whether the kernel can run the rule: in blocks of a linear memory, or chunk by chunk, with a retention and an
    algorithm that a kernel has the operations for, channels apart only without momentum, none before the error."""
    by_channel = gates.log_key_retention is not None or gates.log_value_retention is not None
    apart = not (by_channel and rule.algorithm.has_momentum)
    traces = rule.retention.fusible and rule.algorithm.fusible
    by_chunk = apart and traces and not rule.algorithm.decay_first
    return by_chunk or in_blocks(rule, gates)


def in_blocks(rule: MemoryRule, gates: Gates) -> bool:
    """Whether a linear memory's blocks are the kernel's, each with one triangular solve."""
    return any(path.runs(rule, gates) for path in EXACT)


def memorize(
    rule: MemoryRule, params, state: MemoryState, queries, keys, values, gates, resets, initial, watch, follow, again
):
    """One head; `jax.vmap` over it makes one kernel for all heads of all sequences."""
    if not runs(rule, gates):
        raise ValueError(
            f"form is 'fused': its kernel does not run {rule.retention} of {rule.algorithm} with these gates: no "
            "retention of channels with momentum, of value channels before the error, with a lag token or an arctan, "
            "and no least squares; use form='chunked'."
        )
    size = tokens = rule.chunk_size
    pack, block = pack_chunks, kernels.run_chunk
    exact = next((path for path in EXACT if path.runs(rule, gates)), None)
    if exact is not None:
        tokens, pack, block = exact.tokens(rule), exact.pack, exact.run_block
    layout = lay_out(size, tokens, state, queries, keys, values, gates, resets)
    queries, keys, values, gates, resets = layout.inputs
    if layout.valid is not None:  # padding or a reset that broke the grid's rules: NaN, never silently wrong
        gates = dataclasses.replace(gates, step_size=jnp.where(layout.valid, gates.step_size, jnp.nan))
        layout = dataclasses.replace(layout, inputs=(queries, keys, values, gates, resets))
    opens = follow and layout.last is not None and size > 1
    rows, others = pack(rule, layout, opens)
    by_channel = {name: getattr(others, name) for name in kernels.CHANNELS}
    chunks = Chunks(queries, keys, values, rows, others.bias_gate, **by_channel)
    between_chunks = starts_chunk(state) or size == 1
    fill = functools.partial(fill_lanes, rule)
    heads = Heads(
        slow_rows(rule, params),
        fill((state.weights, state.momentum)),
        None if between_chunks else fill(state.anchor),
        None if resets is None else fill((initial.weights, initial.momentum)),
    )
    found = over_heads(block, rule, watch, opens, again)(chunks, heads)
    surprise = None
    if watch:
        loss, norm = (layout.unplace(jax.lax.stop_gradient(found.surprise[..., i])) for i in range(2))
        surprise = Surprise(loss, norm)
        if gates.mask is not None:
            kept = layout.unplace(gates.mask)
            surprise = jax.tree.map(lambda x: jnp.where(kept, x, 0), surprise)
    (weights, momentum), anchor = upright((found.end, found.opened))
    if opens:
        anchor = jax.tree.map(lambda new, old: jnp.where(layout.last < 0, old, new), anchor, state.anchor)
    after = final_state(size, layout, state, weights, momentum, anchor if opens else weights)
    return layout.unplace(found.reads), after, surprise


def pack_chunks(rule: MemoryRule, layout: Grid, opens: bool) -> tuple[jax.Array, Gates]:
    """Of a layout in chunks `kernels.pack`, with flags of a document's first chunks and, if `opens`, of the one that
    stays open; and the gates that are not in it."""
    *_, gates, resets = layout.inputs
    flags = [] if resets is None else [resets[:, 0]]
    if opens:
        flags.append(jnp.arange(len(gates.step_size), dtype=jnp.int32) == layout.last // rule.chunk_size)
    names = ("log_key_retention", "log_value_retention")
    by_channel = {name: x for name in names if (x := getattr(gates, name)) is not None}
    by_channel = {name: jax.vmap(channel_decay.clipped)(x, gates.mask) for name, x in by_channel.items()}
    return kernels.pack(gates, flags), dataclasses.replace(gates, **by_channel)


# One function of many heads, with a gradient of its own, whatever it is vmapped over


@functools.cache
def over_heads(block, rule: MemoryRule, watch: bool, opens: bool, again: bool):
    """(chunks, heads) -> Results, differentiable; surprise is None unless `watch`, opened unless `opens`. again: states
    between chunks are made again for the gradient, not stored."""
    forward = vmapped(functools.partial(kernels.run_forward, block, rule, watch, opens, False))
    forward_for_gradient = vmapped(functools.partial(kernels.run_forward, block, rule, watch, opens, True))
    states_again = vmapped(functools.partial(kernels.run_states, block, rule, opens))
    backward = vmapped(functools.partial(kernels.run_backward, block, rule))

    @jax.custom_vjp
    def run(chunks, heads):
        return forward(chunks, heads)[0]

    def run_and_keep(chunks, heads):
        found = (run(chunks, heads), None) if again else forward_for_gradient(chunks, heads)
        results, states = checkpoint_name(found, KERNELS)
        return results, (chunks, heads, states)

    def gradient(residuals, cotangents):
        chunks, heads, states = residuals
        states = states_again(chunks, heads) if again else states
        return backward(chunks, heads, states, cotangents._replace(surprise=None))

    run.defvjp(run_and_keep, gradient)
    return run


def vmapped(function, leading: int = 0):
    """`function(together, *trees)` of trees of n heads, as one of trees with `leading` axes; its vmap is itself with
    one axis more, where a kernel's own is a loop. together: heads of the last of several axes, which a model has beside
    each other."""

    @jax.custom_batching.custom_vmap
    def wrapped(*arguments):
        lead = jax.tree.leaves(arguments)[0].shape[:leading]
        merged = jax.tree.map(lambda x: x.reshape(math.prod(lead), *x.shape[leading:]), arguments)
        found = function(lead[-1] if leading > 1 else 1, *merged)
        return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), found)

    @wrapped.def_vmap
    def with_one_more(axis_size, in_batched, *arguments):
        def spread(x, batched):
            return x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))

        found = vmapped(function, leading + 1)(*jax.tree.map(spread, tuple(arguments), tuple(in_batched)))
        return found, jax.tree.map(lambda _: True, found)

    return wrapped


def slow_rows(rule: MemoryRule, params) -> dict:
    """Slow parameters as rows; a number of a matrix as a row [1, out] of it."""
    slow = {name: jnp.atleast_2d(x) for name, x in params.items() if name != "weights"}
    for name in rule.retention.slow(tuple(w.shape for w in params["weights"])):
        numbers = zip(params[name], params["weights"], strict=True)
        slow[name] = tuple(jnp.broadcast_to(number, (1, w.shape[1])) for number, w in numbers)
    return slow


def fill_lanes(rule: MemoryRule, matrices):
    """Fast matrices [in, out] whose out is narrow as [out, in], if nothing but products is done with them."""
    if not rule.retention.linear:
        return matrices
    return jax.tree.map(lambda w: Transposed(w.T) if w.shape[1] < w.shape[0] else w, matrices)


def upright(matrices):
    """`fill_lanes` undone."""
    is_transposed = lambda w: isinstance(w, Transposed)  # noqa: E731
    return jax.tree.map(lambda w: w.array.T if is_transposed(w) else w, matrices, is_leaf=is_transposed)
