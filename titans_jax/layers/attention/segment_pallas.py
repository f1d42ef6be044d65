"""Attention in a segment of MAC as a TPU kernel: token i sees [P | h_j, x_j for j <= i], in one softmax.

A step takes a row of the batch and the heads that fill the lanes, side by side as they lie in memory, and goes through
them some queries at a time, against the keys up to the last of these. Logits never leave VMEM, and nothing is kept but
what came in: the gradient is `jax.vjp` of the same queries, their softmax made again.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from titans_jax.layers import convolution_pallas
from titans_jax.layers.attention.xla import KeyValues
from titans_jax.layers.norms import side_by_side
from titans_jax.ops.backend import KERNELS, LANES, target_platform
from titans_jax.ops.matmul import inner_products, matmul
from titans_jax.ops.pallas_tpu import VMEM_SHARE, vmem_bytes
from titans_jax.sharding import BATCH, HEADS, head_shards, on_devices

QUERIES = LANES
"""Queries at a time; a segment is padded to whole ones."""
MOST_TOKENS = 1024
"""Of a segment: a step's program grows with their square."""
MOST_LOGITS = {2: 1_200_000, 4: 300_000}
"""Of some queries of a step's heads, by bytes of an operand: with more, v5p's VMEM is too small, or the compiler takes
many minutes."""
PREFIX_TOKENS = 16
"""A prefix is padded to whole ones of these, a tile of bfloat16."""
HIDDEN = -1e30
"""Added to the logit of a key that a query does not see."""


def runs(queries: jax.Array, prefix: KeyValues) -> bool:
    """Whether there is a kernel for a whole segment of these queries [b, t, h, d]."""
    if target_platform() != "tpu":
        return False
    _, time, heads, head_dim = queries.shape
    together = lanes_of(heads // head_shards() * head_dim, head_dim) // head_dim
    logits = together * QUERIES * (2 * time + prefix.keys.shape[1])
    return time <= MOST_TOKENS and logits <= MOST_LOGITS[queries.dtype.itemsize]


def lanes_of(width: int, head_dim: int) -> int:
    """Of a step: heads that fill registers, or all."""
    lanes = convolution_pallas.lanes_of(head_dim)
    return width if width % lanes else lanes


def fused_segment_attention(queries: jax.Array, context: tuple[KeyValues, KeyValues], prefix: KeyValues) -> jax.Array:
    """`segment_attention` as a kernel; under a mesh, each device its own rows and heads."""
    _, time, _, head_dim = queries.shape
    flat = jax.tree.map(side_by_side, (queries, context, prefix))
    rows = PartitionSpec(BATCH, None, HEADS)
    y = on_devices(functools.partial(on_device, head_dim), (rows, rows, rows), rows)(*flat)
    return checkpoint_name(y.reshape(queries.shape), KERNELS)


def on_device(head_dim: int, queries: jax.Array, context: tuple, prefix: KeyValues) -> jax.Array:
    """All [b, t, heads head_dim]."""

    def padded(tree, part: int):
        return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % part), (0, 0))), tree)

    time, seen = queries.shape[1], prefix.keys.shape[1]
    queries, context, prefix = padded(queries, QUERIES), padded(context, QUERIES), padded(prefix, PREFIX_TOKENS)
    return over_queries(head_dim, seen, queries, (*context, prefix) if seen else context)[:, :time]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def over_queries(head_dim: int, seen: int, queries: jax.Array, past: tuple[KeyValues, ...]) -> jax.Array:
    """past: h, x and, where there is one, the prefix, whose first `seen` tokens exist."""
    return run_forward(head_dim, seen, queries, past)


def keep(head_dim: int, seen: int, *inputs):
    return run_forward(head_dim, seen, *inputs), inputs


def gradient(head_dim: int, seen: int, inputs, cotangent):
    return run_backward(head_dim, seen, *inputs, cotangent)


over_queries.defvjp(keep, gradient)


def attend(head_dim: int, seen: int, start: int, operand_dtype, queries: jax.Array, past: list[KeyValues]) -> jax.Array:
    """Outputs [q, lanes] of queries from `start` on, which see those rows [.., lanes] of the past; all float32."""
    heads = queries.shape[1] // head_dim
    head = iota((1, queries.shape[1]), 1) // head_dim
    # A head's numbers among zeros: over all lanes, products cost a matrix unit what they cost over a head's own.
    own = [jnp.where(head == h, 1.0, 0.0) for h in range(heads)]
    by_head = jnp.concatenate([queries * (head_dim**-0.5 * lanes) for lanes in own])  # one head below the other
    shape = (len(queries), len(past[0].keys))
    future = jnp.concatenate([jnp.where(iota(shape, 1) > start + iota(shape, 0), HIDDEN, 0.0)] * heads)
    hidden = [future, future, *(jnp.where(iota((1, len(rows.keys)), 1) < seen, 0.0, HIDDEN) for rows in past[2:])]

    logits = [inner_products(by_head, rows.keys, operand_dtype) for rows in past]
    logits = [part + away for part, away in zip(logits, hidden, strict=True)]
    most = functools.reduce(jnp.maximum, [jnp.max(part, axis=1, keepdims=True) for part in logits])
    weights = [jnp.exp(part - jax.lax.stop_gradient(most)) for part in logits]
    total = sum(jnp.sum(part, axis=1, keepdims=True) for part in weights)
    read = sum(matmul(part, rows.values, operand_dtype) for part, rows in zip(weights, past, strict=True))
    return sum(lanes * part for lanes, part in zip(own, jnp.split(read / total, heads), strict=True))


def iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def parts(past: tuple[KeyValues, ...], start: int) -> list[KeyValues]:
    """Of references to the past, what queries from `start` on see: h and x up to the last of them, and all of P."""
    context = jax.tree.map(lambda ref: ref.at[: start + QUERIES], past[:2])
    return [*context, *past[2:]]


def wide(ref) -> jax.Array:
    return ref[...].astype(jnp.float32)


def add(ref, x: jax.Array) -> None:
    ref[...] += x


def run_forward(head_dim: int, seen: int, queries: jax.Array, past: tuple[KeyValues, ...]) -> jax.Array:
    def kernel(queries, past, y):
        for start in range(0, len(queries), QUERIES):
            now = slice(start, start + QUERIES)
            read = jax.tree.map(wide, (queries.at[now], parts(past, start)))
            y[now] = attend(head_dim, seen, start, y.dtype, *read).astype(y.dtype)

    return call(kernel, "segment_attention", head_dim, (queries, past), queries, ())


def run_backward(head_dim: int, seen: int, queries: jax.Array, past: tuple[KeyValues, ...], cotangent: jax.Array):
    def kernel(queries, past, cotangent, d_queries, d_past, *totals):
        totals = jax.tree.unflatten(jax.tree.structure(d_past), totals)
        for total in jax.tree.leaves(totals):
            total[...] = jnp.zeros_like(total)
        for start in range(0, len(queries), QUERIES):
            now = slice(start, start + QUERIES)
            read = jax.tree.map(wide, (queries.at[now], parts(past, start)))
            _, pull = jax.vjp(functools.partial(attend, head_dim, seen, start, queries.dtype), *read)
            d, d_read = pull(wide(cotangent.at[now]))
            d_queries[now] = d.astype(d_queries.dtype)
            jax.tree.map(add, parts(totals, start), d_read)
        for ref, total in zip(jax.tree.leaves(d_past), jax.tree.leaves(totals), strict=True):
            ref[...] = total[...].astype(ref.dtype)

    return call(kernel, "segment_attention_backward", head_dim, (queries, past, cotangent), (queries, past), past)


def call(kernel, name: str, head_dim: int, inputs: tuple, outputs, scratch):
    """Run a kernel of references over the grid (rows of the batch, heads that fill the lanes)."""
    batch, _, width = inputs[0].shape
    lanes = lanes_of(width, head_dim)

    def spec(x):
        return pl.BlockSpec((None, x.shape[1], lanes), lambda b, g: (b, 0, g))

    return pl.pallas_call(
        kernel,
        grid=(batch, width // lanes),
        in_specs=jax.tree.map(spec, inputs),
        out_specs=jax.tree.map(spec, outputs),
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outputs),
        scratch_shapes=[pltpu.VMEM((x.shape[1], lanes), jnp.float32) for x in jax.tree.leaves(scratch)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=int(VMEM_SHARE * vmem_bytes())
        ),
        interpret=target_platform() != "tpu",
        name=name,
    )(*inputs)
