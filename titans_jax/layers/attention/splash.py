"""Attention on TPU by JAX's splash kernel: causal over the sequence with a prefix joined to it, or under any mask.

Splash keeps the scores in VMEM and skips the blocks that the mask hides. It separates documents by equal ids, so no key
can be of all of them: the prefix, which every query sees, has a softmax of its own (`prefix_pallas`), and the two are
joined by their log-sum-exps, which gives the softmax over both.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SegmentIds, SplashAttentionKernel
from jax.sharding import PartitionSpec

from titans_jax.layers.attention.prefix_pallas import Prefix, prefix_attention
from titans_jax.layers.attention.xla import KeyValues, concatenate_time, per_device, segment_mask
from titans_jax.ops.pallas_tpu import interpreted
from titans_jax.ops.platform import KERNELS, LANES
from titans_jax.sharding import BATCH, HEADS

PADDING = -1
"""Document id of rows that do not exist."""

MASKED_QUERIES, MASKED_KEYS = 512, 1152
"""Queries of one step under a mask, and the most keys that it takes as one block: those of a MAC segment with up to 128
persistent tokens. With one block of keys, one backward kernel is enough: 1.6 times fewer cycles than in blocks of 512 x
384 (v5e)."""


def largest_block(window: int | None, row_bytes: int) -> int:
    """Queries, and keys, that one step of the kernels takes, for a head's rows of `row_bytes`: 1024 or 512.

    By scheduled cycles a step of 1024 x 1024 costs 3.3 to 3.4 steps of 512 x 512 (v5e, v6e), and a window of 2048
    takes 3.3 times fewer of them, a shorter one not as many. 2048 keys gain 1 % in full attention and lose 24 % in that
    window (v5e). With rows of 512 bytes (head_dim 256 in bfloat16) 1024 needs more than the 16 MiB that v5p gives a
    kernel.
    """
    return 512 if row_bytes >= 512 or (window is not None and window < 2048) else 1024


def splash_attention(
    queries: jax.Array,
    past: KeyValues,
    prefix: KeyValues,
    window: int | None = None,
    *,
    history_seen: int | jax.Array = 0,
    documents: jax.Array | None = None,
) -> jax.Array:
    """`api.causal_attention` as a TPU kernel, for float32 and bfloat16; each device has its own rows and heads."""
    batch, time = queries.shape[:2]
    total = past.keys.shape[1]
    ids = None
    if documents is not None:
        ids = SegmentIds(documents, documents)
    elif total > time:
        exists = jnp.arange(total, dtype=jnp.int32) >= total - time - history_seen
        key_ids = jnp.where(exists, 0, PADDING).astype(jnp.int32)
        ids = SegmentIds(jnp.zeros((batch, time), jnp.int32), jnp.broadcast_to(key_ids, (batch, total)))
    attend = functools.partial(_attend, window=window)
    return per_device(attend, PartitionSpec(None, HEADS), PartitionSpec(BATCH))(queries, past, prefix, ids)


def splash_segment_attention(
    queries: jax.Array, context: tuple[KeyValues, ...], prefix: KeyValues, index: int = 0
) -> jax.Array:
    """`api.segment_attention` as a TPU kernel, for a place in the segment that is known while the program is traced."""
    visible = segment_mask(queries, context, prefix, index)
    return per_device(functools.partial(_attend_masked, visible=visible))(queries, concatenate_time(*context, prefix))


def _attend(
    queries: jax.Array,
    past: KeyValues,
    prefix: KeyValues,
    ids: SegmentIds | None,
    *,
    window: int | None,
) -> jax.Array:
    """`splash_attention` on one device; ids: int32 [b, t] and [b, history + t], rows see keys of the same id."""
    time, heads = queries.shape[1:3]
    history = past.keys.shape[1] - time
    largest = largest_block(window, queries.shape[-1] * queries.dtype.itemsize)
    block_q, length = _equal_blocks(time, largest)
    # Every padded query has a key at its place, its own: a row that sees nothing would divide by 0.
    block_kv, total = _equal_blocks(history + length, largest)

    queries = _heads_first(queries * queries.shape[-1] ** -0.5, length)
    keys, values = (_heads_first(x, total) for x in past)
    if ids is not None:
        ids = SegmentIds(
            *(jax.lax.pad(x, PADDING, _time_padding(x, n)) for x, n in zip(ids, (length, total), strict=True))
        )

    before = None if window is None else window - 1
    mask = splash_attention_mask.LocalMask((length, total), (before, 0), history)
    kernel = _kernel(mask, heads, block_q, block_kv, save_residuals=prefix.keys.shape[0] > 0)
    if prefix.keys.shape[0] == 0:
        outputs = jax.vmap(kernel)(queries, keys, values, ids)
    else:
        beside = prefix_attention(queries, prefix, block_q)
        outputs = _join_prefix(kernel, queries, KeyValues(keys, values), ids, beside)
    return jnp.swapaxes(outputs[:, :, :time], 1, 2)


def _attend_masked(queries: jax.Array, past: KeyValues, *, visible: np.ndarray) -> jax.Array:
    """Attention to the past [b, s, h, d] on one device.

    Args:
      visible: bool [t, s], which rows of the past each query sees, the same for every row of the batch.
    """
    time, heads = queries.shape[1:3]
    fused = past.keys.shape[1] <= MASKED_KEYS
    most = MASKED_KEYS if fused else largest_block(None, queries.shape[-1] * queries.dtype.itemsize)
    block_q, length = _equal_blocks(time, MASKED_QUERIES)
    block_kv, total = _equal_blocks(past.keys.shape[1], most)
    seen = np.pad(visible, ((0, length - time), (0, 0)), mode="edge")  # a row that sees nothing would divide by 0
    seen = np.pad(seen, ((0, 0), (0, total - visible.shape[1])))
    mask = splash_attention_mask.NumpyMask(seen)
    kernel = _kernel(mask, heads, block_q, block_kv, fused=fused)
    queries = _heads_first(queries * queries.shape[-1] ** -0.5, length)
    outputs = jax.vmap(kernel)(queries, *(_heads_first(x, total) for x in past))
    return jnp.swapaxes(outputs[:, :, :time], 1, 2)


def _kernel(
    mask: splash_attention_mask.Mask,
    heads: int,
    block_q: int,
    block_kv: int,
    *,
    fused: bool = False,
    save_residuals: bool = False,
) -> SplashAttentionKernel:
    """Splash under one mask for all heads.

    Args:
      fused: one backward kernel, for keys that are one block.
      save_residuals: return the log-sum-exps too.
    """
    # Rows of 64 numbers waste half of every tile, so XLA lays activations out with time last; kernels that take them so
    # save the copies (a sixth of a layer's cycles at head_dim 64) and a third of the memory.
    time_last = splash_attention_kernel.QKVLayout.SEQ_MINOR
    return splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_q_dq=None if fused else block_q,
            block_kv_dq=None if fused else block_kv,
            use_fused_bwd_kernel=fused,
            q_layout=time_last,
            k_layout=time_last,
            v_layout=time_last,
        ),
        head_shards=1,
        q_seq_shards=1,
        save_residuals=save_residuals,
        residual_checkpoint_name=KERNELS,
        interpret=interpreted(),
    )


@jax.custom_vjp
def _join_prefix(
    kernel: SplashAttentionKernel, queries: jax.Array, past: KeyValues, ids: SegmentIds | None, prefix: Prefix
) -> jax.Array:
    """Attention [b, h, t, d] over the keys [b, h, s, d] that `kernel` shows and over a prefix."""
    return _join_prefix_forward(kernel, queries, past, ids, prefix)[0]


def _join_prefix_forward(
    kernel: SplashAttentionKernel, queries: jax.Array, past: KeyValues, ids: SegmentIds | None, prefix: Prefix
) -> tuple[jax.Array, Any]:
    outputs, (sums,) = jax.vmap(kernel)(queries, *past, ids)
    total = jnp.logaddexp(sums, prefix.sums)
    share, prefix_share = (jnp.exp(x - total)[..., None] for x in (sums, prefix.sums))
    joined = share * outputs.astype(jnp.float32) + prefix_share * prefix.outputs.astype(jnp.float32)
    joined = joined.astype(outputs.dtype)
    return joined, (kernel, queries, past, ids, prefix, joined, total)


def _join_prefix_backward(residuals: Any, cotangent: jax.Array) -> tuple:
    """The flash backward with the joined output and log-sum-exp, of which the kernel's keys are one part.

    Splash's log-sum-exp has no gradient of its own, but its backward kernels read weights as exp(logit - log-sum-exp)
    and the mean of the weights' cotangents from the output: given those of the join, they differentiate the join. The
    prefix is one key more, whose logit is its log-sum-exp and whose value is its output.
    """
    kernel, queries, past, ids, prefix, joined, total = residuals
    static = {name: value for name, value in kernel.kwargs.items() if name != "save_residuals"}
    backward = functools.partial(splash_attention_kernel._splash_attention_bwd, False, **static)

    def one_row(
        queries: jax.Array, past: KeyValues, ids: SegmentIds | None, joined: jax.Array, total: jax.Array, d: jax.Array
    ) -> tuple[jax.Array, KeyValues]:
        masks = kernel.dq_mask_info, kernel.dkv_mask_info
        d_queries, *d_past = backward(res=(queries, *past, ids, None, joined, total, *masks), do=d)[3:6]
        return d_queries, KeyValues(*d_past)

    gradients = jax.vmap(one_row)(queries, past, ids, joined, total, cotangent)
    wide = cotangent.astype(jnp.float32)
    share = jnp.exp(prefix.sums - total)
    above = prefix.outputs.astype(jnp.float32) - joined.astype(jnp.float32)
    d_prefix = Prefix((share[..., None] * wide).astype(prefix.outputs.dtype), share * jnp.sum(wide * above, axis=-1))
    return None, *gradients, None, d_prefix


_join_prefix.defvjp(_join_prefix_forward, _join_prefix_backward)


def _equal_blocks(time: int, largest: int) -> tuple[int, int]:
    """The size of equal blocks that hold `time` with the least padding, and the time they hold together."""
    blocks = -(-time // largest)
    block = -(-time // (blocks * LANES)) * LANES
    return block, blocks * block


def _heads_first(x: jax.Array, length: int) -> jax.Array:
    """[b, t, h, d] -> [b, h, length, d]."""
    return jnp.swapaxes(jax.lax.pad(x, jnp.zeros((), x.dtype), _time_padding(x, length)), 1, 2)


def _time_padding(x: jax.Array, length: int) -> list[tuple[int, int, int]]:
    """The padding of [b, t, ...] at the end of time, up to `length`, for jax.lax.pad."""
    return [(0, 0, 0), (0, length - x.shape[1], 0), *[(0, 0, 0)] * (x.ndim - 2)]
