"""Attention in plain JAX: its definition, the blocked form over a sequence, and the attention of a MAC segment.

Kernels share what is at the end: masks, and how arguments are spread over devices.

Shapes: b batch, t time, h heads, d head_dim, n prefix rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from titans_jax.layers.head_channels import side_by_side
from titans_jax.ops.backend import current_backend
from titans_jax.ops.matmul import wide_dtype
from titans_jax.sharding import BATCH, HEADS, head_shards, on_devices

BLOCK = 256
"""Queries taken at once."""


class KeyValues(NamedTuple):
    """Keys and values, both [b, t, h, d] (a prefix: [n, h, d])."""

    keys: jax.Array
    values: jax.Array


def attend(queries: jax.Array, past: KeyValues, prefix: KeyValues, visible: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(d)) v over [prefix | past], in float32.

    Args:
      queries: [b, t, h, d].
      past: [b, s, h, d].
      prefix: [n, h, d], seen by every query.
      visible: bool [b or 1, t, s], which rows of past each query sees; where n is 0, at least one.
    """
    wide = wide_dtype(queries.dtype)
    logits = jnp.einsum("bthd,bshd->bhts", queries, past.keys, preferred_element_type=wide)
    logits = jnp.where(visible[:, None], logits, -jnp.inf)
    prefix_logits = jnp.einsum("bthd,nhd->bhtn", queries, prefix.keys, preferred_element_type=wide)
    logits = jnp.concatenate([prefix_logits, logits], axis=-1) * queries.shape[-1] ** -0.5
    weights = jax.nn.softmax(logits, axis=-1).astype(queries.dtype)
    prefix_weights, weights = jnp.split(weights, [prefix.keys.shape[0]], axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, past.values) + jnp.einsum(
        "bhtn,nhd->bthd", prefix_weights, prefix.values
    )


def attend_once(queries: jax.Array, parts: tuple[KeyValues, ...], visible: jax.Array) -> jax.Array:
    """`attend` of one query a row to keys and values in several parts, which are not copied behind one another.

    Args:
      queries: [b, 1, h, d].
      parts: keys and values [b, s, h, d], or of all rows [s, h, d].
      visible: bool [b or 1, all parts' s], what the row's query sees; at least one.
    """
    # A CPU would bring all keys into the order of heads first, for every token that is decoded. There, heads stay side
    # by side: each has a query that is zero in other heads' channels, and of what it reads only its own are taken.
    together = current_backend().name == "cpu" and head_shards() == 1
    score, read = (_score_side_by_side, _read_side_by_side) if together else (_score_by_head, _read_by_head)
    logits = jnp.concatenate([score(queries[:, 0], part.keys) for part in parts], axis=-1)
    logits = jnp.where(visible[:, None], logits, -jnp.inf) * queries.shape[-1] ** -0.5
    weights = jax.nn.softmax(logits, axis=-1).astype(queries.dtype)
    shares = jnp.split(weights, np.cumsum([part.keys.shape[-3] for part in parts])[:-1], axis=-1)
    return sum(read(share, part.values) for share, part in zip(shares, parts, strict=True))[:, None]


def _score_by_head(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """[b, h, d], [(b,) s, h, d] -> [b, h, s]."""
    batch = "b" * (keys.ndim - 3)
    return jnp.einsum(f"bhd,{batch}shd->bhs", queries, keys, preferred_element_type=wide_dtype(queries.dtype))


def _read_by_head(weights: jax.Array, values: jax.Array) -> jax.Array:
    """[b, h, s], [(b,) s, h, d] -> [b, h, d]."""
    batch = "b" * (values.ndim - 3)
    return jnp.einsum(f"bhs,{batch}shd->bhd", weights, values)


def _score_side_by_side(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """`_score_by_head`."""
    heads, width = queries.shape[-2:]
    spread = jnp.einsum("bhd,hg->bhdg", queries, jnp.eye(heads, dtype=queries.dtype))
    spread, batch = spread.reshape(-1, heads * width, heads), "b" * (keys.ndim - 3)
    return jnp.einsum(
        f"{batch}sc,bch->bhs", side_by_side(keys), spread, preferred_element_type=wide_dtype(queries.dtype)
    )


def _read_side_by_side(weights: jax.Array, values: jax.Array) -> jax.Array:
    """`_read_by_head`."""
    (heads, width), batch = values.shape[-2:], "b" * (values.ndim - 3)
    read = jnp.einsum(f"bhs,{batch}sc->bhc", weights, side_by_side(values))
    return jnp.einsum("bhgd,hg->bhd", read.reshape(-1, heads, heads, width), jnp.eye(heads, dtype=read.dtype))


def blocked_attention(
    queries: jax.Array,
    past: KeyValues,
    prefix: KeyValues,
    window: int | None = None,
    *,
    history_seen: int | jax.Array = 0,
    documents: jax.Array | None = None,
    block: int = BLOCK,
) -> jax.Array:
    """`api.causal_attention` in plain JAX.

    Blocks of queries are taken one after another, each against the keys its window can reach, so that [t, t] is never
    formed. `jax.nn.dot_product_attention` calls the same window local_window_size=(window - 1, 0).

    Args:
      block: queries taken at once. Never changes the numbers.
    """
    time, total = queries.shape[1], past.keys.shape[1]
    history = total - time
    window = total if window is None else min(window, total)
    block = min(block, time)
    blocks = -(-time // block)
    # In padded coordinates query i is row `reach + i`, and block number j sees rows [j block, j block + span).
    reach = min(-(-(window - 1) // block) * block, -(-total // block) * block)
    span = reach + block
    tail = blocks * block - time

    def pad(x: jax.Array, front: int) -> jax.Array:
        return jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (front, tail, 0), *[(0, 0, 0)] * (x.ndim - 2)])

    past = KeyValues(*(pad(x, reach - history) for x in past))
    queries = pad(queries, 0)
    if documents is not None:
        documents = pad(documents, reach)

    @jax.checkpoint
    def one_block(number: jax.Array) -> jax.Array:
        start = number * block

        def rows(x: jax.Array, offset: int | jax.Array, size: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start + offset, size, axis=1)

        query_row = (start + reach + jnp.arange(block, dtype=jnp.int32))[:, None]
        key_row = (start + jnp.arange(span, dtype=jnp.int32))[None]
        visible = (key_row <= query_row) & (query_row - key_row < window) & (key_row >= reach - history_seen)
        visible = visible[None]
        if documents is not None:
            visible &= rows(documents, reach, block)[:, :, None] == rows(documents, 0, span)[:, None]
        return attend(rows(queries, 0, block), KeyValues(*(rows(x, 0, span) for x in past)), prefix, visible)

    outputs = jax.lax.map(one_block, jnp.arange(blocks, dtype=jnp.int32))
    batch, _, *heads = queries.shape
    return jnp.moveaxis(outputs, 0, 1).reshape(batch, blocks * block, *heads)[:, :time]


def segment_attention(
    queries: jax.Array, context: tuple[KeyValues, ...], prefix: KeyValues, index: int | jax.Array = 0
) -> jax.Array:
    """`api.segment_attention` in plain JAX."""
    visible = jnp.asarray(segment_mask(queries, context, prefix, index))
    if queries.shape[1] == 1:
        return attend_once(queries, (*context, prefix), visible)
    past = concatenate_time(*context, prefix)
    return attend(queries, past, KeyValues(*(rows[0, :0] for rows in past)), visible[None])


def segment_mask(
    queries: jax.Array, context: tuple[KeyValues, ...], prefix: KeyValues, index: int | jax.Array = 0
) -> np.ndarray | jax.Array:
    """Which rows of [contexts | prefix] each query sees, bool [t, contexts s + n]; numpy where `index` is an int."""
    time, places = queries.shape[1], np.arange(context[0].keys.shape[1], dtype=np.int32)
    now = index + np.arange(time, dtype=np.int32)[:, None]
    return np.concatenate([*[places] * len(context), np.zeros(prefix.keys.shape[1], np.int32)])[None] <= now


def concatenate_time(*parts: KeyValues) -> KeyValues:
    """Keys and values [b, ., h, d] one after another in time."""
    return jax.tree.map(lambda *rows: jnp.concatenate(rows, axis=1), *parts)


def per_device(attend: Callable[..., jax.Array], *specs: PartitionSpec) -> Callable[..., jax.Array]:
    """`attend` on every device for its own rows and heads.

    Args:
      attend: a function of queries, past and further arguments.
      specs: how those further arguments are spread.
    """
    rows = PartitionSpec(BATCH, None, HEADS)
    return on_devices(attend, (rows, rows, *specs), rows)
