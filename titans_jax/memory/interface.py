"""The memory as four functions: `init_params`, `init_state`, `memorize`, `retrieve`.

    rule   = presets.titans(depth=2, expansion=4, chunk_size=16)
    params = init_params(rule, key, head_dim)
    state  = init_state(rule, params)
    reads, state = memorize(rule, params, state, queries, keys, values, gates)
    reads  = retrieve(rule, params, state, queries)

Pure functions on arrays, one head of one sequence; callers vmap over batch and heads.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from titans_jax.memory.checks import check, check_anchor, check_queries, check_segment
from titans_jax.memory.forms import associative, chunked, recurrent
from titans_jax.memory.forms.chunk_algorithm import Form, FormOptions, MemoryInputs
from titans_jax.memory.forms.inner_gradient import read, readable_weights
from titans_jax.memory.forms.inner_steps import join_inner_steps, unroll_inner_steps
from titans_jax.memory.forms.omega_window import no_tokens
from titans_jax.memory.forms.segment_ends import by_segments
from titans_jax.memory.gates import Gates, complete_gates
from titans_jax.memory.pallas import entry
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import Matrices, MemoryState, Params, Surprise, cast_state
from titans_jax.ops.backend import Backend, current_backend
from titans_jax.ops.matmul import wide_dtype
from titans_jax.ops.orthogonal import random_orthogonal

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

FORMS: dict[str, Form] = {
    "recurrent": recurrent.memorize,
    "associative": associative.memorize,
    "chunked": chunked.memorize,
    "fused": entry.memorize,
}
"""Ways to run a rule, by name; their results are equal up to rounding."""


def init_params(rule: MemoryRule, key: jax.Array, head_dim: int) -> Params:
    """Slow parameters of one head: {"weights": the start of each carried matrix [in, out], ...} float32.

    Start weights have a standard deviation of 1/sqrt(in), as orthogonal matrices or, where the rule says so
    (`MemoryRule.orthogonal_start`), with independent normal entries, or are what the retention carries for such
    weights; the last matrix is never zero, as the norm behind it would then multiply gradients by 1/sqrt(epsilon). A
    rule without a learned start has zeros, which are not trained.

    Raises ValueError for a head_dim that is no integer of 1 or more, and for a key that is none of JAX's.
    """
    if not isinstance(key, jax.Array):
        raise ValueError(f"key is {key!r}: it must be a random key of JAX, for example jax.random.key(0).")
    if isinstance(head_dim, bool) or not isinstance(head_dim, numbers.Integral) or head_dim < 1:
        raise ValueError(f"head_dim is {head_dim!r}: it must be an integer of 1 or more, for example 64.")
    head_dim = int(head_dim)
    shapes = rule.shapes(head_dim)
    slow = rule.algorithm.slow(rule.architecture, head_dim) | rule.retention.slow(shapes)
    if not rule.learned_start:
        return {"weights": tuple(jnp.zeros(shape, jnp.float32) for shape in shapes), **slow}
    keys = jax.random.split(key, len(shapes))
    if rule.orthogonal_start:
        weights = (random_orthogonal(k, s) * max(1, s[1] / s[0]) ** 0.5 for k, s in zip(keys, shapes, strict=True))
    else:
        weights = (jax.random.normal(k, s, jnp.float32) * s[0] ** -0.5 for k, s in zip(keys, shapes, strict=True))
    return {"weights": tuple(rule.retention.start(w) for w in weights), **slow}


def init_state(rule: MemoryRule, params: Params) -> MemoryState:
    """The state before the first token: the start weights (or, for a rule that forgets to them, zeros for the change
    since), no momentum, an empty chunk, no tokens in the window."""
    weights = tuple(w.astype(wide_dtype(w.dtype)) for w in params["weights"])
    zeros = tuple(jnp.zeros_like(w) for w in weights)
    weights, momentum = zeros if rule.forget_to_start else weights, zeros if rule.algorithm.has_momentum else ()
    total = jnp.zeros((len(weights),), weights[0].dtype) if rule.algorithm.steps_by_chunk else None
    return MemoryState(weights, momentum, weights, 0, no_tokens(rule, weights), total)


def start_chunk(state: MemoryState) -> MemoryState:
    """The same memory with its open chunk closed early: the next token starts a chunk. What a rule that steps by chunks
    has gathered is not lost: it stays in the momentum."""
    total = None if state.step_total is None else jnp.zeros_like(state.step_total)
    return dataclasses.replace(state, anchor=state.weights, position=0, step_total=total)


def choose_form(form: str, rule: MemoryRule, gates: Gates, backend: Backend | None = None) -> str:
    """The form that "auto" stands for on a backend (default: the target's): "fused" where the backend compiles kernels
    and one runs the rule with these gates faster (`entry.pays`), else "chunked". Other names are returned as given."""
    if form != "auto":
        return form
    backend = backend or current_backend()
    return "fused" if backend.pallas and entry.pays(rule, gates) else "chunked"


def memorize(
    rule: MemoryRule,
    params: Params,
    state: MemoryState,
    queries: Float[Array, "time *read_steps head_dim"],
    keys: Float[Array, "time *steps head_dim"],
    values: Float[Array, "time *steps head_dim"],
    gates: Gates,
    form: str = "auto",
    *,
    resets: Bool[Array, " time"] | None = None,
    initial_state: MemoryState | None = None,
    return_surprise: bool = False,
    return_anchor: bool = True,
    rematerialised: bool = False,
    segment: int | None = None,
) -> tuple[Float[Array, "time *read_steps head_dim"], MemoryState, *tuple[Surprise | Matrices, ...]]:
    """Write every token and read after each write (Titans eq 8-15).

    queries, keys, values: [time, head_dim], float32, bfloat16 (operands only; states stay float32) or float64; with n
      inner steps a token, keys and values are [time, n, head_dim]; queries may be too, and then every inner step has
      a read of its own, [time, n, head_dim].
    gates: see `Gates`.
    form: "recurrent" | "associative" | "chunked" | "fused", equal up to rounding, or "auto" (see `choose_form`).
    resets: bool [time], True at a document's first token, before which the state becomes `initial_state` (default:
      `init_state(rule, params)`) and a chunk starts. In the associative, chunked and fused forms a reset must fall on a
      chunk's start, and padding (`gates.mask`) may only be followed by a reset: otherwise all reads are NaN, never
      silently wrong.
    return_surprise: also return every token's `Surprise`.
    return_anchor: False where no sequence will be continued from the state inside a chunk: its anchor is then None, and
      no kernel keeps it. To continue, even at a chunk's start, close the chunk first (`start_chunk`).
    rematerialised: True where a model recomputes all but the reads in its backward pass: a kernel's states between
      chunks are then recomputed too, not stored.
    segment: also return the weights as they are carried after every so many tokens, [time / segment, in, out] of every
      matrix; from a state that is known to be at a chunk's start, for whole segments of whole chunks.

    Returns (reads [time, head_dim] in the state's dtype, state after the last token), and on request the surprise and,
    last, the ends of segments. The read of token t sees the writes of tokens up to t and none later. Splitting a
    sequence anywhere and passing the state on changes nothing.

    Raises ValueError, naming the argument, for an unknown form, for "fused" where no kernel runs the rule, for shapes
    that do not fit, or a state inside a chunk without an anchor.
    """
    inputs = MemoryInputs(queries, keys, values, gates, resets)
    if form not in (*FORMS, "auto"):
        raise ValueError(f"form is {form!r}: it must be one of {', '.join(map(repr, (*FORMS, 'auto')))}.")
    check(rule, params, state, inputs)
    check_segment(rule, state, len(queries), segment)
    time, every_read = len(queries), queries.ndim == 3
    dtype, steps = wide_dtype(queries.dtype), rule.algorithm.steps
    if time == 0:
        empty = jnp.zeros((0,), dtype)
        reads = jnp.zeros(queries.shape, dtype)
        ends = tuple(w[None][:0] for w in state.weights)
        return _asked(reads, state, Surprise(empty, empty) if return_surprise else None, ends if segment else None)
    if steps > 1:
        inputs = unroll_inner_steps(steps, inputs)
    gates = complete_gates(rule, inputs.gates, inputs.keys, len(state.weights), dtype)
    inputs = dataclasses.replace(inputs, gates=gates)
    start, initial = cast_state(state if state.anchor is not None else start_chunk(state), dtype), None
    if resets is not None:
        initial = start_chunk(cast_state(initial_state or init_state(rule, params), dtype))
    form = choose_form(form, rule, gates)
    run, segment = FORMS[form], None if segment is None else segment * steps
    if segment is not None and form != "fused":
        run = functools.partial(by_segments, run)
    options = FormOptions(return_surprise, return_anchor, rematerialised, segment)
    reads, state, surprise, ends = run(rule, params, start, initial, inputs, options)
    state = state if return_anchor else dataclasses.replace(state, anchor=None)
    if steps > 1:
        reads, surprise = join_inner_steps(steps, every_read, reads, surprise)
    return _asked(reads, state, surprise if return_surprise else None, ends)


def _asked(reads: jax.Array, state: MemoryState, surprise: Surprise | None, ends: Matrices | None) -> tuple:
    """The results of `memorize` that were asked for."""
    return reads, state, *(x for x in (surprise, ends) if x is not None)


def retrieve(
    rule: MemoryRule, params: Params, state: MemoryState, queries: Float[Array, "*tokens head_dim"]
) -> Float[Array, "*tokens head_dim"]:
    """Read without updating (Titans eq 15): queries [..., head_dim] -> [..., head_dim].

    Raises ValueError where queries, params and state do not fit together, or an open chunk's anchor is missing that its
    reads need.
    """
    check_queries(rule, params, state, queries)
    if state.anchor is None and (rule.stale or not rule.retention.linear):
        check_anchor(state)
        state = start_chunk(state)
    return read(rule, params, readable_weights(rule, params, state), queries)
