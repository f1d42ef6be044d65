"""The features of a memory's inputs in one TPU kernel: causal convolution, SiLU and unit norm, and their gradient.

XLA's programs for them read and write every number a dozen times. Here a step takes tokens of some whole heads and goes
through them in strips that stay in registers; the gradient is `jax.vjp` of the same strips, from the last to the first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from titans_jax import sharding
from titans_jax.layers.norms import L2_EPSILON
from titans_jax.ops.backend import current_backend
from titans_jax.ops.matmul import matmul, split_bfloat16
from titans_jax.ops.pallas_tpu import interpreted, largest_divisor
from titans_jax.ops.platform import LANES, SUBLANES

STRIP = 64
"""Tokens of a strip: with 128 channels, an intermediate value is 8 of the 64 registers."""
MOST_TOKENS = 1024
"""The most tokens of a step."""
BEFORE = 16
"""Rows of the step before that are read: a whole tile of bfloat16, and more than a convolution has taps."""


class FeatureOptions(NamedTuple):
    """What comes after the convolution. activation: SiLU. unit_norm: width of the parts that are brought to unit norm,
    None without norm. dtype: the dtype of activations. length: factor on these parts, their norm."""

    activation: bool
    unit_norm: int | None
    dtype: DTypeLike
    length: float = 1.0


class Taps(NamedTuple):
    """kernel: the convolution's [conv_size, channels], the newest tap first. history: what is added to the first tokens
    of a document, [conv_size - 1, channels]."""

    kernel: jax.Array
    history: jax.Array


class Inputs(NamedTuple):
    """Inputs of the kernels: x and the rows before it [b, t, channels], positions [b, t, LANES], and the taps."""

    x: jax.Array
    before: jax.Array
    positions: jax.Array
    taps: Taps


class Blocks(NamedTuple):
    """References to the parts of `Inputs` that a step takes. previous: rows of x before the step. same_head: 1 where
    two lanes are of one head, else 0, [lanes, lanes]; None without norm."""

    x: Any
    previous: Any
    before: Any
    positions: Any
    same_head: Any
    taps: Taps


def supports(options: FeatureOptions, time: int, channels: int, conv_size: int) -> bool:
    """Whether the kernel compiles for these shapes: whole strips of tokens, whole heads that fill registers, and taps
    that reach no farther back than one register."""
    on_device = channels // sharding.head_shards()
    fits = time % STRIP == 0 and on_device % _lanes(options.unit_norm) == 0 and 1 < conv_size <= SUBLANES
    return fits and current_backend().pallas


def features(options: FeatureOptions, x: jax.Array, tail: jax.Array, positions: jax.Array, taps: Taps) -> jax.Array:
    """x [b, t, channels] convolved, activated and normalised, in x's dtype; computed in float32.

    Args:
      tail: [b, conv_size - 1, channels], the rows before.
      positions: int32 [b, t], tokens since a document's start: a token sees none from before it.
    """
    # Compared with lags in registers: a column of numbers would have to be spread over lanes.
    positions = jnp.broadcast_to(jnp.minimum(positions, BEFORE).astype(jnp.bfloat16)[..., None], (*x.shape[:2], LANES))
    before = jnp.pad(tail, ((0, 0), (BEFORE - tail.shape[1], 0), (0, 0)))
    taps = jax.tree.map(lambda x: x.astype(jnp.float32), taps)
    rows = sharding.batch_axes(x.shape[0])
    by_channel = PartitionSpec(rows, None, sharding.HEADS)
    specs = Inputs(by_channel, by_channel, PartitionSpec(rows), PartitionSpec(None, sharding.HEADS))
    run = sharding.on_devices(functools.partial(_features, options), (specs,), by_channel)
    return run(Inputs(x, before, positions, taps))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _features(options: FeatureOptions, inputs: Inputs) -> jax.Array:
    return _run_forward(options, inputs)


def _features_forward(options: FeatureOptions, inputs: Inputs) -> tuple[jax.Array, Inputs]:
    return _run_forward(options, inputs), inputs


def _features_backward(options: FeatureOptions, inputs: Inputs, cotangent: jax.Array) -> tuple[Inputs]:
    d_x, d_before, d_taps = _run_backward(options, inputs, cotangent)
    return (Inputs(d_x, d_before, None, d_taps),)


_features.defvjp(_features_forward, _features_backward)


def _strip(
    options: FeatureOptions,
    same_head: jax.Array | None,
    positions: jax.Array,
    before: jax.Array,
    x: jax.Array,
    taps: Taps,
) -> jax.Array:
    """A strip of x [tokens, lanes] after `before` [8, lanes], float32; positions [tokens, lanes]."""
    rows = jnp.concatenate([before, x])
    y = 0
    for lag in reversed(range(1, len(taps.kernel))):
        past = taps.kernel[lag : lag + 1] * _shift_down(lag, rows)[len(before) :]
        y = jnp.where(positions >= lag, past + y, taps.history[lag - 1 : lag])
    y += taps.kernel[:1] * x
    # The sigmoid of SiLU as a hyperbolic tangent, which is one operation of a TPU.
    y = y * (0.5 * jnp.tanh(0.5 * y) + 0.5) if options.activation else y
    if same_head is None:
        return y
    return y * (options.length * jax.lax.rsqrt(_sum_over_head(jnp.square(y), same_head) + L2_EPSILON))


@jax.custom_vjp
def _sum_over_head(x: jax.Array, same_head: jax.Array) -> jax.Array:
    """At every lane of a row the sum over its head's lanes, by products with 0 and 1 of twice bfloat16's digits."""
    return sum(matmul(digits, same_head, same_head.dtype) for digits in split_bfloat16(x))


_sum_over_head.defvjp(
    lambda x, same_head: (_sum_over_head(x, same_head), same_head),
    lambda same_head, d: (_sum_over_head(d, same_head), None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shift_down(lag: int, rows: jax.Array) -> jax.Array:
    """Rows delayed by `lag`. The last rows wrap around to the front, where the caller cuts them off."""
    return jnp.roll(rows, lag, axis=0)


_shift_down.defvjp(lambda lag, rows: (_shift_down(lag, rows), None), lambda lag, _, d: (jnp.roll(d, -lag, axis=0),))


def _run_forward(options: FeatureOptions, inputs: Inputs) -> jax.Array:
    def kernel(blocks: Blocks, y: Any) -> None:
        _, tokens, lanes = blocks.x.shape
        rows = _rows_before(pl.program_id(1) == 0, blocks)
        same_head, taps = jax.tree.map(lambda ref: ref[...], (blocks.same_head, blocks.taps))
        for start in range(0, tokens, STRIP):
            now = pl.ds(start, STRIP)
            x = blocks.x[0, now].astype(rows.dtype)
            strip = _strip(options, same_head, _positions(blocks, now, lanes), rows, x, taps)
            y[0, now] = strip.astype(y.dtype)
            rows = x[-SUBLANES:]

    return _call(kernel, "features", options, inputs)


def _run_backward(options: FeatureOptions, inputs: Inputs, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, Taps]:
    """Cotangents of x, of the rows before and of the taps."""

    def kernel(blocks: Blocks, cotangent: Any, d_x: Any, d_before: Any, d_taps: Taps, later: Any) -> None:
        _, tokens, lanes = blocks.x.shape
        step, group = pl.program_id(1), pl.program_id(2)
        is_first = step == pl.num_programs(1) - 1
        same_head, taps = jax.tree.map(lambda ref: ref[...], (blocks.same_head, blocks.taps))
        d_later = jnp.where(step == 0, 0, later[group])
        d_total = jax.tree.map(jnp.zeros_like, taps)
        for start in reversed(range(0, tokens, STRIP)):
            now = pl.ds(start, STRIP)
            if start:
                rows = blocks.x[0, start - BEFORE : start].astype(d_later.dtype)[-SUBLANES:]
            else:
                rows = _rows_before(is_first, blocks)
            run = functools.partial(_strip, options, same_head, _positions(blocks, now, lanes))
            _, pull = jax.vjp(run, rows, blocks.x[0, now].astype(rows.dtype), taps)
            d_rows, d_strip, d = pull(cotangent[0, now].astype(rows.dtype))
            d_strip = jnp.concatenate([d_strip[:-SUBLANES], d_strip[-SUBLANES:] + d_later])
            d_x[0, now] = d_strip.astype(d_x.dtype)
            d_later, d_total = d_rows, jax.tree.map(jnp.add, d_total, d)
        later[group] = d_later
        d_before[0, 0] = jnp.concatenate([jnp.zeros_like(d_later), d_later]).astype(d_before.dtype)
        for ref, d in zip(d_taps, d_total, strict=True):
            ref[0, 0] = d

    d_x, d_before, d_taps = _call(kernel, "features_backward", options, inputs, cotangent)
    return d_x, d_before[:, 0], jax.tree.map(lambda d: jnp.sum(d, axis=(0, 1)), d_taps)


def _lanes(width: int | None) -> int:
    """Channels of a step, whole heads of `width` that fill registers."""
    return math.lcm(LANES, width or 1)


def _same_head(width: int | None) -> jax.Array | None:
    """`Blocks.same_head` for heads of `width`."""
    head = None if width is None else jnp.arange(_lanes(width), dtype=jnp.int32) // width
    return None if width is None else (head[:, None] == head[None]).astype(jnp.bfloat16)


def _rows_before(is_first: jax.Array, blocks: Blocks) -> jax.Array:
    """The 8 rows before a step, from before the sequence or from the step before, float32 [8, lanes]."""
    rows = jnp.where(is_first, blocks.before[0].astype(jnp.float32), blocks.previous[0].astype(jnp.float32))
    return rows[-SUBLANES:]


def _positions(blocks: Blocks, now: pl.Slice, lanes: int) -> jax.Array:
    """Positions of a strip of tokens, the same in every lane, float32 [tokens, lanes]."""
    return jnp.concatenate([blocks.positions[0, now].astype(jnp.float32)] * (lanes // LANES), axis=1)


def _call(
    kernel: Callable[..., None],
    name: str,
    options: FeatureOptions,
    inputs: Inputs,
    cotangent: jax.Array | None = None,
) -> Any:
    """Run a kernel over the grid (rows of the batch, tokens, channels): the forward one, or, with the output's
    cotangent, the backward one, which takes the last tokens first and gives cotangents of every step."""
    (x, before, positions, taps), width = inputs, options.unit_norm
    batch, time, channels = x.shape
    lanes, tokens = _lanes(width), STRIP * largest_divisor(time // STRIP, MOST_TOKENS // STRIP)
    steps, groups, same_head = time // tokens, channels // lanes, _same_head(width)
    at = (lambda t: t) if cotangent is None else (lambda t: steps - 1 - t)

    by_token = pl.BlockSpec((1, tokens, lanes), lambda b, t, c: (b, at(t), c))
    specs = Blocks(
        by_token,
        pl.BlockSpec((1, BEFORE, lanes), lambda b, t, c: (b, jnp.maximum(at(t) * (tokens // BEFORE) - 1, 0), c)),
        pl.BlockSpec((1, BEFORE, lanes), lambda b, t, c: (b, 0, c)),
        pl.BlockSpec((1, tokens, LANES), lambda b, t, c: (b, at(t), 0)),
        None if same_head is None else pl.BlockSpec(same_head.shape, lambda b, t, c: (0, 0)),
        jax.tree.map(lambda tap: pl.BlockSpec((len(tap), lanes), lambda b, t, c: (0, c)), taps),
    )
    operands, in_specs = (Blocks(x, x, before, positions, same_head, taps),), (specs,)
    out_specs, out_shape, scratch = by_token, jax.ShapeDtypeStruct(x.shape, x.dtype), []
    if cotangent is not None:
        operands, in_specs = (*operands, cotangent), (*in_specs, by_token)

        def step_spec(a: jax.Array) -> pl.BlockSpec:
            return pl.BlockSpec((1, 1, a.shape[-2], lanes), lambda b, t, c: (b, at(t), 0, c))

        def step_shape(a: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((batch, steps, *a.shape[-2:]), a.dtype)

        out_specs = (out_specs, *(jax.tree.map(step_spec, tree) for tree in (before, taps)))
        out_shape = (out_shape, *(jax.tree.map(step_shape, tree) for tree in (before, taps)))
        scratch = [pltpu.VMEM((groups, SUBLANES, lanes), jnp.float32)]
    return pl.pallas_call(
        kernel,
        grid=(batch, steps, groups),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpreted(),
        name=name,
    )(*operands)
