"""Log-linear attention (arXiv 2506.04761): a linear memory kept in parts, by how long ago they were written.

    y_t = sum_l scale_t,l q_t W_t,l ,   W_t,l what the tokens of level l have written

Level 0 is token t itself. Of the tokens before it, level l has those whose numbers, counted from the document's start,
differ from t in bit l - 1 and in no higher bit: the pieces that t's binary expansion cuts them into, each 1, 2, 4, ..
tokens long (a Fenwick tree). The last level also has all older tokens. A token does to every part what it does to a
memory (forgetting, the delta rule's erasing), so that with scales of 1 the sum is what the memory without levels reads.

A memory that starts from zero is linear in its values. So `memorize` itself computes how a block of tokens acts: on any
values, from its result for one-hot values, and on any memory, from its result for the identity, in any form and for all
blocks at once. What remains is a scan over blocks with a few products for all levels.

Shapes, one head of one sequence: t time, c tokens of a block, d head_dim, k levels without level 0.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from titans_jax.memory.gates import Gates
from titans_jax.memory.interface import memorize
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import Matrices, MemoryState, Params
from titans_jax.ops.matmul import matmul, matmul_three_pass

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


MOST_LEVELS = 31
"""The most levels: positions are int32."""


class Levels(NamedTuple):
    """A memory in parts. parts: what the tokens of levels 1 to k have written, [k, in, out], float32 (float64 when the
    inputs are). position: how many tokens of the document were read, int32 or a Python int."""

    parts: Float[Array, "k d d"]
    position: int | Int[Array, ""]

    @property
    def weights(self) -> Matrices:
        """The whole memory, the sum of its parts [.., k, in, out]."""
        return (jnp.sum(self.parts, axis=-3),)


class Block(NamedTuple):
    """How the tokens of a block act: they read q W + e V and leave p W + n V, for values V [c, d] and the memory before
    them W [d, d]. For tokens of a document that starts in the block, W is the memory that documents start with.

    q [c, d], e [c, c], p [d, d], n [d, c].
    """

    q: jax.Array
    e: jax.Array
    p: jax.Array
    n: jax.Array


def splits_into_levels(rule: MemoryRule) -> bool:
    """Whether the rule's memory starts from zero, is linear in its values, has one value a token and every token as a
    chunk, and carries no momentum or statistics."""
    algorithm = rule.algorithm
    plain = rule.architecture.linear and rule.bias.affine and rule.retention.linear and rule.chunk_size == 1
    alone = algorithm.steps == 1 and not algorithm.has_momentum and not algorithm.keeps_statistics
    return plain and alone and not rule.learned_start


def memorize_levels(
    rule: MemoryRule,
    params: Params,
    state: Levels,
    queries: Float[Array, "time head_dim"],
    keys: Float[Array, "time head_dim"],
    values: Float[Array, "time head_dim"],
    gates: Gates,
    scales: Float[Array, "time levels"],
    form: str = "auto",
    *,
    resets: Bool[Array, " time"] | None = None,
    positions: Int[Array, " time"] | None = None,
    start: Levels | None = None,
    rematerialised: bool = False,
) -> tuple[Float[Array, "time head_dim"], Levels]:
    """Write every token and read after each write, with every level weighted by its scale.

    rule, params, queries, keys, values, gates, form, rematerialised: as in `memorize`, for a rule that
      `splits_into_levels`, without channel-wise gates of the values.
    scales: of the levels 0 to k, [time, k + 1].
    resets: bool [time], True at a document's first token, before which the state becomes `start` (None: empty, at
      position 0).
    positions: int32 [time], how many tokens of its document are before each, those of `start` included; None, for
      tokens without resets, counts on from the state's position.

    Returns (reads [time, head_dim] in the state's dtype, state after the last token). Splitting a sequence anywhere and
    passing the state on changes nothing.
    """
    time, head_dim = queries.shape
    if positions is None:
        positions = state.position + jnp.arange(time, dtype=jnp.int32)
    dtype = queries.dtype

    def step(state: Levels, block: tuple) -> tuple[Levels, jax.Array]:
        return _read_and_write(state, start, *block, dtype)

    step = jax.checkpoint(step, prevent_cse=False)
    state = Levels(state.parts, jnp.asarray(state.position, jnp.int32))
    tokens, reads = (queries, keys, values, gates, resets), []
    whole = time // head_dim * head_dim
    for first, last in ((0, whole), (whole, time)):
        if first == last:
            continue
        size = min(head_dim, last - first)
        cut = functools.partial(_in_blocks, first=first, last=last, size=size)
        blocks = jax.vmap(lambda *tokens: _block(rule, params, *tokens, form, rematerialised))(*map(cut, tokens))
        others = (values, resets, scales, positions)
        state, found = jax.lax.scan(step, state, (blocks, *map(cut, others)))
        reads.append(found.reshape(last - first, head_dim))
    return jnp.concatenate(reads), state


def _in_blocks(leaves: Any, first: int, last: int, size: int) -> Any:
    """Tokens first to last - 1 of arrays [time, ...] as [blocks, size, ...]."""
    return jax.tree.map(lambda leaf: leaf[first:last].reshape(-1, size, *leaf.shape[1:]), leaves)


def _block(
    rule: MemoryRule,
    params: Params,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    gates: Gates,
    resets: jax.Array | None,
    form: str,
    rematerialised: bool,
) -> Block:
    """How these tokens act, at most head_dim of them, whatever their values are."""
    tokens, head_dim = values.shape
    dtype = params["weights"][0].dtype

    def run(weight: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = MemoryState((weight,), (), (weight,), 0)
        options = {"resets": resets, "initial_state": state, "return_anchor": False, "rematerialised": rematerialised}
        reads, after = memorize(rule, params, state, queries, keys, values, gates, form, **options)
        return reads, after.weights[0]

    one_hot, none = jnp.eye(tokens, head_dim, dtype=values.dtype), jnp.zeros((head_dim, head_dim), dtype)
    weights, asked = (none, jnp.eye(head_dim, dtype=dtype)), (one_hot, jnp.zeros_like(one_hot))
    (e, q), (n, p) = jax.vmap(run)(jnp.stack(weights), jnp.stack(asked))
    return Block(q, e[:, :tokens], p, n[:, :tokens])


def _read_and_write(
    state: Levels,
    start: Levels | None,
    block: Block,
    values: jax.Array,
    resets: jax.Array | None,
    scales: jax.Array,
    positions: jax.Array,
    operand_dtype: Any,
) -> tuple[Levels, jax.Array]:
    """Reads [c, d] of a block's tokens, and the state after them."""
    count = len(state.parts)
    level = jnp.arange(1, count + 1, dtype=jnp.int32)[:, None]
    levels = jnp.minimum(first_difference(positions[:, None], positions[None]), count)
    reads = matmul(block.e * _scale_of(scales, levels), values, operand_dtype)

    def of_parts(before: Levels) -> jax.Array:
        # For later tokens than the parts were cut for, a part belongs to the same level or to a higher one.
        seen = jnp.minimum(jnp.maximum(level, first_difference(positions, before.position)[None]), count)
        return jnp.sum(matmul(block.q[None], before.parts, operand_dtype) * _scale_of(scales, seen.T).T[..., None], 0)

    before = state
    if resets is None:
        reads += of_parts(state)
    else:
        inside = jnp.cumsum(resets) > 0
        reads += jnp.where(inside[:, None], 0 if start is None else of_parts(start), of_parts(state))
        first = Levels(jnp.zeros_like(state.parts), 0) if start is None else start
        before = jax.tree.map(lambda new, old: jnp.where(inside[-1], new, old), first, state)
    now = positions[-1] + 1
    # Three passes: rounding the state in every block would be a kind of forgetting.
    parts = matmul_three_pass(block.p[None], before.parts, operand_dtype)
    last, level = jnp.minimum(first_difference(now, before.position), count), level[..., None]
    joined = jnp.sum(jnp.where(level <= last, parts, 0), axis=0, keepdims=True)
    parts = jnp.where(level < last, 0, jnp.where(level == last, joined, parts))
    written = jnp.minimum(first_difference(positions, now), count)[None, :, None] == level
    parts += matmul(block.n[None], jnp.where(written, values[None], 0), operand_dtype)
    return Levels(parts, now), reads


def first_difference(one: jax.Array, other: jax.Array | int) -> jax.Array:
    """The highest bit in which two int32 numbers of 0 or more differ, the lowest bit being 1; 0 if they are equal."""
    return 32 - jax.lax.clz(jnp.asarray(one ^ other, jnp.int32))


def _scale_of(scales: jax.Array, levels: jax.Array) -> jax.Array:
    """scales[t, levels[t, ..]], from scales [c, levels] and levels [c, any]: there are few, so this needs no gather."""
    found = jnp.zeros(levels.shape, scales.dtype)
    for level in range(scales.shape[1]):
        found = jnp.where(levels == level, scales[:, level, None], found)
    return found
