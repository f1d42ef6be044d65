"""Memory Caching: which of the kept memories a token reads, and in which slots streaming keeps them.

A memory is kept at the end of every segment of `cache_segment` tokens; the one kept at end e has read e segments. After
s whole segments, a token of the open one reads the memories kept at

    constant       every end 1 .. s
    logarithmic    the ends of the pieces into which the binary expansion of s cuts what was read: 13 = 8 + 4 + 1, so
                   8, 12 and 13, at most log2(s) + 1

(arXiv 2602.24281, from secondary notes: memory/later_models.md, Memory Caching). In logarithmic segments the piece that
ends at e = 2^j (2 i + 1) is 2^j segments long, and is one of the pieces exactly while 0 <= s - e < 2^j. So no two
pieces of one level j are ever read together: slot j holds the last one, and is read where bit j of s is set.

Pure functions on arrays of one sequence; callers vmap over batch. Shapes: n kept memories, s segments.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Levels(NamedTuple):
    """Which segments of a row read which kept memory, level by level, int32 [levels, readers].

    segments: numbers of segments; an unused place holds the number of segments in the row. memories: the number of the
    kept memory that the tokens of each segment read.
    """

    segments: jax.Array
    memories: jax.Array


class Extended(NamedTuple):
    """slots: the slots [slots, ...] after more segments have ended. kept: all kept memories that tokens up to there may
    read, [n, ...]. ends: their ends [n]."""

    slots: Any
    kept: Any
    ends: jax.Array


class CacheSegments(abc.ABC):
    """A way to cut the text read so far into pieces. Ends are counted from 1; 0 stands for no end."""

    @abc.abstractmethod
    def count(self, segments: int) -> int:
        """How many kept memories are read after `segments` whole segments."""

    @abc.abstractmethod
    def slots(self, segments: int) -> int:
        """How many slots a state needs for reads after up to `segments` whole segments."""

    @abc.abstractmethod
    def room(self, slots: int) -> int:
        """The most whole segments after which `slots` slots still hold all memories that are read."""

    @abc.abstractmethod
    def slot(self, end: jax.Array) -> jax.Array:
        """The slot of an end, int32."""

    @abc.abstractmethod
    def held(self, segments: jax.Array, slots: int) -> jax.Array:
        """The end that is read from each slot after `segments` segments, int32 [slots], 0 where none is."""

    @abc.abstractmethod
    def read(self, ends: jax.Array, segments: jax.Array) -> jax.Array:
        """Whether an end is read after `segments` segments, bool."""

    @abc.abstractmethod
    def means(self, before: jax.Array, means: jax.Array, ends: jax.Array) -> jax.Array:
        """The mean inputs [n, dim] of the pieces that end with n segments which follow each other.

        before: mean inputs of the pieces in the slots so far, [slots, dim]. means: mean inputs of the segments
        themselves, [n, dim]. ends: the segments' ends, [n].
        """

    @abc.abstractmethod
    def extend(self, slots: Any, new: Any, segments: jax.Array) -> Extended:
        """Add the memories kept at the n ends that follow, new [n, ...], to the slots [slots, ...] after `segments`
        segments."""

    @abc.abstractmethod
    def levels(self, read: jax.Array, ends: jax.Array, slots: int, first: bool) -> Levels | None:
        """Which segments of a row read which of the memories kept at `ends` [n], where every segment reads at most one
        memory of each slot; None where a segment reads all memories before it.

        read: bool [s, n], which memories each segment reads. first: whether all documents of the row begin in it: then
        at most half of its segments read a memory of one slot.
        """


class Constant(CacheSegments):
    """Every segment is a piece."""

    def count(self, segments: int) -> int:
        return segments

    def slots(self, segments: int) -> int:
        return segments

    def room(self, slots: int) -> int:
        return slots

    def slot(self, end: jax.Array) -> jax.Array:
        return end - 1

    def held(self, segments: jax.Array, slots: int) -> jax.Array:
        ends = jnp.arange(1, slots + 1, dtype=jnp.int32)
        return jnp.where(ends <= segments, ends, 0)

    def read(self, ends: jax.Array, segments: jax.Array) -> jax.Array:
        return (ends > 0) & (ends <= segments)

    def means(self, before: jax.Array, means: jax.Array, ends: jax.Array) -> jax.Array:
        return means

    def extend(self, slots: Any, new: Any, segments: jax.Array) -> Extended:
        places = segments + jnp.arange(len(jax.tree.leaves(new)[0]), dtype=jnp.int32)
        slots = jax.tree.map(lambda old, new: old.at[places].set(new, mode="drop"), slots, new)
        return Extended(slots, slots, jnp.arange(1, len(jax.tree.leaves(slots)[0]) + 1, dtype=jnp.int32))

    def levels(self, read: jax.Array, ends: jax.Array, slots: int, first: bool) -> None:
        return None


class Logarithmic(CacheSegments):
    """Pieces by the binary expansion."""

    def count(self, segments: int) -> int:
        return segments.bit_count()

    def slots(self, segments: int) -> int:
        return segments.bit_length()

    def room(self, slots: int) -> int:
        return (1 << slots) - 1

    def slot(self, end: jax.Array) -> jax.Array:
        return jax.lax.population_count((end & -end) - 1)  # its trailing zeros

    def held(self, segments: jax.Array, slots: int) -> jax.Array:
        level = jnp.arange(slots, dtype=jnp.int32)
        prefix = segments >> level
        return jnp.where(prefix & 1 == 1, prefix << level, 0)

    def read(self, ends: jax.Array, segments: jax.Array) -> jax.Array:
        since = segments - ends
        return (since >= 0) & (since < (ends & -ends))

    def means(self, before: jax.Array, means: jax.Array, ends: jax.Array) -> jax.Array:
        """A piece of 2^j segments is the last one and the pieces of 1, 2, .. 2^(j-1) segments before it, in slots."""
        levels = jnp.arange(len(before), dtype=jnp.int32)
        lengths = (1 << levels).astype(means.dtype)[:, None]

        def one(slots: jax.Array, new: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            mean, end = new
            level = self.slot(end)
            pieces = jnp.where((levels < level)[:, None], lengths * slots, 0)
            merged = (mean + jnp.sum(pieces, axis=0)) / (1 << level).astype(mean.dtype)
            return slots.at[level].set(merged, mode="drop"), merged

        return jax.lax.scan(one, before, (means, ends))[1]

    def extend(self, slots: Any, new: Any, segments: jax.Array) -> Extended:
        count, more = (len(jax.tree.leaves(x)[0]) for x in (slots, new))
        kept = jax.tree.map(lambda old, new: jnp.concatenate([old, new]), slots, new)
        last = self.held(segments + more, count)
        places = jnp.where(last > segments, count + last - segments - 1, jnp.arange(count, dtype=jnp.int32))
        ends = jnp.concatenate([self.held(segments, count), segments + jnp.arange(1, more + 1, dtype=jnp.int32)])
        return Extended(jax.tree.map(lambda x: x[places], kept), kept, ends)

    def levels(self, read: jax.Array, ends: jax.Array, slots: int, first: bool) -> Levels:
        """For each slot the segments whose number has its bit set, in the order of the row. Among the numbers from 0
        on, at most half have a given bit set."""
        readers = len(read) // 2 if first else len(read)

        def level(number: jax.Array) -> Levels:
            here = read & (self.slot(ends) == number)[None]
            reads = jnp.any(here, axis=1)
            order = jnp.argsort(~reads, stable=True)[:readers]
            segments = jnp.where(reads[order], order, len(read))
            return Levels(segments.astype(jnp.int32), jnp.argmax(here[order], axis=1).astype(jnp.int32))

        return jax.vmap(level)(jnp.arange(slots, dtype=jnp.int32))


CACHE_SEGMENTS: dict[str, CacheSegments] = {"constant": Constant(), "logarithmic": Logarithmic()}
"""Ways to cut the text read so far, by the value of the configuration's `memory.cache_segmentation`."""
