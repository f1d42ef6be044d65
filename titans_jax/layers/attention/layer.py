"""Multi-head causal attention as a layer: full or in a sliding window, with a prefix every token sees, and a cache.

Shapes: b batch, t time, h heads, d head_dim, n prefix rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from titans_jax.config import ModelConfig
from titans_jax.layers.attention.api import causal_attention
from titans_jax.layers.attention.rotary import rotate
from titans_jax.layers.attention.xla import KeyValues, attend_once
from titans_jax.layers.convolution import CausalConvolution
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.head_channels import side_by_side
from titans_jax.layers.projections import compute_dtype, projection


class ConvolutionTails(NamedTuple):
    """Latest projections of queries, keys and values, [b, conv_size - 1, h d] each, or of one row without the batch."""

    query: jax.Array
    key: jax.Array
    value: jax.Array


class AttentionState(NamedTuple):
    """What attention carries: a ring buffer of the last keys and values, slot = position mod capacity.

    prefix: keys and values of the persistent tokens [n, h, d]; cache: [b, capacity, h, d]; position: int32 scalar,
    tokens read so far; tails: of the convolutions, None without.
    """

    prefix: KeyValues
    cache: KeyValues
    position: jax.Array
    tails: ConvolutionTails | None = None


class Attention(nnx.Module):
    """Multi-head attention with rotary positions, [b, t, dim] -> [b, t, dim].

    With `attention_conv` projections of queries, keys and values are convolved before they are turned. Persistent
    tokens have no neighbours: theirs are as projected.

    Args:
      window: tokens a query sees, itself included; None is full causal attention.
    """

    def __init__(self, config: ModelConfig, window: int | None, *, rngs: nnx.Rngs):
        self.window, self.rope_theta, self.dtype = window, config.rope_theta, compute_dtype(config)
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        width = self.num_heads * self.head_dim
        self.query, self.key, self.value = (
            projection(config, config.dim, width, ("embed", "heads"), rngs=rngs) for _ in range(3)
        )
        self.output = projection(config, width, config.dim, ("heads", "embed"), writes_residual=True, rngs=rngs)
        self.query_convolution, self.key_convolution, self.value_convolution = (
            CausalConvolution(config, width, identity=True, rngs=rngs) if config.attention_conv else None
            for _ in range(3)
        )

    def __call__(
        self,
        x: jax.Array,
        state: AttentionState | None = None,
        documents: Documents | None = None,
        persistent: jax.Array | None = None,
    ) -> tuple[jax.Array, AttentionState | None]:
        """Attend from x [b, t, dim] to the persistent tokens, the state's past and x itself.

        Without a state this is the start of a sequence and no state is returned. A state of full attention that is
        asked for more tokens than its capacity gives NaN.

        Args:
          documents: of packed rows; only without a state.
          persistent: tokens [n, dim] that every query sees; with a state, those given to `init_state`.

        Returns:
          [b, t, dim], and the next state.
        """
        if state is None:
            time = jnp.arange(x.shape[1], dtype=jnp.int32)
            positions, index = (time, None) if documents is None else (documents.positions, documents.index)
            queries, past, _ = self.features(x, positions, self.start_tails(x.shape[0]), documents)
            y = causal_attention(queries, past, self.prefix(persistent), self.window, documents=index)
            return self.merge(y), None

        positions = state.position + jnp.arange(x.shape[1], dtype=jnp.int32)
        queries, new, tails = self.features(x, positions, state.tails)
        capacity = state.cache.keys.shape[1]
        cache = KeyValues(*(_write_ring(ring, rows, positions) for ring, rows in zip(state.cache, new, strict=True)))
        if x.shape[1] == 1:  # the order of keys does not matter, so the ring is read as it lies
            prefix = jnp.ones(state.prefix.keys.shape[0], bool)
            visible = jnp.concatenate([prefix, jnp.arange(capacity, dtype=jnp.int32) <= state.position])
            y = attend_once(queries, (state.prefix, cache), visible[None])
        else:
            past = KeyValues(
                *(
                    jnp.concatenate([jnp.roll(ring, -state.position, axis=1), rows], axis=1)
                    for ring, rows in zip(state.cache, new, strict=True)
                )
            )
            seen = jnp.minimum(state.position, capacity)
            y = causal_attention(queries, past, state.prefix, capacity, history_seen=seen)
        if self.window is None:
            y = jnp.where(positions[-1] < capacity, y, jnp.nan)
        return self.merge(y), AttentionState(state.prefix, cache, positions[-1] + 1, tails)

    def init_state(self, batch: int, max_length: int | None, persistent: jax.Array | None = None) -> AttentionState:
        """An empty cache of `window` tokens, or of `max_length` tokens for full attention.

        Raises:
          ValueError: full attention without max_length.
        """
        capacity = self.window or max_length
        if capacity is None:
            raise ValueError("max_length is None; full attention keeps every token, so give the longest length to come")
        empty = jnp.zeros((batch, capacity, self.num_heads, self.head_dim), self.dtype)
        start = jnp.zeros((), jnp.int32)
        return AttentionState(self.prefix(persistent), KeyValues(empty, empty), start, self.start_tails(batch))

    def start_tails(self, batch: int) -> ConvolutionTails | None:
        """The convolutions' tails before the first token: zeros; None without convolutions."""
        if self.query_convolution is None:
            return None
        empty = jnp.zeros((batch, self.query_convolution.size - 1, self.num_heads * self.head_dim), self.dtype)
        return ConvolutionTails(empty, empty, empty)

    def features(
        self, x: jax.Array, positions: jax.Array, tails: ConvolutionTails | None, documents: Documents | None = None
    ) -> tuple[jax.Array, KeyValues, ConvolutionTails | None]:
        """x [b, t, dim] -> queries and keys (turned to int positions [..., t]), values [b, t, h, d], next tails."""
        projected = self.query(x), self.key(x), self.value(x)
        if tails is not None:
            convolutions = self.query_convolution, self.key_convolution, self.value_convolution
            first = None if documents is None else jnp.zeros_like(tails.query[0])
            projected, new = zip(
                *(
                    convolution.features(rows, tail, documents, first, activation=False, unit_norm=None)
                    for convolution, rows, tail in zip(convolutions, projected, tails, strict=True)
                ),
                strict=True,
            )
            tails = ConvolutionTails(*new)
        queries, keys, values = map(self.by_head, projected)
        queries = checkpoint_name(rotate(queries, positions, self.rope_theta), "features")
        return queries, self._turned(keys, values, positions), tails

    def key_values(self, x: jax.Array, positions: jax.Array) -> KeyValues:
        """[..., t, dim] -> keys (turned to int positions [..., t]) and values [..., t, h, d], without convolutions."""
        return self._turned(self.by_head(self.key(x)), self.by_head(self.value(x)), positions)

    def _turned(self, keys: jax.Array, values: jax.Array, positions: jax.Array) -> KeyValues:
        return checkpoint_name(KeyValues(rotate(keys, positions, self.rope_theta), values), "features")

    def prefix(self, persistent: jax.Array | None) -> KeyValues:
        """Keys and values [n, h, d] of persistent tokens [n, dim], or of none; they have no position."""
        if persistent is None:
            return KeyValues(*[jnp.zeros((0, self.num_heads, self.head_dim), self.dtype)] * 2)
        return KeyValues(self.by_head(self.key(persistent)), self.by_head(self.value(persistent)))

    def merge(self, y: jax.Array) -> jax.Array:
        """[..., t, h, d] -> [..., t, dim], the output projection."""
        return self.output(checkpoint_name(side_by_side(y), "reads"))

    def by_head(self, x: jax.Array) -> jax.Array:
        """[..., heads head_dim] -> [..., heads, head_dim]."""
        return x.reshape(*x.shape[:-1], self.num_heads, self.head_dim)


def _write_ring(ring: jax.Array, rows: jax.Array, positions: jax.Array) -> jax.Array:
    """`ring` [b, capacity, ...] with row t of [b, t, ...] in slot positions[t] mod capacity; the last rows win."""
    capacity = ring.shape[1]
    return ring.at[:, positions[-capacity:] % capacity].set(rows[:, -capacity:], unique_indices=True)
