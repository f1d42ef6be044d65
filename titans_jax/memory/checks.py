"""Arguments of `memorize` and `retrieve` that do not fit together, refused before anything is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.chunk_algorithm import MemoryInputs
from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, Params


def check_queries(rule: MemoryRule, params: Params, state: MemoryState, queries: jax.Array) -> None:
    """Raises ValueError where queries are not those of a memory with these params, or params and state are not what
    `init_params` and `init_state` make."""
    _check_rule(rule)
    if not isinstance(params, Mapping) or not isinstance(state, MemoryState):
        raise ValueError(
            f"params is a {type(params).__name__} and state a {type(state).__name__}: they must be what "
            "init_params(rule, key, head_dim) and init_state(rule, params) make, in this order."
        )
    _check_arrays(queries=queries)
    if "weights" not in params:
        raise ValueError(f"params has {sorted(params)}: it must be what init_params(rule, key, head_dim) makes.")
    if queries.ndim < 1:
        raise ValueError("queries is a number: it must be an array [..., head_dim].")
    if queries.dtype not in (jnp.float32, jnp.bfloat16, jnp.float64):
        raise ValueError(f"queries is {queries.dtype}: it must be float32, bfloat16 or float64.")
    head_dim = queries.shape[-1]
    expected, shapes = rule.shapes(head_dim), tuple(w.shape for w in params["weights"])
    if shapes != expected:
        raise ValueError(
            f"queries has head_dim {head_dim} and params['weights'] has shapes {shapes}: {rule.architecture} needs "
            f"weights of shapes {expected} for it."
        )
    carried = tuple(w.shape for w in state.weights)
    if carried != expected:
        raise ValueError(
            f"state.weights has shapes {carried}: {rule.architecture} needs {expected}, as in a state made by "
            "init_state(rule, params) for one head; vmap over all else."
        )
    if isinstance(state.position, int) and not 0 <= state.position < rule.chunk_size:
        raise ValueError(f"state.position is {state.position}: it must be 0 to {rule.chunk_size - 1}.")


def check_anchor(state: MemoryState) -> None:
    """Raises ValueError where a state was left without an anchor, and may be inside a chunk."""
    if state.anchor is None and not (isinstance(state.position, int) and state.position == 0):
        raise ValueError(
            "state.anchor is None: memorize left it out for return_anchor=False, and the open chunk's gradients and "
            "reads need it; use start_chunk(state), or return_anchor=True."
        )


def check_segment(rule: MemoryRule, state: MemoryState, time: int, segment: int | None) -> None:
    """Raises ValueError where tokens are not whole segments of whole chunks from a chunk's start on."""
    if segment is None:
        return
    if not isinstance(state.position, int) or state.position != 0:
        raise ValueError(
            f"state.position is {state.position}, and segment {segment}: segments need a state that is known to be at "
            "a chunk's start; use start_chunk(state), or segment=None."
        )
    chunk = max(1, rule.chunk_size // rule.algorithm.steps)
    if segment < 1 or segment % chunk or time % segment:
        raise ValueError(
            f"segment is {segment}: it must be a multiple of the chunk's {chunk} tokens that divides the {time} tokens."
        )


def _check_rule(rule: object) -> None:
    if not isinstance(rule, MemoryRule):
        raise ValueError(
            f"rule is a {type(rule).__name__}: it must be a MemoryRule, as a preset makes it when it is called: "
            "presets.titans()."
        )


def _check_arrays(**arrays: object) -> None:
    for name, x in arrays.items():
        if not hasattr(x, "dtype") or not hasattr(x, "shape"):
            raise ValueError(f"{name} is a {type(x).__name__}: it must be an array.")


def check(rule: MemoryRule, params: Params, state: MemoryState, inputs: MemoryInputs) -> None:
    """Raises ValueError, naming the first argument that does not fit the others."""
    _check_rule(rule)
    queries, gates, steps = inputs.queries, inputs.gates, rule.algorithm.steps
    if not isinstance(gates, Gates):
        raise ValueError(f"gates is a {type(gates).__name__}: it must be Gates, such as Gates.from_values(...) makes.")
    given = {f"gates.{each.name}": getattr(gates, each.name) for each in dataclasses.fields(gates)}
    given |= {"queries": queries, "keys": inputs.keys, "values": inputs.values, "resets": inputs.resets}
    _check_arrays(**{name: x for name, x in given.items() if x is not None})
    if queries.ndim != 2 and (steps == 1 or queries.ndim != 3 or queries.shape[1] != steps):
        raise ValueError(
            f"queries has shape {queries.shape}: one head takes [time, head_dim]"
            + (f" or [time, {steps}, head_dim]" if steps > 1 else "")
            + "; vmap over all else."
        )
    check_queries(rule, params, state, queries)
    check_anchor(state)
    time, head_dim = queries.shape[0], queries.shape[-1]
    expected = rule.shapes(head_dim)
    if len(state.momentum) != (len(expected) if rule.algorithm.has_momentum else 0):
        raise ValueError(
            f"state.momentum has {len(state.momentum)} matrices: {rule.algorithm} needs a state made by "
            "init_state(rule, params)."
        )
    reach = rule.algorithm.window - 1
    kept = 0 if state.window is None else state.window.keys.shape[0]
    if kept != reach:
        raise ValueError(
            f"state.window has {kept} tokens: {rule.algorithm} needs {reach}, as in a state made by init_state(rule, "
            "params)."
        )
    if (state.step_total is None) == rule.algorithm.steps_by_chunk:
        raise ValueError(
            f"state.step_total is {'None' if state.step_total is None else 'given'}: {rule.algorithm} needs a state "
            "made by init_state(rule, params)."
        )
    written = (time, head_dim) if steps == 1 else (time, steps, head_dim)
    for name, x in (("keys", inputs.keys), ("values", inputs.values)):
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
        "erase": (written,),
        "window_weight": ((time, reach),),
    }
    if (gates.window_weight is None) != (reach == 0):
        raise ValueError(
            f"gates.window_weight is {'None' if gates.window_weight is None else 'given'}: {rule.algorithm} needs "
            + ("None." if reach == 0 else f"one weight per token and token before it, shape ({time}, {reach}).")
        )
    if rule.algorithm.whole_tokens and gates.channel_wise:
        raise ValueError(
            f"gates has a channel-wise retention or step size: {rule.algorithm} weighs whole tokens"
            f"{' of its window' if reach else ''}; use None for them."
        )
    for name, allowed in shapes.items():
        x = getattr(gates, name)
        if x is not None and x.shape not in allowed:
            raise ValueError(
                f"gates.{name} has shape {x.shape}: it must be {' or '.join(map(str, dict.fromkeys(allowed)))}."
            )
    for side, channels in (("key", expected[0][0]), ("value", expected[-1][1])):
        for name in (f"log_{side}_retention", f"{side}_step_size"):
            if channels != head_dim and getattr(gates, name) is not None:
                raise ValueError(
                    f"gates.{name} is given: {rule.architecture} has a memory of {channels} {side} channels, not of "
                    f"head_dim {head_dim}; use None."
                )
    if gates.bias_gate is not None and not rule.bias.takes_gate:
        raise ValueError(f"gates.bias_gate is given: {rule.bias} takes none; use None.")
    if gates.erase is not None and not (rule.architecture.linear and rule.algorithm.descends):
        raise ValueError(
            f"gates.erase is given: {rule.architecture} of {rule.algorithm} writes along the key that its error is "
            "taken with; use None, or linear() and gradient_descent()."
        )
    if rule.algorithm.has_momentum and len(expected) == 1 and None not in (
        gates.log_key_retention, gates.log_value_retention
    ):  # fmt: skip
        raise ValueError(
            "gates.log_key_retention and gates.log_value_retention are both given for a linear memory with momentum: "
            "use one of them, or gradient_descent()."
        )
    for name, x in (("gates.mask", gates.mask), ("resets", inputs.resets)):
        if x is not None and (x.shape != (time,) or x.dtype != jnp.bool_):
            raise ValueError(f"{name} is {x.dtype}{list(x.shape)}: it must be bool[{time}], one flag per token.")
