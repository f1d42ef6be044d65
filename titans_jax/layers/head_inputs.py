"""What the memories of all heads are given, and how every device runs its own rows and heads of them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from titans_jax import memory
from titans_jax.sharding import HEADS, batch_axes, on_devices


class HeadInputs(NamedTuple):
    """Inputs of the memories of all heads: queries, keys, values [b, t, h, (n,) d], gates [b, t, h, ...], resets bool
    [b, t] or None. For `LogLinearMemory` alone scales [b, t, h, levels], and with resets positions int32 [b, t]."""

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    gates: memory.Gates
    resets: jax.Array | None
    scales: jax.Array | None = None
    positions: jax.Array | None = None


def head_axes(inputs: HeadInputs) -> HeadInputs:
    """Which axis of a row's inputs is that of heads."""
    gates = dataclasses.replace(jax.tree.map(lambda _: 1, inputs.gates), mask=None)
    return HeadInputs(1, 1, 1, gates, None, scales=1, positions=None)


def per_device(rows: Callable, batch: int, gates: memory.Gates) -> Callable:
    """`rows` of `_memorize` on every device for its own rows and heads."""
    across = batch_axes(batch)  # None for the persistent tokens: one row, read by all
    by_head, by_token = PartitionSpec(across, HEADS), PartitionSpec(across, None, HEADS)
    gates = dataclasses.replace(
        jax.tree.map(lambda _: by_token, gates), mask=gates.mask if gates.mask is None else PartitionSpec(across)
    )

    def sharded(position: int | jax.Array, *arguments: Any) -> Any:
        static = isinstance(position, int)
        by_row = PartitionSpec(across)
        inputs = HeadInputs(by_token, by_token, by_token, gates, by_row, scales=by_token, positions=by_row)
        specs = (by_head, by_head, inputs, by_head)
        return on_devices(
            functools.partial(rows, position) if static else rows,
            specs if static else (PartitionSpec(), *specs),
            (by_token, by_head, by_token, by_head),
        )(*(() if static else (position,)), *arguments)

    return sharded
