"""Arguments of `memorize` and `retrieve` that do not fit together, refused before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.chunk_algorithm import MemoryInputs
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, Params


def check_queries(rule: MemoryRule, params: Params, state: MemoryState, queries: jax.Array) -> None:
    """Raises ValueError where queries are not those of a memory with these params, or params and state are not what
    `init_params` and `init_state` make."""
    if not isinstance(params, Mapping) or not isinstance(state, MemoryState):
        raise ValueError(
            f"params is a {type(params).__name__} and state a {type(state).__name__}: they must be what "
            "init_params(rule, key, head_dim) and init_state(rule, params) make, in this order."
        )
    if not jnp.issubdtype(queries.dtype, jnp.floating):
        raise ValueError(f"queries is {queries.dtype}: it must be float32, bfloat16 or float64.")
    head_dim = queries.shape[-1]
    expected, shapes = rule.shapes(head_dim), tuple(w.shape for w in params["weights"])
    if shapes != expected:
        raise ValueError(
            f"queries has head_dim {head_dim} and params['weights'] has shapes {shapes}: {rule.architecture} needs "
            f"weights of shapes {expected} for it."
        )


def check(rule: MemoryRule, params: Params, state: MemoryState, inputs: MemoryInputs) -> None:
    """Raises ValueError, naming the first argument that does not fit the others."""
    queries, gates = inputs.queries, inputs.gates
    steps = rule.algorithm.steps
    if queries.ndim != 2 and (steps == 1 or queries.ndim != 3 or queries.shape[1] != steps):
        raise ValueError(
            f"queries has shape {queries.shape}: one head takes [time, head_dim]"
            + (f" or [time, {steps}, head_dim]" if steps > 1 else "")
            + "; vmap over all else."
        )
    check_queries(rule, params, state, queries)
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
