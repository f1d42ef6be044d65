"""Attention in a segment of MAC as a TPU kernel: token i sees [P | h_j, x_j for j <= i], in one softmax.

With learned queries (`mac_long_term`) h is a part of P, and x the only context. A step takes a row of the batch and as
many heads as fill the lanes, side by side as they lie in memory. It takes some queries at a time, against the keys up
to the last of these. Logits never leave VMEM, and only the inputs are kept for the backward pass: the gradient is
`jax.vjp` of the same queries, whose softmax is recomputed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from titans_jax.layers.attention.xla import KeyValues
from titans_jax.layers.head_channels import side_by_side
from titans_jax.ops.backend import current_backend
from titans_jax.ops.matmul import inner_products, matmul
from titans_jax.ops.pallas_tpu import clear, interpreted, read_wide, usable_vmem
from titans_jax.ops.platform import KERNELS, LANES
from titans_jax.sharding import BATCH, HEADS, head_shards, on_devices

QUERIES = LANES
"""Queries at a time; a segment is padded to a multiple."""
MOST_TOKENS = 1024
"""The longest segment: a step's program grows with the square of its tokens."""
MOST_LOGITS = {2: 1_200_000, 4: 300_000}
"""The most logits of the queries and heads that are taken at a time, by bytes of an operand: with more, v5p's VMEM is
too small, or the compiler takes many minutes."""
PREFIX_TOKENS = 16
"""A prefix is padded to a multiple of this, a tile of bfloat16."""
HIDDEN = -1e30
"""Added to the logit of a key that a query does not see."""


def supports(queries: jax.Array, context: tuple[KeyValues, ...], prefix: KeyValues, index: int | jax.Array = 0) -> bool:
    """Whether there is a kernel for these arguments of `api.segment_attention`: a whole segment, whose logits fit."""
    _, time, heads, head_dim = queries.shape
    whole = isinstance(index, int) and time == context[0].keys.shape[1]
    if not whole or not current_backend().pallas or queries.dtype.itemsize not in MOST_LOGITS:
        return False
    heads_of_step = _lanes(heads // head_shards() * head_dim, head_dim) // head_dim
    logits = heads_of_step * QUERIES * (len(context) * time + prefix.keys.shape[1])
    return time <= MOST_TOKENS and logits <= MOST_LOGITS[queries.dtype.itemsize]


def fused_segment_attention(
    queries: jax.Array, context: tuple[KeyValues, ...], prefix: KeyValues, index: int = 0
) -> jax.Array:
    """`api.segment_attention` of a whole segment, index 0, as a kernel; each device has its own rows and heads."""
    flat = jax.tree.map(side_by_side, (queries, context, prefix))
    rows = PartitionSpec(BATCH, None, HEADS)
    y = on_devices(functools.partial(_on_device, queries.shape[-1]), (rows, rows, rows), rows)(*flat)
    return checkpoint_name(y.reshape(queries.shape), KERNELS)


def _on_device(head_dim: int, queries: jax.Array, context: tuple[KeyValues, ...], prefix: KeyValues) -> jax.Array:
    """Attention on one device, all [b, t, heads * head_dim]: pads to whole tiles."""

    def padded(tree: Any, multiple: int) -> Any:
        return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple), (0, 0))), tree)

    time, num_prefix = queries.shape[1], prefix.keys.shape[1]
    queries, context, prefix = padded(queries, QUERIES), padded(context, QUERIES), padded(prefix, PREFIX_TOKENS)
    past = (*context, prefix) if num_prefix else context
    return _attention(head_dim, len(context), num_prefix, queries, past)[:, :time]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(
    head_dim: int, contexts: int, num_prefix: int, queries: jax.Array, past: tuple[KeyValues, ...]
) -> jax.Array:
    """past: so many contexts and, where there is one, the prefix, whose first `num_prefix` tokens exist."""
    return _run_forward(head_dim, contexts, num_prefix, queries, past)


def _attention_forward(
    head_dim: int, contexts: int, num_prefix: int, queries: jax.Array, past: tuple[KeyValues, ...]
) -> tuple[jax.Array, tuple]:
    return _run_forward(head_dim, contexts, num_prefix, queries, past), (queries, past)


def _attention_backward(head_dim: int, contexts: int, num_prefix: int, inputs: tuple, cotangent: jax.Array) -> tuple:
    return _run_backward(head_dim, contexts, num_prefix, *inputs, cotangent)


_attention.defvjp(_attention_forward, _attention_backward)


def _attend(
    head_dim: int,
    contexts: int,
    num_prefix: int,
    start: int,
    operand_dtype: DTypeLike,
    queries: jax.Array,
    past: list[KeyValues],
) -> jax.Array:
    """Outputs [q, lanes] of queries from `start` on, which see those rows [.., lanes] of the past; all float32."""
    heads = queries.shape[1] // head_dim
    head = _iota((1, queries.shape[1]), 1) // head_dim
    # One head's numbers, and zeros in all other lanes: for a matrix unit, products over all lanes cost as much.
    own = [jnp.where(head == h, 1.0, 0.0) for h in range(heads)]
    by_head = jnp.concatenate([queries * (head_dim**-0.5 * lanes) for lanes in own])  # one head below the other
    shape = (len(queries), len(past[0].keys))
    future = jnp.concatenate([jnp.where(_iota(shape, 1) > start + _iota(shape, 0), HIDDEN, 0.0)] * heads)
    padding = (jnp.where(_iota((1, len(rows.keys)), 1) < num_prefix, 0.0, HIDDEN) for rows in past[contexts:])
    hidden = [*[future] * contexts, *padding]

    logits = [inner_products(by_head, rows.keys, operand_dtype) for rows in past]
    logits = [part + away for part, away in zip(logits, hidden, strict=True)]
    most = functools.reduce(jnp.maximum, [jnp.max(part, axis=1, keepdims=True) for part in logits])
    weights = [jnp.exp(part - jax.lax.stop_gradient(most)) for part in logits]
    total = sum(jnp.sum(part, axis=1, keepdims=True) for part in weights)
    read = sum(matmul(part, rows.values, operand_dtype) for part, rows in zip(weights, past, strict=True))
    return sum(lanes * part for lanes, part in zip(own, jnp.split(read / total, heads), strict=True))


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _seen(contexts: int, past: tuple[KeyValues, ...], start: int) -> list[KeyValues]:
    """The parts of references to the past that queries from `start` on see: contexts up to the last query, all of P."""
    context = jax.tree.map(lambda ref: ref.at[: start + QUERIES], past[:contexts])
    return [*context, *past[contexts:]]


def _add(ref: Any, x: jax.Array) -> None:
    ref[...] += x


def _run_forward(
    head_dim: int, contexts: int, num_prefix: int, queries: jax.Array, past: tuple[KeyValues, ...]
) -> jax.Array:
    def kernel(queries: Any, past: tuple[KeyValues, ...], y: Any) -> None:
        for start in range(0, len(queries), QUERIES):
            now = slice(start, start + QUERIES)
            read = read_wide((queries.at[now], _seen(contexts, past, start)))
            y[now] = _attend(head_dim, contexts, num_prefix, start, y.dtype, *read).astype(y.dtype)

    return _call(kernel, "segment_attention", head_dim, (queries, past), queries, ())


def _run_backward(
    head_dim: int, contexts: int, num_prefix: int, queries: jax.Array, past: tuple[KeyValues, ...], cotangent: jax.Array
) -> tuple[jax.Array, tuple[KeyValues, ...]]:
    """Cotangents of the queries and of the past."""

    def kernel(
        queries: Any, past: tuple[KeyValues, ...], cotangent: Any, d_queries: Any, d_past: Any, *totals: Any
    ) -> None:
        totals = jax.tree.unflatten(jax.tree.structure(d_past), totals)
        clear(totals)
        for start in range(0, len(queries), QUERIES):
            now = slice(start, start + QUERIES)
            read = read_wide((queries.at[now], _seen(contexts, past, start)))
            _, pull = jax.vjp(functools.partial(_attend, head_dim, contexts, num_prefix, start, queries.dtype), *read)
            d, d_read = pull(read_wide(cotangent.at[now]))
            d_queries[now] = d.astype(d_queries.dtype)
            jax.tree.map(_add, _seen(contexts, totals, start), d_read)
        for ref, total in zip(jax.tree.leaves(d_past), jax.tree.leaves(totals), strict=True):
            ref[...] = total[...].astype(ref.dtype)

    return _call(kernel, "segment_attention_backward", head_dim, (queries, past, cotangent), (queries, past), past)


def _lanes(width: int, head_dim: int) -> int:
    """Lanes of a step, out of `width`: heads that fill registers, or all."""
    lanes = math.lcm(LANES, head_dim)
    return width if width % lanes else lanes


def _call(kernel: Callable[..., None], name: str, head_dim: int, inputs: tuple, outputs: Any, scratch: Any) -> Any:
    """Run a kernel of references over the grid (rows of the batch, heads that fill the lanes).

    Args:
      outputs: arrays like the outputs.
      scratch: arrays like the float32 sums that a step keeps in VMEM.
    """
    batch, _, width = inputs[0].shape
    lanes = _lanes(width, head_dim)

    def spec(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, x.shape[1], lanes), lambda b, g: (b, 0, g))

    return pl.pallas_call(
        kernel,
        grid=(batch, width // lanes),
        in_specs=jax.tree.map(spec, inputs),
        out_specs=jax.tree.map(spec, outputs),
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outputs),
        scratch_shapes=[pltpu.VMEM((x.shape[1], lanes), jnp.float32) for x in jax.tree.leaves(scratch)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=usable_vmem()
        ),
        interpret=interpreted(),
        name=name,
    )(*inputs)
