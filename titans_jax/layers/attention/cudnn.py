"""Attention on NVIDIA GPUs by cuDNN's flash kernels, which never write the logits to memory, for float16 and bfloat16.

cuDNN knows neither a prefix nor documents. The prefix becomes rows in front of the sequence, so that causal attention
sees it, and what else is hidden becomes a mask, which cuDNN adds to the logits as it goes.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from titans_jax.layers.attention.xla import KeyValues, concatenate_time, per_device, segment_mask
from titans_jax.ops.backend import current_backend
from titans_jax.sharding import BATCH, HEADS

LARGEST_HEAD = 128
"""The widest head of cuDNN's kernels on all GPUs that they run on."""
OLDEST = 8
"""Compute capability from which on cuDNN has them: A100, L4, H100, but no T4."""


def supports_causal(
    queries: jax.Array,
    past: KeyValues,
    prefix: KeyValues,
    window: int | None = None,
    *,
    history_seen: int | jax.Array = 0,
    documents: jax.Array | None = None,
) -> bool:
    """Whether cuDNN runs these arguments of `api.causal_attention`: a sequence without history."""
    time = queries.shape[1]
    return time > 1 and past.keys.shape[1] == time and _supports(queries, prefix.keys.shape[0] + time)


def supports_segment(
    queries: jax.Array, context: tuple[KeyValues, ...], prefix: KeyValues, index: int | jax.Array = 0
) -> bool:
    """Whether cuDNN runs these arguments of `api.segment_attention`."""
    keys = prefix.keys.shape[1] + sum(part.keys.shape[1] for part in context)
    return queries.shape[1] % 2 == 0 and _supports(queries, keys)


def _supports(queries: jax.Array, keys: int) -> bool:
    """Its kernels take 16-bit rows of whole 16 bytes; with a mask, even numbers of queries and keys."""
    sixteen_bits = queries.dtype in (jnp.bfloat16, jnp.float16)
    head_dim = queries.shape[-1]
    fits = sixteen_bits and head_dim % 8 == 0 and head_dim <= LARGEST_HEAD and keys % 2 == 0
    return current_backend().cudnn and fits and _new_enough()


def _new_enough() -> bool:
    """Whether the GPUs here have the kernels; True where there are none, and the program's are only described."""
    if jax.default_backend() != "gpu":
        return True
    generation = jax.local_devices()[0].compute_capability.partition(".")[0]
    return generation.isdecimal() and int(generation) >= OLDEST  # AMD's are called gfx942, say


def flash_attention(
    queries: jax.Array,
    past: KeyValues,
    prefix: KeyValues,
    window: int | None = None,
    *,
    history_seen: int | jax.Array = 0,
    documents: jax.Array | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """`api.causal_attention` of a sequence without history; each device has its own rows and heads.

    Args:
      implementation: of `jax.nn.dot_product_attention`; "xla" runs everywhere.
    """
    attend = functools.partial(_attend_causal, window=window, implementation=implementation)
    return per_device(attend, PartitionSpec(None, HEADS), PartitionSpec(BATCH))(queries, past, prefix, documents)


def flash_segment_attention(
    queries: jax.Array,
    context: tuple[KeyValues, ...],
    prefix: KeyValues,
    index: int | jax.Array = 0,
    *,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """`api.segment_attention`; each device has its own rows and heads. implementation: as in `flash_attention`."""
    visible = jnp.asarray(segment_mask(queries, context, prefix, index))[None, None]

    def attend(queries: jax.Array, past: KeyValues, visible: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(queries, *past, mask=visible, implementation=implementation)

    return per_device(attend, PartitionSpec())(queries, concatenate_time(*context, prefix), visible)


def _attend_causal(
    queries: jax.Array,
    past: KeyValues,
    prefix: KeyValues,
    documents: jax.Array | None,
    *,
    window: int | None,
    implementation: Literal["cudnn", "xla"],
) -> jax.Array:
    """`flash_attention` on one device."""
    batch, time = queries.shape[:2]
    num_prefix = prefix.keys.shape[0]

    def behind_prefix(prefix: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.concatenate([jnp.broadcast_to(prefix, (batch, *prefix.shape)), rows], axis=1)

    # Queries for the rows of the prefix too, so that the causal mask is that of a square; their outputs are cut off.
    queries = jnp.pad(queries, ((0, 0), (num_prefix, 0), (0, 0), (0, 0)))
    keys, values = (behind_prefix(*rows) for rows in zip(prefix, past, strict=True))
    mask = _mask(time, num_prefix, window, documents)
    outputs = jax.nn.dot_product_attention(
        queries, keys, values, mask=mask, is_causal=True, implementation=implementation
    )
    return outputs[:, num_prefix:]


def _mask(time: int, num_prefix: int, window: int | None, documents: jax.Array | None) -> jax.Array | None:
    """What causal attention to [prefix | sequence] must not see besides: bool [b or 1, 1, n + t, n + t], True where it
    may; None where it may see everything."""
    visible = None
    if window is not None and window < time:
        place = jnp.arange(time, dtype=jnp.int32)
        visible = (place[:, None] - place[None] < window)[None]
    if documents is not None:
        same = documents[:, :, None] == documents[:, None]
        visible = same if visible is None else visible & same
    if visible is None:
        return None
    return jnp.pad(visible, ((0, 0), (num_prefix, 0), (num_prefix, 0)), constant_values=True)[:, None]
