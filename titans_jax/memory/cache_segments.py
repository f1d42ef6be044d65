"""Memory Caching: which of the kept memories a token reads, and in which slots streaming keeps them.

A memory is kept at the end of every segment of `cache_segment` tokens; that of end e has read e segments. After s whole
segments, in the open one, a token reads

    constant       every end 1 .. s
    logarithmic    the ends of the pieces into which the binary expansion of s cuts what was read: 13 = 8 + 4 + 1, so
                   8, 12 and 13, at most log2(s) + 1

(arXiv 2602.24281, from secondary notes: memory/later_models.md, Memory Caching). In logarithmic segments the piece that
ends at e = 2^j (2 i + 1) is 2^j segments long, and is one of the cut exactly where 0 <= s - e < 2^j. So no two of a
level j are ever read together: slot j holds the last one, and is read where bit j of s is set.

Pure functions on arrays of one sequence; callers vmap over batch. Shapes: n kept memories, s segments.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Levels(NamedTuple):
    """Segments of a row that read one memory each, level by level, int32 [levels, readers]: a segment's number, and
    that of the kept memory that its tokens read. Where there is none, a segment's number is how many there are."""

    segments: jax.Array
    memories: jax.Array


class Extended(NamedTuple):
    """Slots [slots, ...] after more ends; all that tokens on the way to there may read [n, ...], and its ends [n]."""

    slots: Any
    kept: Any
    ends: jax.Array


class CacheSegments(abc.ABC):
    """A way to cut what was read; 0 stands for no end."""

    @abc.abstractmethod
    def count(self, segments: int) -> int:
        """How many kept memories are read after so many whole segments."""

    @abc.abstractmethod
    def slots(self, segments: int) -> int:
        """Slots that a state needs to read after up to so many whole segments."""

    @abc.abstractmethod
    def room(self, slots: int) -> int:
        """The most whole segments after which so many slots hold all that is read."""

    @abc.abstractmethod
    def slot(self, end: jax.Array) -> jax.Array:
        """The slot of an end, int32."""

    @abc.abstractmethod
    def held(self, segments: jax.Array, slots: int) -> jax.Array:
        """The ends that are read after so many segments, by their slots, int32 [slots]."""

    @abc.abstractmethod
    def read(self, ends: jax.Array, segments: jax.Array) -> jax.Array:
        """Whether an end is read after so many segments, bool."""

    @abc.abstractmethod
    def means(self, before: jax.Array, means: jax.Array, ends: jax.Array) -> jax.Array:
        """The mean inputs of the pieces that end with segments whose own ones are `means` [n, dim], which end at `ends`
        [n], one after the other; before: those in slots until then [slots, dim]."""

    @abc.abstractmethod
    def extend(self, slots: Any, new: Any, segments: jax.Array) -> Extended:
        """Slots [slots, ...] after so many segments, and n new ends [n, ...] that follow."""

    @abc.abstractmethod
    def levels(self, read: jax.Array, ends: jax.Array, slots: int, first: bool) -> Levels | None:
        """How the segments of a row read kept memories of these ends [n], as `read` [s, n] says, where every segment
        reads at most one of each slot; None where one reads all before it.

        first: whether all documents of the row begin in it: half of its segments at most then read one of a slot.
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
        """2^j segments are the last one and the pieces of 1, 2, .. 2^(j-1) segments before it, which slots hold."""
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
        """Those whose bit is set, in the order of a row. Of numbers from 0 on, half of them at most have a bit set."""
        readers = len(read) // 2 if first else len(read)

        def level(number: jax.Array) -> Levels:
            here = read & (self.slot(ends) == number)[None]
            reads = jnp.any(here, axis=1)
            order = jnp.argsort(~reads, stable=True)[:readers]
            segments = jnp.where(reads[order], order, len(read))
            return Levels(segments.astype(jnp.int32), jnp.argmax(here[order], axis=1).astype(jnp.int32))

        return jax.vmap(level)(jnp.arange(slots, dtype=jnp.int32))


CACHE_SEGMENTS: dict[str, CacheSegments] = {"constant": Constant(), "logarithmic": Logarithmic()}
"""Ways to cut what was read, by the value of the configuration's `memory.cache_segmentation`."""
