"""Attention to a prefix that every query sees, as a TPU kernel: softmax(q P_k^T) P_v and the log-sum-exp of its logits.

XLA writes the [prefix, time] logits and weights to HBM; here they stay in VMEM. Tokens lie in lanes, as they do in
splash attention's operands, so that sums over the prefix are sums over rows. A step takes one head and a block of
queries. Only the inputs are kept for the backward pass: the gradient is `jax.vjp` of the same block.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from titans_jax.layers.attention.segment_pallas import HIDDEN, PREFIX_TOKENS
from titans_jax.layers.attention.xla import KeyValues
from titans_jax.ops.matmul import matmul, outer_products
from titans_jax.ops.pallas_tpu import clear, interpreted, read_wide


class Prefix(NamedTuple):
    """Attention to the prefix alone. outputs: [b, h, t, d]. sums: log-sum-exp of its logits, float32 [b, h, t]."""

    outputs: jax.Array
    sums: jax.Array


def prefix_attention(queries: jax.Array, prefix: KeyValues, block: int) -> Prefix:
    """Attention of scaled queries [b, h, t, d] to a prefix [n, h, d], `block` queries a step, which divides t."""
    num_prefix = prefix.keys.shape[0]
    padding = ((0, 0), (0, -num_prefix % PREFIX_TOKENS), (0, 0))
    prefix = KeyValues(*(jnp.pad(jnp.swapaxes(x, 0, 1), padding) for x in prefix))
    outputs, sums = _attention(num_prefix, block, jnp.swapaxes(queries, 2, 3), prefix)
    return Prefix(jnp.swapaxes(outputs, 2, 3), sums[:, :, 0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(num_prefix: int, block: int, queries: jax.Array, prefix: KeyValues) -> tuple[jax.Array, jax.Array]:
    """Outputs [b, h, d, t] and log-sum-exps [b, h, 1, t] of queries [b, h, d, t]; of the prefix [h, n, d] the first
    `num_prefix` tokens exist."""

    def kernel(queries: Any, prefix: KeyValues, outputs: Any, sums: Any) -> None:
        read, total = _attend(num_prefix, outputs.dtype, *read_wide((queries, prefix)))
        outputs[...], sums[...] = read.astype(outputs.dtype), total

    out = queries, jax.ShapeDtypeStruct((*queries.shape[:2], 1, queries.shape[3]), jnp.float32)
    return _call(kernel, "prefix_attention", block, (queries, prefix), out)


def _attention_forward(num_prefix: int, block: int, queries: jax.Array, prefix: KeyValues) -> tuple[tuple, tuple]:
    return _attention(num_prefix, block, queries, prefix), (queries, prefix)


def _attention_backward(
    num_prefix: int, block: int, inputs: tuple[jax.Array, KeyValues], cotangent: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, KeyValues]:
    def kernel(
        queries: Any, prefix: KeyValues, d_outputs: Any, d_sums: Any, d_queries: Any, d_prefix: KeyValues
    ) -> None:
        @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
        def _() -> None:
            clear(d_prefix)

        attend = functools.partial(_attend, num_prefix, queries.dtype)
        _, pull = jax.vjp(attend, *read_wide((queries, prefix)))
        d, d_read = pull(read_wide((d_outputs, d_sums)))
        d_queries[...] = d.astype(d_queries.dtype)
        for total, part in zip(d_prefix, d_read, strict=True):
            total[...] += part

    queries, prefix = inputs
    totals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), prefix)
    name = "prefix_attention_backward"
    d_queries, d_prefix = _call(kernel, name, block, (*inputs, *cotangent), (queries, totals))
    return d_queries, jax.tree.map(lambda x, d: d.astype(x.dtype), prefix, d_prefix)


_attention.defvjp(_attention_forward, _attention_backward)


def _attend(
    num_prefix: int, operand_dtype: DTypeLike, queries: jax.Array, prefix: KeyValues
) -> tuple[jax.Array, jax.Array]:
    """One head's queries [d, t] and prefix [n, d] -> outputs [d, t] and log-sum-exps [1, t], all float32."""
    logits = matmul(prefix.keys, queries, operand_dtype)
    if num_prefix < len(logits):
        row = jax.lax.broadcasted_iota(jnp.int32, (len(logits), 1), 0)
        logits = logits + jnp.where(row < num_prefix, 0.0, HIDDEN)
    most = jax.lax.stop_gradient(jnp.max(logits, axis=0, keepdims=True))
    weights = jnp.exp(logits - most)
    total = jnp.sum(weights, axis=0, keepdims=True)
    return outer_products(prefix.values, weights, operand_dtype) / total, jnp.log(total) + most


def _call(kernel: Any, name: str, block: int, inputs: tuple, outputs: tuple) -> Any:
    """Run a kernel over the grid (heads, rows of the batch, blocks of tokens). Arrays of four axes have tokens last,
    those of three are the prefix's, whose block stays for all of a head's steps."""
    batch, heads, _, time = inputs[0].shape

    def spec(x: Any) -> pl.BlockSpec:
        if len(x.shape) == 3:
            return pl.BlockSpec((None, *x.shape[1:]), lambda h, b, t: (h, 0, 0))
        return pl.BlockSpec((None, None, x.shape[2], block), lambda h, b, t: (b, h, 0, t))

    return pl.pallas_call(
        kernel,
        grid=(heads, batch, time // block),
        in_specs=jax.tree.map(spec, inputs),
        out_specs=jax.tree.map(spec, outputs),
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outputs),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpreted(),
        name=name,
    )(*inputs)
