"""The fused form of linear memories with gates of every channel: `gated_delta_rule` in the kernel.

Steps, slopes and where documents begin come as rows of a block's tokens; what channels forget is summed in the kernel,
by `channel_decay_pallas`. The rest, solve and gradients included, is the chunked form's own block function.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from titans_jax.memory.forms import delta_rule, gated_delta_rule
from titans_jax.memory.forms.scan_chunks import Grid
from titans_jax.memory.gates import Gates
from titans_jax.memory.pallas import kernels
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState
from titans_jax.ops import channel_decay_pallas, solve_tril

runs = gated_delta_rule.runs


def tokens(rule: MemoryRule) -> int:
    """Of a block."""
    return delta_rule.TOKENS_PER_BLOCK


def pack(rule: MemoryRule, layout: Grid, opens: bool) -> tuple[jax.Array, Gates]:
    """Of a layout in blocks, gates `gated_delta_rule.folded`: step sizes, slopes of the bias and, with resets, `count`, if
    any, as rows [blocks, 1 .. 3, tokens], and the others. No chunk stays open, as every token is one."""
    queries, *_, gates, resets = layout.inputs
    gates = jax.vmap(gated_delta_rule.folded)(gates)
    rows = [x[..., 0] for x in (gates.step_size, gates.bias_gate) if x is not None]
    rows += [] if resets is None else [gated_delta_rule.count(resets).astype(gates.step_size.dtype)]
    by_key = jnp.broadcast_to(gates.log_key_retention, queries.shape)
    return jnp.stack(rows, axis=1), dataclasses.replace(gates, log_key_retention=by_key, bias_gate=None)


def run_block(rule: MemoryRule, watch: bool, opens: bool, slow, state, anchor, initial, block: kernels.Chunks):
    """As `kernels.run_chunk`, for a block; no chunk stays open."""
    weights, _ = state
    queries, keys, values = block.queries, block.keys, block.values
    by_channel = {name: getattr(block, name) for name in kernels.CHANNELS}
    rows, document = block.rows, None
    if initial is not None:
        rows, document = rows[:-1], jax.lax.stop_gradient(rows[-1:])
    columns = rows.T
    gates = Gates(None, None, columns[:, :1], None, columns[:, 1:] if len(rows) > 1 else None, **by_channel)
    invert = functools.partial(solve_tril.inverse_in_kernel, operand_dtype=keys.dtype)
    prepared = gated_delta_rule.prepare_block(
        rule, queries, keys, gates, document, channel_decay_pallas.ChannelDecay, invert, watch
    )
    start = MemoryState(weights, (), weights, 0)
    fresh = None if initial is None else MemoryState(*initial, initial[0], 0)
    inputs = queries, keys, values, gates, None, prepared
    (weights, *_), reads, surprise = gated_delta_rule.memorize(rule, slow, start, fresh, inputs)
    watched = jnp.stack([surprise.loss, surprise.cotangent_norm], axis=1) if watch else None
    return (weights, ()), None, reads, watched
