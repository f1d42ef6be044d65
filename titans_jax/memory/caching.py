"""Memory Caching (arXiv 2602.24281): a memory that is read together with copies of it kept at earlier segments' ends.

The equations are taken from secondary notes of the paper that agree, not from its text (memory/later_models.md, Memory
Caching). In the s-th segment token t is answered by the memories M(i) that were kept at the ends of the segments before
its own, and by the running memory M_t(s):

    residual    y_t = M_t(s)(q_t) + sum_{i<s} M(i)(q_t)                                        eq 7
    gated       y_t = g_t(s) M_t(s)(q_t) + sum_{i<s} g_t(i) M(i)(q_t)                          eq 9
                g_t = softmax over i <= s of <u_t, mean of segment i>                          eq 10
    soup        the same for weights: the memory with the weights sum_i g_t(i) W(i), read once   eq 14-15
    sparse      gated, with the k kept memories of the largest <u, mean of segment i>          eq 16-17

An aggregation is a class that computes each memory's share of an answer; adding one touches nothing else. The reads
are pure functions on arrays, one head of one sequence; callers vmap over batch and heads. Which kept memories a token
reads, all of them or logarithmically many, is decided in cache_segments.py.

Shapes: t tokens, d head_dim, n kept memories.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from titans_jax.memory.cache_segments import Levels
from titans_jax.memory.forms.inner_gradient import read, split_columns
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import Matrices, Params
from titans_jax.ops.matmul import matmul, to_state_dtype
from titans_jax.ops.recursive_blocks import to_blocks
from titans_jax.registry import Registry

AGGREGATIONS: Registry[Callable[..., Aggregation]] = Registry("aggregation of caches")
"""Ways to read several memories together, by name."""

register_aggregation = AGGREGATIONS.register


@dataclasses.dataclass(frozen=True)
class Aggregation(abc.ABC):
    """How large a share each memory has in an answer. An aggregation declares:

    scored: shares are computed from scores, for which the layer learns a projection. of_weights: the kept memories'
    weights are averaged, not their answers. most: the most kept memories that can have a share; None: all.
    """

    scored = False
    of_weights = False
    most: ClassVar[int | None] = None

    @abc.abstractmethod
    def shares(self, scores: jax.Array, opening: jax.Array, visible: jax.Array) -> jax.Array:
        """Shares [..., t, n + 1], 0 where not visible; the last column is the running memory's.

        Args:
          scores: <u_t, mean of the segment> [..., t, n + 1]; zeros where the aggregation is not scored.
          opening: the scores that the first token of t's chunk gives to the kept memories, [..., t, n].
          visible: bool [..., t, n + 1], which memories may answer a token; the running one always may.
        """


@register_aggregation()
@dataclasses.dataclass(frozen=True)
class Residual(Aggregation):
    """The sum of all answers (eq 7)."""

    def shares(self, scores: jax.Array, opening: jax.Array, visible: jax.Array) -> jax.Array:
        return visible.astype(scores.dtype)


@register_aggregation()
@dataclasses.dataclass(frozen=True)
class Average(Aggregation):
    """A soup of equal shares, which has no parameters: for a model that was trained without caches."""

    of_weights = True

    def shares(self, scores: jax.Array, opening: jax.Array, visible: jax.Array) -> jax.Array:
        equal = visible.astype(scores.dtype)
        return equal / jnp.sum(equal, axis=-1, keepdims=True)


@register_aggregation()
@dataclasses.dataclass(frozen=True)
class Gated(Aggregation):
    """Answers averaged by a softmax of scores (eq 9-10)."""

    scored = True

    def shares(self, scores: jax.Array, opening: jax.Array, visible: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)


@register_aggregation()
@dataclasses.dataclass(frozen=True)
class Soup(Gated):
    """Weights averaged by a softmax of scores (eq 14-15); for a linear memory the same as `gated`."""

    of_weights = True


@register_aggregation()
@dataclasses.dataclass(frozen=True)
class Sparse(Gated):
    """`Gated` with only the k kept memories of the best scores, and the running one (eq 16-17).

    They are chosen once a chunk, by its first token, so that a block of queries reads the same memories: a deviation.
    The paper chooses them token by token, which is the same where every token is a chunk.

    Raises ValueError for a k that is no integer of 1 or more.
    """

    k: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k is {self.k!r}: use a whole number of 1 or more, for example 4.")

    @property
    def most(self) -> int:
        return self.k

    def shares(self, scores: jax.Array, opening: jax.Array, visible: jax.Array) -> jax.Array:
        kept = opening.shape[-1]
        if kept > self.k:
            best = jax.lax.top_k(jnp.where(visible[..., :-1], opening, -jnp.inf), self.k)[1]
            chosen = jnp.any(jax.nn.one_hot(best, kept, dtype=bool), axis=-2)
            visible = visible & jnp.concatenate([chosen, jnp.ones_like(visible[..., -1:])], axis=-1)
        return super().shares(scores, opening, visible)


def read_together(
    aggregation: Aggregation,
    rule: MemoryRule,
    params: Params,
    kept: Matrices,
    shares: jax.Array,
    queries: jax.Array,
    running: jax.Array,
    segment: int | None = None,
    levels: Levels | None = None,
) -> jax.Array:
    """The answers of kept memories and of the running one together, [t, d] in the state's dtype.

    No form computes the running memory's weights for every token. So where weights are averaged, only those of the kept
    memories are, and the running memory's answer is added with its share: a deviation, except for linear memories,
    where both agree.

    Args:
      kept: fast weights as they are read, [n, in, out] of every fast matrix.
      shares: [t, n + 1], the last those of the running memory.
      queries: [t, d]; their dtype is that of operands.
      running: the running memory's reads, [t, d].
      segment: tokens of a segment, where the queries are a whole row and `kept` holds the memories at the ends of the
        row's own segments: then a token reads only those before its own segment; its other shares must be 0. None: all
        are read.
      levels: which kept memories the segments of these queries read, where they read one of each level, not all before.
    """
    past, now = shares[:, :-1], shares[:, -1:]
    if not aggregation.of_weights:
        answer = functools.partial(read, rule, params)
        return now * running + sum_over_kept(answer, kept, queries, past, segment, levels)
    left = jnp.sum(past, axis=1, keepdims=True)
    past = past / jnp.where(left > 0, left, 1)
    product = lambda matrix, rows: matmul(rows, matrix, queries.dtype)  # noqa: E731

    def linears(parts: int) -> list[Callable[[int, jax.Array], jax.Array]]:
        return [
            lambda i, x, cut=cut: sum_over_kept(product, cut[i], x, past, segment, levels)
            for cut in split_columns(kept, parts)
        ]

    soup = rule.algorithm.read(rule.architecture, linears, params, to_state_dtype(queries))
    return now * running + left * soup


def sum_over_kept(
    function: Callable[[Any, jax.Array], jax.Array],
    kept: Any,
    rows: jax.Array,
    shares: jax.Array,
    segment: int | None = None,
    levels: Levels | None = None,
) -> jax.Array:
    """sum_i shares[t, i] function(kept_i, rows)_t, [t, ...], of rows [t, ...], kept [n, ...] and shares [t, n].

    segment, levels: as in `read_together`. No read of a later memory is computed only to be dropped.
    """
    if segment is None:
        return _weighted_sum(function, kept, rows, shares)
    if levels is not None:
        return _sum_over_levels(function, kept, rows, shares, segment, levels)
    return _sum_over_earlier(function, kept, rows, shares, segment)


def _sum_over_earlier(
    function: Callable[[Any, jax.Array], jax.Array], kept: Any, rows: jax.Array, shares: jax.Array, segment: int
) -> jax.Array:
    """`sum_over_kept` where a segment reads all memories before it. Of n segments the p-th and the p-th from the end
    read n - 1 memories together: a place of n / 2 for each such pair, and in every turn each place reads one memory,
    the later segment's 0, 1, .. and then the earlier one's in reverse, so that a turn has but two memories."""
    count = -(-len(rows) // segment)
    count += count % 2
    half, turns = count // 2, count - 1

    def pairs(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        blocks = to_blocks(segment, _fit(x, count * segment))
        return blocks[:half], blocks[half:][::-1]

    early, late = pairs(rows)
    place, turn = jnp.arange(half, dtype=jnp.int32), jnp.arange(turns, dtype=jnp.int32)
    is_late = place[None] < turns - turn[:, None]
    kept = jax.tree.map(lambda x: _fit(x, turns), kept)
    share_early, share_late = (jnp.moveaxis(x, -1, 0) for x in pairs(_fit(shares.T, turns).T))
    share = jnp.where(is_late[..., None], share_late, share_early[::-1])

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def answers(is_late: jax.Array, memories: tuple[Any, Any], share: jax.Array) -> tuple[jax.Array, jax.Array]:
        chosen = jax.tree.map(lambda *both: _where(is_late, *(one[None] for one in both)), *memories)
        answer = share[..., None] * jax.vmap(function)(chosen, _where(is_late, late, early))
        return _where(is_late, 0, answer), _where(is_late, answer, 0)

    def add(totals: tuple[jax.Array, jax.Array], turn: tuple) -> tuple[tuple[jax.Array, jax.Array], None]:
        return jax.tree.map(jnp.add, totals, answers(*turn)), None

    first = jax.tree.map(lambda x: x[:half], kept)
    answer = jax.eval_shape(jax.vmap(function), first, early)
    zeros = jnp.zeros(answer.shape, answer.dtype)
    memories = kept, jax.tree.map(lambda x: x[::-1], kept)
    totals, _ = jax.lax.scan(add, (zeros, zeros), (is_late, memories, share))
    together = jnp.concatenate([totals[0], totals[1][::-1]])
    return together.reshape(-1, *together.shape[2:])[: len(rows)]


def _sum_over_levels(
    function: Callable[[Any, jax.Array], jax.Array],
    kept: Any,
    rows: jax.Array,
    shares: jax.Array,
    segment: int,
    levels: Levels,
) -> jax.Array:
    """`sum_over_kept` where a segment reads at most one memory of a level: only segments that read one are computed."""
    count = -(-len(rows) // segment)
    cut = lambda x: to_blocks(segment, _fit(x, count * segment))  # noqa: E731

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def answers(level: Levels, kept: Any, rows: jax.Array, shares: jax.Array) -> jax.Array:
        rows, shares = (jnp.take(x, level.segments, axis=0, mode="clip") for x in (rows, shares))
        memories = jax.tree.map(lambda x: jnp.take(x, level.memories, axis=0, mode="clip"), kept)
        share = jnp.take_along_axis(shares, level.memories[:, None, None], axis=2, mode="clip")
        return share * jax.vmap(function)(memories, rows)

    one, rows_cut, shares_cut = jax.tree.map(lambda x: x[0], kept), cut(rows), cut(shares)

    def add(total: jax.Array, level: Levels) -> tuple[jax.Array, None]:
        return total.at[level.segments].add(answers(level, kept, rows_cut, shares_cut), mode="drop"), None

    answer = jax.eval_shape(jax.vmap(function, in_axes=(None, 0)), one, rows_cut)
    total, _ = jax.lax.scan(add, jnp.zeros(answer.shape, answer.dtype), levels)
    return total.reshape(-1, *total.shape[2:])[: len(rows)]


def _weighted_sum(
    function: Callable[[Any, jax.Array], jax.Array], kept: Any, rows: jax.Array, shares: jax.Array
) -> jax.Array:
    """`sum_over_kept` of all memories, one after the other: only one memory's intermediate values exist at a time."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def add(total: jax.Array, one: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
        weights, share = one
        return total + share[:, None] * function(weights, rows), None

    answer = jax.eval_shape(function, jax.tree.map(lambda x: x[0], kept), rows)
    return jax.lax.scan(add, jnp.zeros(answer.shape, answer.dtype), (kept, shares.T))[0]


def _where(condition: jax.Array, x: jax.Array | int, y: jax.Array | int) -> jax.Array:
    """`jnp.where` of a condition [n] for arrays [n, ...] or [1, ...]; one of them may be 0."""
    rank = max(jnp.ndim(x), jnp.ndim(y))
    return jnp.where(condition.reshape(-1, *[1] * (rank - 1)), x, y)


def _fit(x: jax.Array, count: int) -> jax.Array:
    """The first `count` rows of x [n, ...], with zeros behind where there are fewer."""
    return jnp.pad(x[:count], [(0, max(0, count - len(x)))] + [(0, 0)] * (x.ndim - 1))
