"""Constant and logarithmic segments: which ends are read, their slots, means and levels, against binary expansions in
loops."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax.memory.cache_segments import CACHE_SEGMENTS
from titans_jax.memory.caching import sum_over_kept

MOST = 20
LOGARITHMIC = CACHE_SEGMENTS["logarithmic"]


def pieces_of(segments, way="logarithmic"):
    """(begin, end) of the pieces: single segments, or by the bits of their number, the highest first."""
    if way == "constant":
        return [(begin, begin + 1) for begin in range(segments)]
    pieces, begin = [], 0
    for bit in reversed(range(10)):
        if segments // 2**bit % 2:
            pieces.append((begin, begin + 2**bit))
            begin += 2**bit
    return pieces


def test_the_example_of_the_definition():
    assert pieces_of(13) == [(0, 8), (8, 12), (12, 13)]
    assert sorted(filter(None, np.array(LOGARITHMIC.held(jnp.int32(13), 4)).tolist())) == [8, 12, 13]


@pytest.mark.parametrize("way", ["constant", "logarithmic"])
def test_ends_that_are_read_and_their_slots(way):
    cut, ends = CACHE_SEGMENTS[way], jnp.arange(MOST + 1, dtype=jnp.int32)
    slots = cut.slots(MOST)
    assert (
        slots == {"constant": 20, "logarithmic": 5}[way] and cut.room(slots) == {"constant": 20, "logarithmic": 31}[way]
    )
    table = np.array(cut.read(ends[None], ends[:, None]))  # after row's number, column's end
    for segments in range(MOST + 1):
        expected = [end for _, end in pieces_of(segments, way)]
        assert np.flatnonzero(table[segments]).tolist() == expected
        assert cut.count(segments) == len(expected)
        assert cut.slots(segments) <= slots and cut.room(cut.slots(segments)) >= segments
        held = np.array(cut.held(jnp.int32(segments), slots))
        assert sorted(held[held > 0].tolist()) == expected
        for slot in np.flatnonzero(held):
            assert int(cut.slot(jnp.int32(held[slot]))) == slot


@pytest.mark.parametrize("way", ["constant", "logarithmic"])
def test_means_and_slots_in_any_two_parts(way):
    """Ends that arrive in two parts: what is read in between, what is in the slots after, and the means of pieces."""
    cut, rng = CACHE_SEGMENTS[way], np.random.default_rng(0)
    slots, inputs = cut.slots(MOST), rng.normal(size=(MOST, 3))
    own = jnp.asarray(inputs, jnp.float32)

    def check(held_means, count):
        held = np.array(cut.held(jnp.int32(count), slots))
        for begin, end in pieces_of(count, way):
            (slot,) = np.flatnonzero(held == end)
            np.testing.assert_allclose(held_means[slot], inputs[begin:end].mean(axis=0), rtol=1e-6, atol=1e-6)

    for first, last in [(0, 20), (13, 3), (7, 9), (5, 15), (16, 1), (12, 0)]:
        state, before = jnp.zeros((slots, 3), jnp.float32), 0
        for count in (first, last):
            ends = before + jnp.arange(1, count + 1, dtype=jnp.int32)
            means = cut.means(state, own[before : before + count], ends)
            state, kept, ends = cut.extend(state, means, jnp.int32(before))
            for segments in range(before, before + count + 1):  # every token on the way finds what it reads
                read = np.flatnonzero(cut.read(ends, jnp.int32(segments)))
                assert sorted(np.array(ends)[read].tolist()) == [end for _, end in pieces_of(segments, way)]
                expected = [inputs[begin:end].mean(axis=0) for begin, end in pieces_of(segments, way)]
                order = read[np.argsort(np.array(ends)[read])]
                found = np.array(kept)[order].reshape(-1, 3)
                np.testing.assert_allclose(found, np.reshape(expected, (-1, 3)), rtol=1e-5, atol=1e-6)
            before += count
            check(np.array(state), before)


ROWS = [[9], [8], [1], [5, 4], [1, 1, 7], [3, 3, 3], [2, 6, 1], [16], [6, 10]]


@pytest.mark.parametrize("documents", ROWS, ids=str)
def test_a_row_s_segments_read_one_memory_of_every_level(documents):
    """Of documents of so many segments each, one after the other; every reader is found, whatever the packing."""
    count = sum(documents)
    number = np.array([segment for length in documents for segment in range(length)])
    same = np.repeat(np.arange(len(documents)), documents)
    expected = {
        (segment, segment - number[segment] + end - 1)
        for segment in range(count)
        for _, end in pieces_of(number[segment])
    }
    numbers, ends = jnp.asarray(number, jnp.int32), jnp.asarray(number + 1, jnp.int32)
    read = LOGARITHMIC.read(ends[None], numbers[:, None]) & jnp.asarray(same[:, None] == same[None])
    assert set(map(tuple, np.argwhere(read).tolist())) == expected
    levels = LOGARITHMIC.levels(read, ends, LOGARITHMIC.slots(count - 1), first=True)
    pairs = list(zip(levels.segments.ravel().tolist(), levels.memories.ravel().tolist(), strict=True))
    found = [(segment, memory) for segment, memory in pairs if segment < count]
    assert len(found) == len(set(found)) and set(found) == expected
    assert levels.segments.shape == (LOGARITHMIC.slots(count - 1), count // 2)
    if documents in ([8], [16]):  # nothing is computed to be dropped
        assert len(pairs) == len(expected)


@pytest.mark.parametrize("before, count", list(itertools.product([0, 1, 5, 8, 13], [1, 3, 8])))
def test_what_follows_a_state_reads_one_memory_of_every_level(before, count):
    ends = jnp.concatenate([LOGARITHMIC.held(jnp.int32(before), 5), before + jnp.arange(1, count + 1, dtype=jnp.int32)])
    numbers = before + jnp.arange(count, dtype=jnp.int32)
    levels = LOGARITHMIC.levels(LOGARITHMIC.read(ends[None], numbers[:, None]), ends, 5, first=False)
    found = [[] for _ in range(count + 1)]
    for segment, memory in zip(np.ravel(levels.segments), np.ravel(levels.memories), strict=True):
        found[segment].append(int(ends[memory]))
    for segment in range(count):
        assert sorted(found[segment]) == [end for _, end in pieces_of(before + segment)]


@pytest.mark.parametrize("time", [4, 9, 23, 37])
def test_rows_read_by_levels(time):
    """It is the sum over all kept memories, of which only those of the binary expansion have a share; segments of 4."""
    count, rng = -(-time // 4), np.random.default_rng(1)
    kept, rows = rng.normal(size=(count, 3, 2)), rng.normal(size=(time, 3))
    read = np.zeros((count, count), bool)
    for segment in range(count):
        read[segment, [end - 1 for _, end in pieces_of(segment)]] = True
    shares = rng.normal(size=(time, count)) * np.repeat(read, 4, axis=0)[:time]
    expected = np.einsum("ti,td,ide->te", shares, rows, kept)
    ends = jnp.arange(1, count + 1, dtype=jnp.int32)

    @jax.jit
    def product(*arrays):
        levels = LOGARITHMIC.levels(jnp.asarray(read), ends, LOGARITHMIC.slots(count - 1), first=True)
        return sum_over_kept(lambda matrix, x: x @ matrix, *arrays, 4, levels)

    with jax.enable_x64(True):
        found = product(*map(jnp.asarray, (kept, rows, shares)))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
