"""`channel_decay.ChannelDecay` inside a TPU kernel, by shifts and whole products.

The idea is the same: a later half of tokens reads the earlier one through the border between them, at every level of
halving. Here a level masks rows of the whole chunk, so that arrays are cut at register boundaries only: sums of log
gates grow from level to level by shifts of whole blocks, and of a product with all tokens only the pairs on the two
sides of a border are kept. A chunk's tokens are padded to a power of two.
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
    """How much the gates of a chunk leave of every channel.

    log_gate: [tokens, channels], at least LOG_CUT, 0 at padding. visible: bool [tokens, tokens], whether token t is in
    the document of token i <= t; None where all tokens are in one document.
    """

    log_gate: jax.Array
    visible: jax.Array | None = None

    def since_start(self) -> jax.Array:
        """[tokens, channels]: what is left at each token of the state that the chunk, or its document, starts with."""
        if self.visible is not None:
            return jnp.exp(channel_decay.cumulative(self.log_gate, self.visible))
        return jnp.exp(self._sums[1][: len(self.log_gate)])

    def to_end(self) -> jax.Array:
        """[tokens, channels]: what is left of each token at the chunk's last token."""
        return jnp.exp(self._sums[2][: len(self.log_gate)])

    def whole(self) -> jax.Array:
        """[channels, 1]: what is left of the chunk's start state at its last token."""
        return self.since_start()[-SUBLANES:].T[:, -1:]

    def scores(self, xs, y: jax.Array, operand_dtype, steps: int = 1) -> list[jax.Array]:
        """For every x of xs: [t, i] = sum_c x_tc y_ic times what is left of token i in channel c at token t, else 0
        where token i is not visible.

        steps: inner steps of a token: only the first of every `steps` rows has log gates that are not 0.
        """
        tokens, readers, y = len(y), len(xs), recursive_blocks.padded(y)
        x = jnp.concatenate([recursive_blocks.padded(x) for x in xs])  # one product for all xs
        ungated = steps & -steps  # the largest power of two that divides steps: no gates inside it
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
        """[t, c] = sum_i scores_ti deltas_ic times what is left of token i in channel c at token t; scores are lower
        triangular."""
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
        """(levels, until, behind). until: log gates summed from the start of the chunk up to and including each token;
        behind: from behind each token to the chunk's end. A level is (tokens of a half, both sums within the half)."""
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
    """Whether t and i are in the same part of `size` tokens and t >= i, [times * tokens, tokens]: the rows of all t,
    repeated `times` times."""
    t, i = (jax.lax.broadcasted_iota(jnp.int32, (times * tokens, tokens), axis) for axis in (0, 1))
    t = t % tokens
    return (t // size == i // size) & (t >= i)


def across(tokens: int, half: int, times: int = 1) -> jax.Array:
    """Whether t and i are on the two sides of a border, t behind it: rows for the tokens t of `later`, repeated `times`
    times."""
    rows = tokens // 2 if whole_registers(half) else tokens
    t, i = (jax.lax.broadcasted_iota(jnp.int32, (times * rows, tokens), axis) for axis in (0, 1))
    t, part = t % rows, i // half
    if whole_registers(half):
        return part == t // half * 2
    return (t // half == part + 1) & (part % 2 == 0)


# Halves of whole registers are split at no cost, and only the later ones are computed. Smaller ones stay in place.


def whole_registers(half: int) -> bool:
    """Whether so many tokens fill whole registers."""
    return half % SUBLANES == 0


def later(x: jax.Array, half: int) -> jax.Array:
    """Rows of the later halves; all rows where halves do not fill whole registers."""
    if not whole_registers(half):
        return x
    return recursive_blocks.halves(recursive_blocks.to_blocks(half, x))[1].reshape(-1, x.shape[1])


def of_earlier(x: jax.Array, half: int) -> jax.Array:
    """All rows, those of later halves set to 0 where halves fill whole registers."""
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
