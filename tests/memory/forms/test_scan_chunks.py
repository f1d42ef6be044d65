"""The scan alone: a chunk algorithm that only adds up values, so that what is wrong is where tokens were laid."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax import memory
from titans_jax.memory import Gates, MemoryState
from titans_jax.memory.forms import scan_chunks
from titans_jax.memory.forms.chunk_algorithm import ChunkAlgorithm, ChunkResult, MemoryInputs
from titans_jax.memory.state import Surprise
from titans_jax.ops.backend import CPU, BlockSize

CHUNK = 4
HEAD_DIM = 2


@dataclasses.dataclass(frozen=True)
class Adding(ChunkAlgorithm):
    """The memory is the sum of values, [1, head_dim]; a token reads it, and a hundred times its chunk's anchor."""

    chunks: int = 1
    group: int = 2

    @classmethod
    def supports(cls, rule, gates):
        return True

    @property
    def block_size(self):
        return BlockSize(self.chunks * CHUNK, self.group)

    def prepare(self, inputs):
        assert inputs.queries.shape[0] <= self.group and inputs.queries.shape[1] == self.chunks * CHUNK
        everywhere = jnp.ones(inputs.queries.shape[:2], bool)
        mask = everywhere if inputs.gates.mask is None else inputs.gates.mask
        return mask, ~everywhere if inputs.resets is None else inputs.resets

    def step(self, params, start, initial, tokens, prepared):
        (total,), (anchor,), reads = start.weights, start.anchor, []
        last_anchor = anchor
        for t in range(len(tokens.values)):
            value = tokens.values[t : t + 1]
            mask, reset = prepared[0][t], prepared[1][t]
            total = jnp.where(reset, initial.weights[0] if initial else total, total)
            if t > 0 and t % CHUNK == 0:
                anchor = total
            anchor = jnp.where(reset, total, anchor)
            last_anchor = jnp.where(mask, anchor, last_anchor)
            total = total + jnp.where(mask, value, 0)
            reads.append(total + 100 * anchor)
        losses = tokens.values[:, 0]
        return ChunkResult(
            MemoryState((total,), (), (last_anchor,), 0), jnp.concatenate(reads), Surprise(losses, losses)
        )


def algorithm(chunks=1, group=2):
    rule = memory.presets.titans(depth=1, residual=False, chunk_size=CHUNK)
    return Adding(rule, CPU, chunks, group)


INITIAL = np.array([[5.0, 7.0]])


def added(values, mask=None, resets=None):
    """Reads, the last sum, the open chunk's anchor and the position, token by token."""
    total = anchor = np.zeros((1, HEAD_DIM))
    position, reads = 0, []
    for t, value in enumerate(values):
        if resets is not None and resets[t]:
            total, position = INITIAL, 0
        written = mask is None or mask[t]
        if position == 0 and written:
            anchor = total
        total = total + value * written
        position = (position + written) % CHUNK
        reads.append(total[0] + 100 * anchor[0])
    return np.array(reads), total, total if position == 0 else anchor, position


def state(position=0, total=None, anchor=None):
    zeros = jnp.zeros((1, HEAD_DIM))
    return MemoryState((zeros if total is None else total,), (), (zeros if anchor is None else anchor,), position)


def inputs(values, mask=None, resets=None):
    """`MemoryInputs` with nothing else in them."""
    values = jnp.asarray(values, jnp.float32)
    gate = jnp.zeros((len(values), 1))
    gates = Gates(gate, None, gate, None if mask is None else jnp.asarray(mask))
    return MemoryInputs(values, values, values, gates, None if resets is None else jnp.asarray(resets))


@functools.partial(jax.jit, static_argnums=(0, 1))
def compiled(algorithm, position, state, inputs):
    """position: a number known before compilation, or None for that of the state."""
    if position is not None:
        state = dataclasses.replace(state, position=position)
    initial = None if inputs.resets is None else MemoryState((jnp.asarray(INITIAL, jnp.float32),), (), (), 0)
    return scan_chunks.scan_blocks(algorithm, {}, state, initial, inputs)


def draw(time, seed=0):
    """Whole numbers, so that sums are exact."""
    return np.random.default_rng(seed).integers(1, 9, (time, HEAD_DIM)).astype(np.float32)


def assert_outputs(found, values, mask=None, resets=None, since=0):
    """Reads and state are those of all values, of which the tokens from `since` on were read now."""
    reads, total, anchor, position = added(values, mask, resets)
    written = np.ones(len(values), bool) if mask is None else mask
    np.testing.assert_array_equal(np.asarray(found.reads)[written[since:]], reads[since:][written[since:]])
    np.testing.assert_array_equal(found.state.weights[0], total)
    np.testing.assert_array_equal(found.state.anchor[0], anchor)
    assert found.state.position == position
    np.testing.assert_array_equal(found.surprise.loss, (values[:, 0] * written)[since:])


# Blocks of one and of two chunks, in groups of two: one block, whole groups, a remaining block, parts of chunks.
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("time", [8, 16, 40, 3, 17])
def test_blocks_groups_and_remainders(chunks, time):
    values = draw(time)
    assert_outputs(compiled(algorithm(chunks), 0, state(), inputs(values)), values)


@pytest.mark.parametrize("static", [True, False], ids=["static", "traced"])
@pytest.mark.parametrize("cut", [1, 4, 6, 11])
def test_reading_on_inside_a_chunk(cut, static):
    """Split anywhere, with a position that is known before compilation or not."""
    values = draw(15)
    first = compiled(algorithm(2), 0, state(), inputs(values[:cut]))
    assert_outputs(first, values[:cut])
    position = int(first.state.position) if static else None
    rest = compiled(algorithm(2), position, first.state, inputs(values[cut:]))
    assert_outputs(rest, values, since=cut)


@pytest.mark.parametrize("tokens", [0, 3, 4, 9])
def test_padding_behind_all_tokens_changes_nothing(tokens):
    values, mask = draw(12), np.arange(12) < tokens
    assert_outputs(compiled(algorithm(), 0, state(), inputs(values, mask)), values, mask)


def test_only_padding_leaves_an_open_chunk_open():
    before = state(3, jnp.full((1, HEAD_DIM), 9.0), jnp.full((1, HEAD_DIM), 2.0))
    found = compiled(algorithm(), 3, before, inputs(draw(6), np.zeros(6, bool)))
    assert found.state.position == 3
    np.testing.assert_array_equal(found.state.weights[0], before.weights[0])
    np.testing.assert_array_equal(found.state.anchor[0], before.anchor[0])


@pytest.mark.parametrize("chunks", [1, 2])
def test_documents_start_at_chunks(chunks):
    values, resets = draw(20), np.isin(np.arange(20), [0, 4, 16])
    mask = ~np.isin(np.arange(20), [14, 15, 19])  # before a document's start, and at the end
    assert_outputs(compiled(algorithm(chunks), 0, state(), inputs(values, None, resets)), values, None, resets)
    assert_outputs(compiled(algorithm(chunks), 0, state(), inputs(values, mask, resets)), values, mask, resets)


def flags(*places, time=12):
    return np.isin(np.arange(time), places)


@pytest.mark.parametrize(
    "position, mask, resets",
    [
        (0, None, flags(5)),
        (0, ~flags(11), flags(5)),
        (2, None, flags(4)),
        (None, None, flags(4)),
        (0, ~flags(3), None),
        (0, ~flags(3, 4), flags(8)),
    ],
    ids=["reset", "reset-with-padding", "reset-after-offset", "reset-after-traced-offset", "padding", "resumed"],
)
def test_misplaced_resets_and_padding_give_nan(position, mask, resets):
    """A reset inside a chunk, and padding that is followed by anything but a reset: all reads, none silently wrong."""
    before = state(2 if position is None else position)
    assert np.isnan(compiled(algorithm(), position, before, inputs(draw(12), mask, resets)).reads).all()


@pytest.mark.parametrize("offset", [0, 3, "traced"])
def test_unplace_undoes_lay_out(offset):
    values = draw(7)
    traced = offset == "traced"
    place = functools.partial(scan_chunks.lay_out, CHUNK, 2 * CHUNK)

    @functools.partial(jax.jit, static_argnums=0)
    def placed(known, position):
        layout = place(state(position if traced else known), inputs(values))
        return layout.inputs, layout.unplace(layout.inputs.values), layout.reads(layout.inputs.queries), layout.last

    start = 3 if traced else offset
    laid, values_again, reads, last = placed(None if traced else offset, jnp.asarray(start, jnp.int32))
    np.testing.assert_array_equal(values_again, values)
    np.testing.assert_array_equal(reads, values)
    assert laid.values.shape[1:] == (2 * CHUNK, HEAD_DIM) and last == start + len(values) - 1
    mask = np.asarray(laid.gates.mask).reshape(-1)
    np.testing.assert_array_equal(np.flatnonzero(mask), start + np.arange(len(values)))
    assert not np.any(np.asarray(laid.values).reshape(-1, HEAD_DIM)[~mask])


def test_whole_blocks_are_a_reshape():
    """Nothing is padded, masked or checked where nothing can be wrong."""
    layout = scan_chunks.lay_out(CHUNK, 2 * CHUNK, state(), inputs(draw(16)))
    assert layout.last is None and layout.valid is None and layout.inputs.gates.mask is None


def test_gradients_pass_through_groups():
    """Every value reaches its own and all later reads, and a hundred times those of later chunks."""

    def total(values):
        return jnp.sum(compiled(algorithm(), 0, state(), inputs(values)).reads)

    time = 20
    later = [time - t + 100 * (time - (t // CHUNK + 1) * CHUNK) for t in range(time)]
    np.testing.assert_array_equal(
        jax.grad(total)(jnp.asarray(draw(time))), np.array(later)[:, None] * np.ones(HEAD_DIM)
    )
