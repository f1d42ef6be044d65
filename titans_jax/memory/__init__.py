"""The memory core: pure functions on arrays (jax only), one head of one sequence; callers vmap over batch and heads.

    rule   = presets.titans(depth=2, expansion=4, chunk_size=16)
    params = init_params(rule, key, head_dim)
    state  = init_state(rule, params)
    reads, state = memorize(rule, params, state, queries, keys, values, gates)
    reads  = retrieve(rule, params, state, queries)

Words (design 1): fast weights are what the inner loss moves, slow weights what the optimizer trains; the anchor is the
fast weights at the open chunk's start, where gradients are taken; retention, momentum, step size are 1 - alpha, eta,
theta of Titans. `chunk_size` is part of the model; how many tokens a form processes at once never changes the numbers.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from titans_jax.memory.forms import associative, chunked, delta_rule, gated_delta_rule, recurrent
from titans_jax.memory.forms.inner_gradient import read, readable_weights
from titans_jax.memory.gates import Gates, complete_gates, unroll_inner_steps
from titans_jax.memory.pallas import entry
from titans_jax.memory.rule import algorithms, architectures, biases, presets, retentions
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, Params, Surprise, cast_state
from titans_jax.ops.backend import SUBLANES, target_platform
from titans_jax.ops.matmul import state_dtype

__all__ = [
    "FORMS",
    "Gates",
    "MemoryRule",
    "MemoryState",
    "Surprise",
    "algorithms",
    "architectures",
    "biases",
    "choose_form",
    "init_params",
    "init_state",
    "memorize",
    "presets",
    "retentions",
    "retrieve",
    "start_chunk",
]

FORMS = {
    "recurrent": recurrent.memorize,
    "associative": associative.memorize,
    "chunked": chunked.memorize,
    "fused": entry.memorize,
}


def init_params(rule: MemoryRule, key: jax.Array, head_dim: int) -> Params:
    """Slow parameters of one head: {"weights": the start of each carried matrix [in, out], ...} float32.

    Start weights are normal with standard deviation 1/sqrt(in) (papers 1.3: fan-in), or what the retention carries for
    such weights; the last matrix is never zero, as the norm behind it would then multiply gradients by 1/sqrt(epsilon)
    (papers 1.4). A rule without a learned start has zeros, which are no parameters.
    """
    if not isinstance(head_dim, int) or head_dim < 1:
        raise ValueError(f"head_dim is {head_dim!r}: it must be an integer of 1 or more, for example 64.")
    shapes = rule.shapes(head_dim)
    slow = rule.algorithm.slow(rule.architecture, head_dim) | rule.retention.slow(shapes)
    if not rule.learned_start:
        return {"weights": tuple(jnp.zeros(shape, jnp.float32) for shape in shapes), **slow}
    keys = jax.random.split(key, len(shapes))
    weights = (jax.random.normal(k, s, jnp.float32) * s[0] ** -0.5 for k, s in zip(keys, shapes, strict=True))
    return {"weights": tuple(rule.retention.start(w) for w in weights), **slow}


def init_state(rule: MemoryRule, params: Params) -> MemoryState:
    """The state before the first token: the start weights, no momentum, an empty chunk."""
    weights = tuple(w.astype(state_dtype(w.dtype)) for w in params["weights"])
    momentum = tuple(jnp.zeros_like(w) for w in weights) if rule.algorithm.has_momentum else ()
    return MemoryState(weights, momentum, weights, 0)


def start_chunk(state: MemoryState) -> MemoryState:
    """The same memory with its open chunk closed early: the next token starts a chunk."""
    return MemoryState(state.weights, state.momentum, state.weights, 0)


def choose_form(form: str, rule: MemoryRule, gates: Gates, platform: str | None = None) -> str:
    """What "auto" stands for on a platform (default: the target's): the fused kernel on a TPU where it runs the rule
    with these gates and pays, else the chunked form."""
    if form != "auto":
        return form
    exact = any(path.runs(rule, gates) for path in (delta_rule, gated_delta_rule))
    pays = entry.in_blocks(rule, gates) or (not exact and rule.chunk_size >= SUBLANES)
    return "fused" if pays and entry.runs(rule, gates) and (platform or target_platform()) == "tpu" else "chunked"


def memorize(
    rule: MemoryRule,
    params: Params,
    state: MemoryState,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    gates: Gates,
    form: str = "auto",
    *,
    resets: jax.Array | None = None,
    initial_state: MemoryState | None = None,
    return_surprise: bool = False,
    return_anchor: bool = True,
    rematerialised: bool = False,
):
    """Write every token and read after each write: (reads [time, head_dim], state), and `Surprise` on request.

    queries, keys, values: [time, head_dim], float32, bfloat16 (operands only; states stay float32) or float64. The read
    of token t sees the writes of tokens <= t (papers 1.6.4) and is in the state's dtype. Splitting a sequence anywhere
    and passing the state on changes nothing. form: "recurrent" | "associative" | "chunked" | "fused", equal to
    rounding, or "auto" (see `choose_form`).

    resets: [time] bool, True at a document's first token, before which the state becomes `initial_state` (default:
    `init_state(rule, params)`) and a chunk begins. In the associative and chunked forms a reset must fall on a chunk
    border, and padding (`gates.mask`) may only be followed by a reset: otherwise all reads are NaN, never silently
    wrong. return_anchor: False where the state will not be read on inside a chunk: its anchor is None, which a kernel
    need not follow. rematerialised: True where a model repeats all but the reads for its gradient: a kernel's states
    between chunks are then made again too, not stored.

    Raises ValueError, naming the argument, for an unknown form or shapes that do not fit.
    """
    check(rule, params, state, queries, keys, values, gates, form, resets)
    time, head_dim = queries.shape
    dtype, steps = state_dtype(queries.dtype), rule.algorithm.steps
    if time == 0:
        empty = jnp.zeros((0,), dtype)
        reads = jnp.zeros((0, head_dim), dtype)
        return (reads, state, Surprise(empty, empty)) if return_surprise else (reads, state)
    if steps > 1:
        queries, keys, values, gates, resets = unroll_inner_steps(steps, queries, keys, values, gates, resets)
    gates = complete_gates(rule, gates, keys, len(state.weights), dtype)
    start, initial = cast_state(state, dtype), None
    if resets is not None:
        initial = start_chunk(cast_state(initial_state or init_state(rule, params), dtype))
    form = choose_form(form, rule, gates)
    run = FORMS[form]
    if form == "fused":  # of a kernel, nothing is dropped because nobody asks for it
        run = functools.partial(run, watch=return_surprise, follow=return_anchor, again=rematerialised)
    reads, state, surprise = run(rule, params, start, queries, keys, values, gates, resets, initial)
    state = state if return_anchor else dataclasses.replace(state, anchor=None)
    if steps > 1:
        reads = reads[steps - 1 :: steps]
        surprise = jax.tree.map(lambda x: jnp.sum(x.reshape(time, steps), axis=1), surprise)
    return (reads, state, surprise) if return_surprise else (reads, state)


def retrieve(rule: MemoryRule, params: Params, state: MemoryState, queries: jax.Array) -> jax.Array:
    """Read without updating: queries [..., head_dim] -> [..., head_dim] (papers 1.2, M*)."""
    return read(rule, params, readable_weights(rule, params, state), queries)


def check(rule, params, state, queries, keys, values, gates, form, resets):
    """Refuse, in one sentence, arguments that do not fit together."""
    if form not in (*FORMS, "auto"):
        raise ValueError(f"form is {form!r}: it must be one of {', '.join(map(repr, (*FORMS, 'auto')))}.")
    if queries.ndim != 2:
        raise ValueError(f"queries has shape {queries.shape}: one head takes [time, head_dim]; vmap over all else.")
    time, head_dim = queries.shape
    steps = rule.algorithm.steps
    expected = rule.shapes(head_dim)
    shapes = tuple(w.shape for w in params["weights"])
    if shapes != expected:
        raise ValueError(
            f"queries has head_dim {head_dim} and params['weights'] has shapes {shapes}: {rule.architecture} needs "
            f"weights of shapes {expected} for it."
        )
    if len(state.momentum) != (len(expected) if rule.algorithm.has_momentum else 0):
        raise ValueError(
            f"state.momentum has {len(state.momentum)} matrices: {rule.algorithm} needs a state made by "
            "init_state(rule, params)."
        )
    written = (time, head_dim) if steps == 1 else (time, steps, head_dim)
    for name, x in (("keys", keys), ("values", values)):
        if x.shape != written or x.dtype != queries.dtype:
            raise ValueError(
                f"{name} is {x.dtype}{list(x.shape)}: it must be {queries.dtype}{list(written)}, the dtype of queries "
                "and a row per token" + (" and inner step." if steps > 1 else ".")
            )
    if rule.algorithm.has_momentum and gates.log_momentum is None:
        raise ValueError(f"gates.log_momentum is None: {rule.algorithm} needs one value per token, shape ({time},).")
    tokens, stepped, matrices = (time,), written[:-1], len(expected)
    shapes = {
        "log_retention": (tokens, (time, 1), (time, matrices)),
        "log_momentum": (tokens, (time, 1), (time, matrices)),
        "step_size": (stepped, (*stepped, 1), (*stepped, matrices)),
        "bias_gate": (stepped, (*stepped, 1), written),
        "log_key_retention": ((time, head_dim),),
        "log_value_retention": ((time, head_dim),),
        "key_step_size": (written,),
        "value_step_size": (written,),
    }
    for name, allowed in shapes.items():
        x = getattr(gates, name)
        if x is not None and x.shape not in allowed:
            raise ValueError(
                f"gates.{name} has shape {x.shape}: it must be {' or '.join(map(str, dict.fromkeys(allowed)))}."
            )
    if gates.bias_gate is not None and not rule.bias.takes_gate:
        raise ValueError(f"gates.bias_gate is given: {rule.bias} takes none; use None.")
    if rule.algorithm.has_momentum and len(expected) == 1 and None not in (
        gates.log_key_retention, gates.log_value_retention
    ):  # fmt: skip
        raise ValueError(
            "gates.log_key_retention and gates.log_value_retention are both given for a linear memory with momentum: "
            "use one of them, or gradient_descent()."
        )
    for name, x in (("gates.mask", gates.mask), ("resets", resets)):
        if x is not None and (x.shape != (time,) or x.dtype != jnp.bool_):
            raise ValueError(f"{name} is {x.dtype}{list(x.shape)}: it must be bool[{time}], one flag per token.")
