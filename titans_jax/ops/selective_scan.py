"""The selective scan of Mamba (S6): a linear recurrence in which every entry of the state forgets at its own rate.

    h_t = exp(step_t a) h_{t-1} + step_t b_t x_t ,   y_t = c_t h_t

(arXiv 2312.00752, equation 2 and algorithm 2; what is written is step_t b_t x_t, as in its public code, where the
paper's equation 4 has the exact integral.) The state of a channel is a row of numbers that are written and read with
one b and c for all channels. Tokens are taken in chunks, each rematerialised from its start, so that the gradient keeps
one state per chunk and never those of all tokens.

Shapes: b batch, t time, c channels, n entries of a channel's state. Channels come last, where they fill lanes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from titans_jax.ops.matmul import wide_dtype

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

CHUNK = 64
"""The most tokens of a chunk. It changes no number beyond rounding."""


class Tokens(NamedTuple):
    """What the recurrence takes of one token, or of several with an axis of time: x, step [b, (t,) c]; write, read (b
    and c of the equation) [b, (t,) n]; reset: bool [b, (t)], or None."""

    x: jax.Array
    step: jax.Array
    write: jax.Array
    read: jax.Array
    reset: jax.Array | None


def selective_scan(
    x: Float[Array, "b t c"],
    step: Float[Array, "b t c"],
    a: Float[Array, "n c"],
    b: Float[Array, "b t n"],
    c: Float[Array, "b t n"],
    state: Float[Array, "b n c"],
    resets: Bool[Array, "b t"] | None = None,
    *,
    parallel: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The outputs y [b, t, c] in x's dtype, and the state [b, n, c] after the last token.

    Any length, and any split of a sequence into calls that pass the state on, to rounding; an output depends on no
    later token, to the last bit. Computed in float32 (float64 for float64).

    Args:
      step: at least 0. A token with a step of 0, such as padding, leaves the state as it is.
      a: at most 0.
      state: before the first token, in the dtype that is computed in.
      resets: tokens before which the state is set to 0: the first ones of packed documents.
      parallel: take the tokens of a chunk by a parallel scan; else one after the other, faster on a CPU.
    """
    time, dtype = x.shape[1], wide_dtype(x.dtype)
    tokens, a = Tokens(x, step, b, c, resets), a.astype(dtype)
    run = functools.partial(_chunk_in_parallel if parallel and time > 1 else _chunk_in_order, a)
    count = -(-time // CHUNK)
    size = -(-time // count)

    def cut(leaf: jax.Array) -> jax.Array:
        """[b, t, ...] to chunks [count, b, size, ...], whose last ones may end with steps of 0."""
        padded = jnp.pad(leaf, ((0, 0), (0, count * size - time), *((0, 0),) * (leaf.ndim - 2)))
        return jnp.moveaxis(padded.reshape(-1, count, size, *leaf.shape[2:]), 1, 0)

    def chunk(state: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        state, y = run(state, tokens)
        return state, y.astype(x.dtype)

    state, y = jax.lax.scan(jax.checkpoint(chunk, prevent_cse=False), state, jax.tree.map(cut, tokens))
    return jnp.moveaxis(y, 0, 1).reshape(-1, count * size, x.shape[2])[:, :time], state


def _chunk_in_parallel(a: jax.Array, state: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """The state after a chunk, and its outputs [b, t, c]: what is left of the start, and what is written since, at
    every token by a parallel scan."""

    def join(earlier: tuple[jax.Array, jax.Array], later: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return earlier[0] * later[0], later[0] * earlier[1] + later[1]

    left, written = jax.lax.associative_scan(join, _decay_and_write(a, tokens), axis=1)
    states = left * state[:, None] + written
    return states[:, -1], _outputs(states, tokens)


def _chunk_in_order(a: jax.Array, state: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """`_chunk_in_parallel` token by token."""

    def one(state: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
        decay, write = _decay_and_write(a, token)
        state = decay * state + write
        return state, _outputs(state, token)

    state, y = jax.lax.scan(one, state, jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), tokens))
    return state, jnp.moveaxis(y, 0, 1)


def _decay_and_write(a: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """What a token leaves of the state, and what it adds to it, [b, (t,) n, c]."""
    x, step, write = (leaf.astype(a.dtype) for leaf in (tokens.x, tokens.step, tokens.write))
    decay = jnp.exp(step[..., None, :] * jnp.expand_dims(a, tuple(range(step.ndim - 1))))
    if tokens.reset is not None:
        decay = jnp.where(tokens.reset[..., None, None], 0, decay)
    return decay, (step * x)[..., None, :] * write[..., None]


def _outputs(states: jax.Array, tokens: Tokens) -> jax.Array:
    """Reads [b, (t,) c] of states [b, (t,) n, c]."""
    return jnp.sum(tokens.read.astype(states.dtype)[..., None] * states, axis=-2)
