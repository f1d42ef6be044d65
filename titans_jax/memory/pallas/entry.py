"""The fused form: the chunked form in one Pallas TPU kernel, fast weights and momentum in VMEM from chunk to chunk.

`memorize` runs one head; a custom vmap makes one kernel of all heads of all sequences. The kernels are in `kernels`,
the algorithms that they run in `chunkwise_gradient`, `delta_rule` and `gated_delta_rule`.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from titans_jax.memory.forms.chunk_algorithm import FormOptions, MemoryInputs, MemoryOutputs
from titans_jax.memory.forms.scan_chunks import BlockLayout, final_state, lay_out, starts_chunk, with_window
from titans_jax.memory.forms.segment_ends import by_segments
from titans_jax.memory.forms.steps_by_chunk import step_totals
from titans_jax.memory.gates import Gates
from titans_jax.memory.pallas import kernels
from titans_jax.memory.pallas.chunkwise_gradient import KernelChunkwiseGradient
from titans_jax.memory.pallas.delta_rule import KernelDeltaRule
from titans_jax.memory.pallas.gated_delta_rule import KernelGatedDeltaRule
from titans_jax.memory.pallas.kernel_algorithm import Asked, Heads, HeadState, KernelAlgorithm, Results
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, Params, Surprise
from titans_jax.ops.matmul import Transposed, wide_dtype
from titans_jax.ops.platform import KERNELS, SUBLANES

EXACT = (KernelDeltaRule, KernelGatedDeltaRule)
"""Those of linear memories, which take each block by one triangular solve."""


def memorize(
    rule: MemoryRule,
    params: Params,
    state: MemoryState,
    initial: MemoryState | None,
    inputs: MemoryInputs,
    options: FormOptions,
) -> MemoryOutputs:
    """One head; `jax.vmap` over it makes one kernel for all heads of all sequences.

    Raises ValueError for a rule, or gates, that no kernel runs.
    """
    algorithm = choose_algorithm(rule, inputs.gates)
    if algorithm is None:
        raise ValueError(
            f"form is 'fused': its kernel does not run {rule.retention} of {rule.algorithm} with these gates and "
            f"chunk_size {rule.chunk_size} on {rule.architecture}: no polynomial features, no retention of channels "
            "with momentum, of value channels before the error, with a lag token, an arctan, the norms of the learned "
            "start or weights of every token's own, no least squares, no stale reads, and no chunk of 2 to 7 tokens; "
            "use form='chunked'."
        )
    if options.segment is not None and options.segment % algorithm.block_tokens:  # a block would cross its end
        return by_segments(memorize, rule, params, state, initial, inputs, options)
    size = rule.chunk_size
    layout = lay_out(size, algorithm.block_tokens, state, inputs)
    inputs = layout.inputs
    if layout.valid is not None:  # padding or a misplaced reset: NaN, never silently wrong
        gates = inputs.gates
        gates = dataclasses.replace(gates, step_size=jnp.where(layout.valid, gates.step_size, jnp.nan))
        inputs = dataclasses.replace(inputs, gates=gates)
        layout = dataclasses.replace(layout, inputs=inputs)
    layout = with_window(rule, layout, state, initial)
    if rule.algorithm.steps_by_chunk:  # with those that the open chunk had before
        totals = step_totals(rule, layout.inputs.gates).at[0].add(state.step_total)
        layout = dataclasses.replace(layout, step_totals=totals)
    segment = None if options.segment is None else options.segment // algorithm.block_tokens
    asked = Asked(options.with_surprise, options.with_anchor and layout.last is not None and size > 1, segment)
    fill = functools.partial(fill_lanes, rule)
    heads = Heads(
        slow_rows(rule, params),
        fill(HeadState(state.weights, state.momentum)),
        None if starts_chunk(state) or size == 1 else fill(state.anchor),
        None if inputs.resets is None else fill(HeadState(initial.weights, initial.momentum)),
    )
    found = over_heads(algorithm, asked, options.rematerialised)(algorithm.pack(layout, asked), heads)
    surprise = None
    if asked.surprise:
        loss, norm = (layout.unplace(jax.lax.stop_gradient(found.surprise[..., i])) for i in range(2))
        surprise = Surprise(loss, norm)
        if inputs.gates.mask is not None:
            kept = layout.unplace(inputs.gates.mask)
            surprise = jax.tree.map(lambda x: jnp.where(kept, x, 0), surprise)
    (weights, momentum), anchor, ends = upright((found.end, found.anchor, found.ends))
    if asked.anchor:
        anchor = jax.tree.map(lambda new, old: jnp.where(layout.last < 0, old, new), anchor, state.anchor)
    anchor = anchor if asked.anchor else weights
    after = final_state(size, layout, state, weights, momentum, anchor, last_total(layout, size))
    return MemoryOutputs(layout.unplace(found.reads), after, surprise, ends)


def last_total(layout: BlockLayout, chunk_size: int) -> jax.Array | None:
    """The sum of the step sizes of the chunk that has a layout's last token."""
    if layout.step_totals is None:
        return None
    return layout.step_totals[-1 if layout.last is None else jnp.maximum(layout.last, 0) // chunk_size]


def choose_algorithm(rule: MemoryRule, gates: Gates) -> KernelAlgorithm | None:
    """The first algorithm of kernels that supports the rule with these gates, or None."""
    found = (one for one in (*EXACT, KernelChunkwiseGradient) if not rule.stale and one.supports(rule, gates))
    return next((one(rule) for one in found), None)


def supports(rule: MemoryRule, gates: Gates) -> bool:
    """Whether a kernel can run the rule."""
    return choose_algorithm(rule, gates) is not None


def pays(rule: MemoryRule, gates: Gates) -> bool:
    """Whether a kernel can run the rule and is faster than the chunked form: either it takes a linear memory's blocks
    by triangular solves, or the chunked form does not do that either and a chunk fills the rows of a register."""
    exact = [one.supports(rule, gates) for one in EXACT]
    solved = any(one.algorithm.supports(rule, gates) for one in EXACT)
    return supports(rule, gates) and (any(exact) or (not solved and rule.chunk_size >= SUBLANES))


# One function of many heads, with a gradient of its own, whatever it is vmapped over


@functools.cache
def over_heads(algorithm: KernelAlgorithm, asked: Asked, rematerialised: bool):
    """(chunks, heads) -> Results, differentiable. rematerialised: states between chunks are recomputed for the
    gradient, not stored."""
    forward = vmapped(functools.partial(kernels.run_forward, algorithm, asked, False))
    forward_for_gradient = vmapped(functools.partial(kernels.run_forward, algorithm, asked, True))
    states_again = vmapped(functools.partial(kernels.run_states, algorithm, asked))
    backward = vmapped(functools.partial(kernels.run_backward, algorithm, asked))

    @jax.custom_vjp
    def run(chunks, heads) -> Results:
        return forward(chunks, heads)[0]

    def run_and_keep(chunks, heads):
        found = (run(chunks, heads), None) if rematerialised else forward_for_gradient(chunks, heads)
        results, states = checkpoint_name(found, KERNELS)
        return results, (chunks, heads, states)

    def gradient(residuals, cotangents):
        chunks, heads, states = residuals
        states = states_again(chunks, heads) if rematerialised else states
        return backward(chunks, heads, states, cotangents._replace(surprise=None))

    run.defvjp(run_and_keep, gradient)
    return run


def vmapped(function, leading: int = 0):
    """`function(neighbours, *trees)`, which takes trees of n heads, as a function of trees with `leading` axes. Its
    vmap is the same with one axis more, where a kernel's own vmap would be a loop. neighbours: size of the last of
    several axes, which has the heads that a model keeps side by side."""

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


def slow_rows(rule: MemoryRule, params: Params) -> dict:
    """Slow parameters as rows; a number that belongs to a matrix fills a row [1, out]."""
    slow = {name: jnp.atleast_2d(x) for name, x in params.items() if name != "weights"}
    if rule.forget_to_start:
        dtype = wide_dtype(params["weights"][0].dtype)
        slow["weights"] = fill_lanes(rule, tuple(w.astype(dtype) for w in params["weights"]))
    for name in rule.retention.slow(tuple(w.shape for w in params["weights"])):
        numbers = zip(params[name], params["weights"], strict=True)
        slow[name] = tuple(jnp.broadcast_to(number, (1, w.shape[1])) for number, w in numbers)
    return slow


def fill_lanes(rule: MemoryRule, matrices):
    """Fast matrices [in, out] with out < in as [out, in], if nothing but products is done with them."""
    if not rule.retention.linear:
        return matrices
    return jax.tree.map(lambda w: Transposed(w.T) if w.shape[1] < w.shape[0] else w, matrices)


def upright(matrices):
    """The inverse of `fill_lanes`, also for matrices with leading axes."""
    is_transposed = lambda w: isinstance(w, Transposed)  # noqa: E731
    return jax.tree.map(
        lambda w: jnp.matrix_transpose(w.array) if is_transposed(w) else w, matrices, is_leaf=is_transposed
    )
