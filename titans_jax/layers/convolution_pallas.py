"""A memory's inputs on TPUs in one pass: causal convolution, SiLU and unit norm in a kernel, and one for its gradient.

XLA's programs of them read and write every number a dozen times. Here a step takes tokens of some whole heads and goes
through them in strips that stay in registers; the gradient is `jax.vjp` of the same strip, from the last to the first.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from titans_jax import sharding
from titans_jax.layers.norms import L2_EPSILON
from titans_jax.memory.pallas.kernels import largest_divisor
from titans_jax.ops.backend import LANES, SUBLANES, target_platform
from titans_jax.ops.matmul import matmul, split_bfloat16

STRIP = 64
"""Tokens of a strip: with 128 channels, a value on its way is 8 of the 64 registers."""
MOST_TOKENS = 1024
"""Tokens of a step."""
BEFORE = 16
"""Rows that are read of the step before, a whole tile of bfloat16; a convolution has fewer taps."""


class Features(NamedTuple):
    """What is done. activation: SiLU behind the convolution. width: of the parts of unit norm, None without norm."""

    activation: bool
    width: int | None


class Taps(NamedTuple):
    """What is learned, float32: of the convolution [taps, channels], and what a document's history adds to its first
    tokens [taps - 1, channels]."""

    kernel: jax.Array
    history: jax.Array


def runs(time: int, channels: int, taps: int, width: int | None) -> bool:
    """Whether there is a kernel for these shapes: whole strips of tokens, whole heads that fill registers, and taps
    that reach no farther back than one register."""
    on_device = channels // sharding.head_shards()
    fits = time % STRIP == 0 and on_device % lanes_of(width) == 0 and 1 < taps <= SUBLANES
    return fits and target_platform() == "tpu"


def lanes_of(width: int | None) -> int:
    """Channels of a step."""
    return math.lcm(LANES, width or 1)


def features(
    options: Features, x: jax.Array, tail: jax.Array, positions: jax.Array, kernel: jax.Array, history: jax.Array
) -> jax.Array:
    """x [b, t, channels] convolved, activated and normalised, in x's dtype; computed in float32.

    Args:
      tail: [b, taps - 1, channels], the rows before.
      positions: int32 [b, t], tokens since a document's start: a token sees none from before it.
      kernel: [taps, channels], the newest token's first.
      history: [taps - 1, channels], what is added to the first tokens of a document.
    """
    # Compared with lags in registers: a column of numbers would have to be spread over lanes.
    positions = jnp.broadcast_to(jnp.minimum(positions, BEFORE).astype(jnp.bfloat16)[..., None], (*x.shape[:2], LANES))
    before = jnp.pad(tail, ((0, 0), (BEFORE - tail.shape[1], 0), (0, 0)))
    taps = Taps(kernel.astype(jnp.float32), history.astype(jnp.float32))
    rows = sharding.batch_axes(x.shape[0])
    by_channel = PartitionSpec(rows, None, sharding.HEADS)
    specs = (by_channel, by_channel, PartitionSpec(rows), PartitionSpec(None, sharding.HEADS))
    run = sharding.on_devices(functools.partial(over_tokens, options), specs, by_channel)
    return run(x, before, positions, taps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def over_tokens(options: Features, x, before, positions, taps: Taps):
    return run_forward(options, x, before, positions, taps)


def keep(options: Features, *inputs):
    return run_forward(options, *inputs), inputs


def gradient(options: Features, inputs, cotangent):
    d_x, d_before, d_taps = run_backward(options, *inputs, cotangent)
    return d_x, d_before, None, d_taps


over_tokens.defvjp(keep, gradient)


def strip(activation: bool, same_head, positions: jax.Array, before: jax.Array, x: jax.Array, taps: Taps) -> jax.Array:
    """A strip of x [tokens, lanes] after `before` [8, lanes], float32.

    same_head: 1 where two lanes are of one head, else 0, [lanes, lanes]; None without norm. positions [tokens, lanes].
    """
    rows = jnp.concatenate([before, x])
    y = 0
    for lag in reversed(range(1, len(taps.kernel))):
        past = taps.kernel[lag : lag + 1] * shifted(lag, rows)[len(before) :]
        y = jnp.where(positions >= lag, past + y, taps.history[lag - 1 : lag])
    y += taps.kernel[:1] * x
    # The sigmoid of SiLU as a hyperbolic tangent, which is one operation of a TPU.
    y = y * (0.5 * jnp.tanh(0.5 * y) + 0.5) if activation else y
    return y if same_head is None else y * jax.lax.rsqrt(over_heads(jnp.square(y), same_head) + L2_EPSILON)


@jax.custom_vjp
def over_heads(x: jax.Array, same_head: jax.Array) -> jax.Array:
    """At every number of a row the sum over its head's, by products with 0 and 1 of twice bfloat16's digits."""
    return sum(matmul(digits, same_head, same_head.dtype) for digits in split_bfloat16(x))


over_heads.defvjp(lambda x, same: (over_heads(x, same), same), lambda same, d: (over_heads(d, same), None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def shifted(lag: int, rows: jax.Array) -> jax.Array:
    """Rows, later by `lag`; what falls off the end comes first, and has no gradient."""
    return jnp.roll(rows, lag, axis=0)


shifted.defvjp(lambda lag, rows: (shifted(lag, rows), None), lambda lag, _, d: (jnp.roll(d, -lag, axis=0),))


def run_forward(options: Features, *inputs) -> jax.Array:
    """Of x, the rows before, positions and taps."""

    def kernel(x, previous, before, positions, same_head, taps, y):
        rows = rows_before(pl.program_id(1) == 0, before, previous)
        same_head, learned = jax.tree.map(lambda ref: ref[...], (same_head, taps))
        for start in range(0, x.shape[1], STRIP):
            now = pl.ds(start, STRIP)
            strip_x = x[0, now].astype(rows.dtype)
            found = strip(options.activation, same_head, spread(positions[0, now], x.shape[2]), rows, strip_x, learned)
            y[0, now] = found.astype(y.dtype)
            rows = strip_x[-SUBLANES:]

    return call(kernel, "features", options, *inputs)


def run_backward(options: Features, x, before, positions, taps: Taps, cotangent: jax.Array) -> tuple:
    """Cotangents of x, of the rows before and of the taps."""

    def kernel(x, previous, before, positions, same_head, taps, cotangent, d_x, d_before, d_taps, later):
        step, lanes = pl.program_id(1), pl.program_id(2)
        first = step == pl.num_programs(1) - 1
        same_head, learned = jax.tree.map(lambda ref: ref[...], (same_head, taps))
        d_later = jnp.where(step == 0, 0, later[lanes])
        d_learned = jax.tree.map(jnp.zeros_like, learned)
        for start in reversed(range(0, x.shape[1], STRIP)):
            now = pl.ds(start, STRIP)
            if start:
                rows = x[0, start - BEFORE : start].astype(d_later.dtype)[-SUBLANES:]
            else:
                rows = rows_before(first, before, previous)
            run = functools.partial(strip, options.activation, same_head, spread(positions[0, now], x.shape[2]))
            _, pull = jax.vjp(run, rows, x[0, now].astype(rows.dtype), learned)
            d_rows, d_strip, d = pull(cotangent[0, now].astype(rows.dtype))
            d_strip = jnp.concatenate([d_strip[:-SUBLANES], d_strip[-SUBLANES:] + d_later])
            d_x[0, now] = d_strip.astype(d_x.dtype)
            d_later, d_learned = d_rows, jax.tree.map(jnp.add, d_learned, d)
        later[lanes] = d_later
        d_before[0, 0] = jnp.concatenate([jnp.zeros_like(d_later), d_later]).astype(d_before.dtype)
        for ref, d in zip(d_taps, d_learned, strict=True):
            ref[0, 0] = d

    d_x, d_before, d_taps = call(kernel, "features_backward", options, x, before, positions, taps, cotangent)
    return d_x, d_before[:, 0], jax.tree.map(lambda d: jnp.sum(d, axis=(0, 1)), d_taps)


def same_heads(width: int | None) -> jax.Array | None:
    """`strip`'s, for heads of `width`."""
    head = None if width is None else jnp.arange(lanes_of(width), dtype=jnp.int32) // width
    return None if width is None else (head[:, None] == head[None]).astype(jnp.bfloat16)


def rows_before(is_first, before, previous) -> jax.Array:
    """The 8 rows before a step, of what came before the sequence or of the step before."""
    rows = jnp.where(is_first, before[0].astype(jnp.float32), previous[0].astype(jnp.float32))
    return rows[-SUBLANES:]


def spread(positions: jax.Array, lanes: int) -> jax.Array:
    """[tokens, LANES] of equal numbers as float32 [tokens, lanes]."""
    return jnp.concatenate([positions.astype(jnp.float32)] * (lanes // LANES), axis=1)


def call(kernel, name: str, options: Features, x, before, positions, taps: Taps, cotangent=None):
    """Run a kernel of references over the grid (rows of the batch, tokens, channels): the forward one, or, with the
    output's cotangent, the backward one, which takes the last tokens first and gives cotangents of every step."""
    batch, time, channels = x.shape
    lanes, tokens = lanes_of(options.width), STRIP * largest_divisor(time // STRIP, MOST_TOKENS // STRIP)
    steps, groups, same_head = time // tokens, channels // lanes, same_heads(options.width)
    at = (lambda t: t) if cotangent is None else (lambda t: steps - 1 - t)

    by_token = pl.BlockSpec((1, tokens, lanes), lambda b, t, c: (b, at(t), c))
    previous = pl.BlockSpec((1, BEFORE, lanes), lambda b, t, c: (b, jnp.maximum(at(t) * (tokens // BEFORE) - 1, 0), c))
    first = pl.BlockSpec((1, BEFORE, lanes), lambda b, t, c: (b, 0, c))
    for_all = pl.BlockSpec((1, tokens, LANES), lambda b, t, c: (b, at(t), 0))
    whole = same_head if same_head is None else pl.BlockSpec(same_head.shape, lambda b, t, c: (0, 0))
    by_channel = jax.tree.map(lambda tap: pl.BlockSpec((len(tap), lanes), lambda b, t, c: (0, c)), taps)
    inputs, in_specs = (
        (x, x, before, positions, same_head, taps),
        (by_token, previous, first, for_all, whole, by_channel),
    )
    out_specs, out_shape, scratch = by_token, jax.ShapeDtypeStruct(x.shape, x.dtype), []
    if cotangent is not None:
        inputs, in_specs = (*inputs, cotangent), (*in_specs, by_token)

        def of_step(a):
            return pl.BlockSpec((1, 1, a.shape[-2], lanes), lambda b, t, c: (b, at(t), 0, c))

        def each(a):
            return jax.ShapeDtypeStruct((batch, steps, *a.shape[-2:]), a.dtype)

        out_specs = (out_specs, *(jax.tree.map(of_step, tree) for tree in (before, taps)))
        out_shape = (out_shape, *(jax.tree.map(each, tree) for tree in (before, taps)))
        scratch = [pltpu.VMEM((groups, SUBLANES, lanes), jnp.float32)]
    return pl.pallas_call(
        kernel,
        grid=(batch, steps, groups),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=target_platform() != "tpu",
        name=name,
    )(*inputs)
