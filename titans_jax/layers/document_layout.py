"""Packed documents: where each starts, and how rows are rearranged so that each starts with a chunk.

A row may hold several documents, told apart by `segment_ids` (0 is padding). A chunk of the memory (a segment of MAC)
never spans two documents, so documents start at multiples of a granularity. The data pipeline packs rows so; rows
packed in any other way are rearranged in a few more slots (`relay`), and read back in the order they came.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Documents:
    """The document of every token; all [batch, time].

    starts: bool, the document's first token. mask: bool, False at padding. positions: int32, tokens since the
    document's start. index: int32, number of the document in its row; padding counts as part of the document before it.
    """

    starts: jax.Array
    mask: jax.Array
    positions: jax.Array
    index: jax.Array


def find_documents(segment_ids: jax.Array) -> Documents:
    """Documents of int32 ids [batch, time]: equal neighbours are one document, 0 is padding."""
    time = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    mask = segment_ids != 0
    previous = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    starts = mask & (segment_ids != previous)
    latest_start = jax.lax.cummax(jnp.where(starts, time, 0), axis=1)
    return Documents(starts, mask, time - latest_start, jnp.cumsum(starts, axis=1, dtype=jnp.int32))


def aligned(documents: Documents, granularity: int) -> jax.Array:
    """Whether every document of a row starts at a multiple of `granularity`, bool [batch]."""
    time = jnp.arange(documents.starts.shape[1], dtype=jnp.int32)[None]
    return jnp.all(~documents.starts | (time % granularity == 0), axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Relay:
    """A second layout of rows. slots: int32 [batch, time], where each token goes. fits: bool [batch], if all do."""

    slots: jax.Array
    fits: jax.Array


def relay(documents: Documents, granularity: int, length: int) -> Relay:
    """Slots in rows of `length` such that every document starts at a multiple of `granularity`, in the same order.

    Padding goes nowhere (its slot is `length`).
    """
    tokens = documents.mask.astype(jnp.int32)
    most = tokens.shape[1] + 1
    lengths = jax.vmap(lambda row, index: jax.ops.segment_sum(row, index, most))(tokens, documents.index)
    rounded = -(-lengths // granularity) * granularity
    offsets = jnp.cumsum(rounded, axis=1, dtype=jnp.int32) - rounded
    slots = jnp.take_along_axis(offsets, documents.index, axis=1) + documents.positions
    fits = jnp.all(~documents.mask | (slots < length), axis=1)
    return Relay(jnp.where(documents.mask, jnp.minimum(slots, length), length), fits)


def scatter(relay: Relay, rows: jax.Array, length: int) -> jax.Array:
    """Put tokens or ids [batch, time] into their slots, [batch, length]; empty slots hold 0."""
    place = lambda slots, row: jnp.zeros((length,), row.dtype).at[slots].set(row, mode="drop")  # noqa: E731
    return jax.vmap(place)(relay.slots, rows)


def gather(relay: Relay, x: jax.Array) -> jax.Array:
    """Bring x [batch, length, dim] back to the order of the tokens, [batch, time, dim]."""
    return jnp.take_along_axis(x, jnp.minimum(relay.slots, x.shape[1] - 1)[..., None], axis=1)
