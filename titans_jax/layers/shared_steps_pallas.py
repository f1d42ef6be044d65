"""The factors of shared steps as one TPU kernel, forward and backward.

XLA writes the cosines of a chunk's keys to HBM, several times for the gradient, and keys in layouts of their own. Here
they stay in registers, and keys come as projections leave them, with heads side by side. A step takes the heads that
fill a register, whose cosines [tokens, heads tokens] lie side by side too; the gradient is `jax.vjp` of the same block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from titans_jax import sharding
from titans_jax.ops.backend import current_backend
from titans_jax.ops.matmul import inner_products
from titans_jax.ops.pallas_tpu import interpreted, largest_divisor
from titans_jax.ops.platform import LANES, SUBLANES

BLOCK = 64
"""Tokens of a block, one chunk or several."""
MOST_BYTES = 2**20
"""Bytes of a step's keys, of which VMEM holds four times as many: a gradient's too, and both of the next step."""


LogarithmOfLeft = Callable[[jax.Array, jax.Array], jax.Array]
"""(shares, cosines) of earlier tokens -> the logarithms of what each leaves of a step."""


class Inputs(NamedTuple):
    """keys: [b, blocks, BLOCK, h * d]. shares: float32 [b, blocks, h, BLOCK]."""

    keys: Any
    shares: Any


def supports(shares: jax.Array, keys: jax.Array, position: int | jax.Array, chunk_size: int) -> bool:
    """Whether the kernel runs for shares [b, t, h] and keys [b, t, h, d]: whole blocks of whole chunks, from a chunk's
    first token on, and heads that fill registers."""
    _, time, heads, width = keys.shape
    starts = isinstance(position, int) and position == 0 and time % BLOCK == 0 and BLOCK % chunk_size == 0
    fills = LANES % width == 0 and heads // sharding.head_shards() * width % LANES == 0
    return starts and fills and shares.dtype == jnp.float32 and current_backend().pallas


def factors(of_left: LogarithmOfLeft, chunk_size: int, shares: jax.Array, keys: jax.Array) -> jax.Array:
    """The factor of every token's step, [b, t, h], of shares [b, t, h] and keys [b, t, h, d] of whole chunks."""
    batch, time, heads, width = keys.shape
    rows = sharding.batch_axes(batch)
    by_head = PartitionSpec(rows, None, sharding.HEADS)
    specs = Inputs(PartitionSpec(rows, None, None, sharding.HEADS), by_head)
    run = sharding.on_devices(functools.partial(_factors, of_left, chunk_size, width), (specs,), by_head)
    shares = jnp.swapaxes(shares.reshape(batch, -1, BLOCK, heads), 2, 3)
    found = run(Inputs(keys.reshape(batch, -1, BLOCK, heads * width), shares))
    return jnp.swapaxes(found, 2, 3).reshape(batch, time, heads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _factors(of_left: LogarithmOfLeft, chunk_size: int, width: int, inputs: Inputs) -> jax.Array:
    def kernel(inputs: Inputs, found: Any) -> None:
        def block(i: jax.Array, _: None) -> None:
            for lanes, heads in _groups(*inputs, width):
                operands = inputs.keys[0, i, :, lanes], inputs.shares[0, i, heads]
                found[0, i, heads] = _block(of_left, chunk_size, *operands)

        jax.lax.fori_loop(0, len(found[0]), block, None)

    return _call(kernel, "shared_steps", (inputs,), inputs.shares)


def _factors_forward(of_left: LogarithmOfLeft, chunk_size: int, width: int, inputs: Inputs) -> tuple[jax.Array, Inputs]:
    return _factors(of_left, chunk_size, width, inputs), inputs


def _factors_backward(
    of_left: LogarithmOfLeft, chunk_size: int, width: int, inputs: Inputs, cotangent: jax.Array
) -> tuple[Inputs]:
    def kernel(inputs: Inputs, cotangent: Any, d_keys: Any, d_shares: Any) -> None:
        def block(i: jax.Array, _: None) -> None:
            for lanes, heads in _groups(*inputs, width):
                operands = inputs.keys[0, i, :, lanes], inputs.shares[0, i, heads]
                _, pull = jax.vjp(functools.partial(_block, of_left, chunk_size), *operands)
                d_keys[0, i, :, lanes], d_shares[0, i, heads] = pull(cotangent[0, i, heads])

        jax.lax.fori_loop(0, cotangent.shape[1], block, None)

    return (Inputs(*_call(kernel, "shared_steps_backward", (inputs, cotangent), inputs)),)


_factors.defvjp(_factors_forward, _factors_backward)


def _block(of_left: LogarithmOfLeft, chunk_size: int, keys: jax.Array, shares: jax.Array) -> jax.Array:
    """Factors [n, tokens] of a block of n heads: keys [tokens, n * d], shares [n, tokens]."""
    (heads, tokens), lanes = shares.shape, keys.shape[1]
    head = jax.lax.broadcasted_iota(jnp.int32, keys.shape, 1) // (lanes // heads)
    # Zeros in the lanes of other heads, or a cosine would be summed over all of them.
    own = jnp.concatenate([jnp.where(head == i, keys, jnp.zeros_like(keys)) for i in range(heads)])
    cosines = inner_products(keys, own, keys.dtype)
    shares = jnp.concatenate([shares[i : i + 1] for i in range(heads)], axis=1)
    token = jax.lax.broadcasted_iota(jnp.int32, cosines.shape, 0)
    other = jax.lax.broadcasted_iota(jnp.int32, cosines.shape, 1) % tokens
    before = (other < token) & (other // chunk_size == token // chunk_size)
    left = jnp.where(before, of_left(shares, cosines), 0.0)
    # Sums over lanes as a product, whose result is a row for every head; of whole registers of rows.
    whose = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, heads * tokens), 1) // tokens
    whose = whose == jax.lax.broadcasted_iota(jnp.int32, whose.shape, 0)
    return jnp.exp(inner_products(whose.astype(left.dtype), left, left.dtype)[:heads])


def _groups(keys: Any, shares: Any, width: int) -> list[tuple[slice, slice]]:
    """The lanes, and the heads, that are taken together, of a step's block of `Inputs`."""
    heads = LANES // width
    return [(slice(i * width, i * width + LANES), slice(i, i + heads)) for i in range(0, shares.shape[2], heads)]


def _call(kernel: Any, name: str, inputs: tuple, outputs: Any) -> Any:
    """Run a kernel over the grid (rows of the batch, groups of blocks), with results like `outputs`."""
    keys = inputs[0].keys
    batch, blocks, tokens, lanes = keys.shape
    group = largest_divisor(blocks, max(1, MOST_BYTES // (tokens * lanes * keys.dtype.itemsize)))

    def spec(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, group, *x.shape[2:]), lambda b, i: (b, i, 0, 0))

    return pl.pallas_call(
        kernel,
        grid=(batch, blocks // group),
        in_specs=jax.tree.map(spec, inputs),
        out_specs=jax.tree.map(spec, outputs),
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outputs),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpreted(),
        name=name,
    )(*inputs)
