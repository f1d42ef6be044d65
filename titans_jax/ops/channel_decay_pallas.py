"""`channel_decay.ChannelDecay` inside a TPU kernel, by shifts and whole products.

The idea is the same: a later half of tokens reads the earlier one through the border between them, at every level of
halving. Here a level is masked rows of the whole chunk, so that nothing is cut but at registers: sums of log
gates grow from level to level by shifts of whole blocks, and of a product with all tokens the pairs on two sides of a
border are kept. Tokens of a chunk are padded to a power of two.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from titans_jax.ops import channel_decay, recursive_blocks
from titans_jax.ops.matmul import inner_products, matmul
from titans_jax.ops.platform import SUBLANES


@dataclasses.dataclass(frozen=True)
class ChannelDecay:
    """What log gates [tokens, channels] of a chunk, at least LOG_CUT and 0 at padding, leave of every channel.

    visible: bool [tokens, tokens], whether token t is in the document of i <= t; None where all are in one.
    """

    log_gate: jax.Array
    visible: jax.Array | None = None

    def since_start(self) -> jax.Array:
        """[tokens, channels]: of what the chunk, or in it the token's document, starts with, at each token."""
        if self.visible is not None:
            return jnp.exp(channel_decay.cumulative(self.log_gate, self.visible))
        return jnp.exp(self._sums[1][: len(self.log_gate)])

    def to_end(self) -> jax.Array:
        """[tokens, channels]: of each token, at the chunk's last."""
        return jnp.exp(self._sums[2][: len(self.log_gate)])

    def whole(self) -> jax.Array:
        """[channels, 1]: of the chunk's start, at its last token."""
        return self.since_start()[-SUBLANES:].T[:, -1:]

    def scores(self, xs, y: jax.Array, operand_dtype, steps: int = 1) -> list[jax.Array]:
        """[t, i] = sum_c x_tc y_ic times what is left of token i in channel c at token t, if visible, of every x.

        steps: only the first of every so many tokens has gates that are not 0.
        """
        tokens, readers, y = len(y), len(xs), recursive_blocks.padded(y)
        x = jnp.concatenate([recursive_blocks.padded(x) for x in xs])  # one product of all readers
        ungated = steps & -steps  # a power of two that divides them: so many tokens have no gates between them
        scores = jnp.where(inside(len(y), ungated, readers), inner_products(x, y, operand_dtype), 0)
        for half, until, behind in self._sums[0]:
            if half >= ungated:
                fading = jnp.concatenate([jnp.exp(later(until, half))] * readers)
                faded = of_earlier(y * jnp.exp(behind), half)
                past = inner_products(later(x, half) * fading, faded, operand_dtype)
                scores = add_to_later(scores, jnp.where(across(len(y), half, readers), past, 0), half)
        found = [of_x[:tokens, :tokens] for of_x in jnp.split(scores, readers)]
        return found if self.visible is None else [jnp.where(self.visible, of_x, 0) for of_x in found]

    def mix(self, scores: jax.Array, deltas: jax.Array, operand_dtype) -> jax.Array:
        """[t, c] = sum_i scores_ti deltas_ic times what is left of token i there; scores lower triangular."""
        tokens, deltas, scores = len(deltas), recursive_blocks.padded(deltas), recursive_blocks.padded(scores, 2)

        def read(where, scores, deltas):
            return matmul(jnp.where(where, scores, 0), deltas, operand_dtype)

        mixed = read(inside(len(deltas), 1), scores, deltas)
        for half, until, behind in self._sums[0]:
            faded = of_earlier(deltas * jnp.exp(behind), half)
            past = read(across(len(deltas), half), later(scores, half), faded)
            mixed = add_to_later(mixed, past * jnp.exp(later(until, half)), half)
        return mixed[:tokens]

    @functools.cached_property
    def _sums(self):
        """Per level (tokens of a half; log gates summed from the border behind which a token's half begins until the
        token; those behind the token until its half ends), and the latter two of the whole chunk."""
        until = recursive_blocks.padded(self.log_gate)
        behind, half, levels = jnp.zeros_like(until), 1, []
        row = jax.lax.broadcasted_iota(jnp.int32, until.shape, 0)
        while half < len(until):
            levels.append((half, until, behind))
            both, is_late = until + behind, row // half % 2 == 1
            until += jnp.where(is_late, jnp.roll(both, half, axis=0), 0)
            behind += jnp.where(is_late, 0, jnp.roll(both, -half, axis=0))
            half *= 2
        return levels, until, behind


def inside(tokens: int, size: int, times: int = 1) -> jax.Array:
    """Whether t, i are in the same part of so many tokens, t not before i; the rows of all t so many times."""
    t, i = (jax.lax.broadcasted_iota(jnp.int32, (times * tokens, tokens), axis) for axis in (0, 1))
    t = t % tokens
    return (t // size == i // size) & (t >= i)


def across(tokens: int, half: int, times: int = 1) -> jax.Array:
    """Whether t, i are on two sides of a border, t behind it; the rows of `later` tokens t so many times."""
    rows = tokens // 2 if whole_registers(half) else tokens
    t, i = (jax.lax.broadcasted_iota(jnp.int32, (times * rows, tokens), axis) for axis in (0, 1))
    t, part = t % rows, i // half
    if whole_registers(half):
        return part == t // half * 2
    return (t // half == part + 1) & (part % 2 == 0)


# Halves of whole registers are taken apart for nothing, and only the later ones read. Smaller ones stay where they are.


def whole_registers(half: int) -> bool:
    return half % SUBLANES == 0


def later(x: jax.Array, half: int) -> jax.Array:
    """Rows of the later halves, or all."""
    if not whole_registers(half):
        return x
    return recursive_blocks.halves(recursive_blocks.to_blocks(half, x))[1].reshape(-1, x.shape[1])


def of_earlier(x: jax.Array, half: int) -> jax.Array:
    """All rows, 0 in later halves that are taken apart."""
    if not whole_registers(half):
        return x
    earlier, _ = recursive_blocks.halves(recursive_blocks.to_blocks(half, x))
    return recursive_blocks.merge(earlier, jnp.zeros_like(earlier)).reshape(x.shape)


def add_to_later(x: jax.Array, more: jax.Array, half: int) -> jax.Array:
    """`more` added to the rows that `later` takes."""
    if not whole_registers(half):
        return x + more
    earlier, late = recursive_blocks.halves(recursive_blocks.to_blocks(half, x))
    return recursive_blocks.merge(earlier, late + more.reshape(late.shape)).reshape(x.shape)
