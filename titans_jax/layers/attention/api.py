"""The two operations of attention, and which implementation of each runs.

Shapes: b batch, t time, h heads, d head_dim, n prefix rows.
"""

import jax
import jax.numpy as jnp

from titans_jax.layers.attention import cudnn, segment_pallas, xla
from titans_jax.layers.attention.xla import KeyValues
from titans_jax.layers.implementations import Implementation, dispatch
from titans_jax.ops.backend import current_backend


def causal_attention(
    queries: jax.Array,
    past: KeyValues,
    prefix: KeyValues,
    window: int | None = None,
    *,
    history_seen: int | jax.Array = 0,
    documents: jax.Array | None = None,
) -> jax.Array:
    """Each query sees the prefix and the last `window` tokens, itself included, of its own document: [b, t, h, d].

    Args:
      queries: [b, t, h, d].
      past: [b, history + t, h, d], `history` rows of the past before the rows of the queries.
      prefix: [n, h, d], seen by every query.
      window: None sees everything before the query too.
      history_seen: how many of the history's last rows exist.
      documents: int [b, t], a number per document; only without history.
    """
    return dispatch(CAUSAL, queries, past, prefix, window, history_seen=history_seen, documents=documents)


def segment_attention(
    queries: jax.Array, context: tuple[KeyValues, ...], prefix: KeyValues, index: int | jax.Array = 0
) -> jax.Array:
    """Each query sees the prefix, and the rows of every context up to its own place: [b, t, h, d] (Titans eq 22-23).

    Args:
      queries: [b, t, h, d], from place `index` of a segment on.
      context: the memory's reads h and the segment x itself, or x alone, [b, s, h, d] each, from the segment's first
        place on.
      prefix: [b, n, h, d], seen by every query.
    """
    return dispatch(SEGMENT, queries, context, prefix, index)


def _causal_splash(
    queries: jax.Array,
    past: KeyValues,
    prefix: KeyValues,
    window: int | None = None,
    *,
    history_seen: int | jax.Array = 0,
    documents: jax.Array | None = None,
) -> jax.Array:
    # Imported where it runs: an experimental part of jax, which may move.
    from titans_jax.layers.attention.splash import splash_attention

    return splash_attention(queries, past, prefix, window, history_seen=history_seen, documents=documents)


def _segment_splash(
    queries: jax.Array, context: tuple[KeyValues, ...], prefix: KeyValues, index: int | jax.Array = 0
) -> jax.Array:
    from titans_jax.layers.attention.splash import splash_segment_attention

    return splash_segment_attention(queries, context, prefix, index)


def _splash_supports_causal(
    queries: jax.Array,
    past: KeyValues,
    prefix: KeyValues,
    window: int | None = None,
    *,
    history_seen: int | jax.Array = 0,
    documents: jax.Array | None = None,
) -> bool:
    return current_backend().pallas and queries.dtype != jnp.float64


def _splash_supports_segment(
    queries: jax.Array, context: tuple[KeyValues, ...], prefix: KeyValues, index: int | jax.Array = 0
) -> bool:
    # Its mask is made while the program is traced.
    return current_backend().pallas and queries.dtype != jnp.float64 and isinstance(index, int)


CAUSAL = (
    Implementation("splash", _causal_splash, _splash_supports_causal),
    Implementation("cudnn", cudnn.flash_attention, cudnn.supports_causal),
    Implementation("xla", xla.blocked_attention),
)

SEGMENT = (
    Implementation("segment_pallas", segment_pallas.fused_segment_attention, segment_pallas.supports),
    Implementation("splash", _segment_splash, _splash_supports_segment),
    Implementation("cudnn", cudnn.flash_segment_attention, cudnn.supports_segment),
    Implementation("xla", xla.segment_attention),
)
