"""Memora's lag token: the first token of a chunk takes the non-linear step, the rest are linear around it (papers 3.6).

With `retentions.lagged_kullback_leibler` the carried matrices are the weights; both parallel forms take the first token
by itself, as the recurrent form does, and run the rest of the chunk as any other, from the anchor it left.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from titans_jax.memory.forms import intra_chunk, recurrent
from titans_jax.memory.forms.inner_gradient import read, readable_weights
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, select_state


def first_token(block):
    """`block` of one chunk (see `grid.memorize_blocks`) behind the chunk's first token."""

    def memorize_chunk(rule: MemoryRule, params, start: MemoryState, initial: MemoryState, inputs):
        queries, keys, values, gates, resets, _ = inputs
        if resets is not None:
            start = select_state(resets[0], initial, start)
        start = dataclasses.replace(start, position=jnp.zeros((), jnp.int32))
        gate = jax.tree.map(lambda x: x[0], gates)
        after, surprise = recurrent.write(rule, params, start, keys[:1], values[:1], gate)
        if gates.mask is not None:
            after = select_state(gates.mask[0], after, start)
        reads = read(rule, params, readable_weights(rule, params, after), queries[:1])
        if len(keys) == 1:
            return (after.weights, after.momentum, after.anchor), reads, surprise
        rest = jax.tree.map(lambda x: x[1:], (queries, keys, values, gates))
        weighings = jax.tree.map(lambda x: x[0], intra_chunk.of_blocks(jax.tree.map(lambda x: x[None], rest[-1])))
        end, *following = block(rule, params, after, initial, (*rest, None, weighings))
        reads, surprise = jax.tree.map(lambda *x: jnp.concatenate(x), (reads, surprise), tuple(following))
        return end, reads, surprise

    return memorize_chunk
