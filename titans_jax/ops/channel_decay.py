"""Channel-wise decay: sums over past tokens in which every channel forgets at its own rate.

See memory/README.md, Channel-wise retention; `channel_decay_pallas` is the same inside a TPU kernel.

The share of token i that is left at token t is exp of the sum of the log gates from i + 1 to t. Split into two factors
at the first token, one of them overflows (0.5^-64); split at a token between i and t, both are at most 1. So a later
half of tokens reads the earlier one through the border between them, exactly and by a matrix product, at every level of
`recursive_blocks`. Sums of log gates are matrix products too, with a 0/1 matrix: nothing is subtracted.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from titans_jax.ops import matmul, recursive_blocks
from titans_jax.ops.matmul import inner_products

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

LOG_CUT = -30.0
"""A scalar gate below exp(-30), about 1e-13, is a cut: nothing from before it survives. Products across a cut are
exactly 0, and those on either side keep full precision because the cut never enters a cumulative sum, where -inf would
make later differences NaN and -87 would cost them digits. Channel-wise gates are clipped here instead (`clipped`)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChannelDecay:
    """How much the gates of a block leave of every channel.

    log_gate: [tokens, channels], at least LOG_CUT, 0 at padding. visible: bool [tokens, tokens], whether token t is in
    the document of token i <= t; None where all tokens are in one document. Products are in the dtype of the arrays
    given, whatever operand_dtype is, which a kernel's take.
    """

    log_gate: Float[Array, "*blocks tokens channels"]
    visible: Bool[Array, "tokens tokens"] | None = None
    broadcast_column = staticmethod(matmul.broadcast_column)

    def since_start(self) -> jax.Array:
        """[tokens, channels]: what is left at each token of the state that the block, or its document, starts with."""
        return jnp.exp(cumulative(self.log_gate, self.visible))

    def to_end(self) -> jax.Array:
        """[tokens, channels]: what is left of each token at the block's last token."""
        ones = jnp.ones((len(self.log_gate), len(self.log_gate)), bool)
        return jnp.exp(cumulative(self.log_gate, jnp.triu(ones, 1)))

    def whole(self) -> jax.Array:
        """[channels, 1]: what is left of the block's start state at its last token."""
        return self.since_start()[-1:].T

    def scores(self, xs, y: jax.Array, operand_dtype, steps: int = 1) -> list[jax.Array]:
        """For every x of xs: [t, i] = sum_c x_tc y_ic times what is left of token i in channel c at token t, else 0
        where token i is not visible.

        steps: inner steps of a token: only the first of every `steps` rows has log gates that are not 0.
        """
        visible = jnp.tri(len(y), dtype=bool) if self.visible is None else self.visible
        if self.log_gate.shape[1] == 1:
            K = self.broadcast_column(cumulative(self.log_gate), len(self.log_gate))
            decay = jnp.exp(jnp.where(visible, K - K.T, -jnp.inf))
            return [inner_products(x, y, x.dtype) * decay for x in xs]
        return decayed_scores(xs, y, self.log_gate, visible, steps)

    def mix(self, scores: jax.Array, deltas: jax.Array, operand_dtype) -> jax.Array:
        """[t, c] = sum_i scores_ti deltas_ic times what is left of token i in channel c at token t; scores are lower
        triangular."""
        return decayed_mix(scores, deltas, self.log_gate, self.broadcast_column)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChannelDecayByProducts(ChannelDecay):
    """`ChannelDecay` with columns broadcast by matrix products, whose gradients are faster on a CPU."""

    broadcast_column = staticmethod(matmul.broadcast_column_by_product)


def clipped(
    log_gate: Float[Array, "tokens channels"], mask: Bool[Array, " tokens"] | None = None
) -> Float[Array, "tokens channels"]:
    """Log gates [tokens, channels], at least LOG_CUT, 0 at padding."""
    log_gate = jnp.maximum(log_gate, LOG_CUT)
    return log_gate if mask is None else jnp.where(mask[:, None], log_gate, 0)


def cumulative(
    log_gate: Float[Array, "tokens channels"], visible: Bool[Array, "tokens tokens"] | None = None
) -> Float[Array, "tokens channels"]:
    """K [tokens, channels]: the sum of log gates up to and including each token, of all or of the visible tokens."""
    until = jnp.tril(jnp.ones((len(log_gate), len(log_gate)), bool)) if visible is None else visible
    return jnp.matmul(until.astype(log_gate.dtype), log_gate, precision="highest")


def decayed_scores(xs, y: jax.Array, log_gate: jax.Array, visible: jax.Array, steps: int) -> list[jax.Array]:
    """For every x: [t, i] = sum_c x_tc y_ic exp(log_gate_{i+1,c} + ... + log_gate_{t,c}) where visible[t, i], else 0.

    xs, y, log_gate: [tokens, channels]; visible: bool, lower triangular; steps: see `ChannelDecay.scores`.
    """
    steps = steps if len(y) % steps == 0 else 1
    part = jnp.arange(len(y), dtype=jnp.int32)[None] // steps
    # No gate lies between a token and itself, nor between the inner steps of one token.
    near = [jnp.where(part.T == part, inner_products(x, y, x.dtype), 0) for x in xs]
    tokens, xs, y = len(y), [to_parts(x, steps) for x in xs], to_parts(y, steps)
    scores = [jnp.zeros((len(y), steps, steps), y.dtype) for _ in xs]
    for until, after in to_borders(jnp.concatenate([to_parts(log_gate, steps)[:, :1]] * steps, axis=1)):
        early, late = recursive_blocks.halves(y)
        faded, fading = early * jnp.exp(after), jnp.exp(until)
        # Merged again, though the rows are the same: gradients then add up level by level, not as slices of all levels.
        y = recursive_blocks.merge(early, late)
        for reader, x in enumerate(xs):
            early, late = recursive_blocks.halves(x)
            across = jnp.einsum("ntc,nic->nti", late * fading, faded, precision="highest")
            scores[reader] = recursive_blocks.join(scores[reader], across)
            xs[reader] = recursive_blocks.merge(early, late)
    scores = [own + past[0, :tokens, :tokens] for own, past in zip(near, scores, strict=True)]
    return [jnp.where(visible, of_x, 0) for of_x in scores]


def decayed_mix(scores: jax.Array, deltas: jax.Array, log_gate: jax.Array, broadcast_column) -> jax.Array:
    """[t, o] = sum_i scores_ti deltas_io exp(log_gate_{i+1,o} + ... + log_gate_{t,o}); scores lower triangular."""
    tokens, deltas = len(deltas), to_parts(deltas)
    diagonal, squares = recursive_blocks.squares(recursive_blocks.padded(scores, 2))
    mixed = broadcast_column(diagonal[:, None], deltas.shape[2])[:, None] * deltas
    for (until, after), across in zip(to_borders(to_parts(log_gate)), squares, strict=True):
        early, late = recursive_blocks.halves(deltas)
        read = jnp.einsum("nti,nio->nto", across, early * jnp.exp(after), precision="highest") * jnp.exp(until)
        deltas = recursive_blocks.merge(early, late)
        early, late = recursive_blocks.halves(mixed)
        mixed = recursive_blocks.merge(early, late + read)
    return mixed[0, :tokens]


def to_borders(until: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Per level, the sums of log gates between each token and the border between the halves of its part, [parts, half,
    channels]: in the later half from the border to the token, in the earlier half from behind the token to the border.

    until: cumulative sums inside the smallest parts, of which only the first token has a gate, [parts, size, channels].
    """
    after, sums = jnp.zeros_like(until), []
    while len(until) > 1:
        (early_until, until), (after, late_after) = recursive_blocks.halves(until), recursive_blocks.halves(after)
        sums.append((until, after))
        after = recursive_blocks.merge(after + until[:, -1:], late_after)
        until = recursive_blocks.merge(early_until, until + early_until[:, -1:])
    return sums


def to_parts(x: jax.Array, size: int = 1) -> jax.Array:
    """[tokens, channels] as [parts, size, channels], with zeros appended up to a power of two of parts."""
    return recursive_blocks.padded(x.reshape(-1, size, x.shape[1]))
