"""The projection of queries on the keys of their shard (TNT, arXiv 2511.07343, eq 7 and appendix C).

    P_t = sum of k_j k_j^T / ||k_j||^2 over the tokens j <= t of t's shard ,      P_t q_t

That is linear attention whose values are keys over their squared norm, without gates. It is no projector in the strict
sense: P P = P holds only for keys at right angles.

Shapes: b batch, t time, h heads, d head_dim.
"""

import jax
import jax.numpy as jnp

from titans_jax.ops.matmul import transposed_operand, wide_dtype

BLOCK = 128
"""Tokens whose products with each other are taken at once; never changes the numbers beyond rounding."""
SMALLEST_KEY = 1e-6
"""The least squared norm that a key is divided by."""


def key_projection(
    queries: jax.Array,
    keys: jax.Array,
    mask: jax.Array | None,
    before: jax.Array,
    shards: jax.Array | None = None,
    first: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """P_t q_t of every token, [b, t, h, d] in the queries' dtype, and P after the last one.

    Args:
      queries, keys: [b, t, h, d]. mask: bool [b, t], False at padding, which is in no sum.
      before: P of the tokens before, [b, h, d, d], in the dtype of sums.
      shards: the number of every token's shard, int32 [t], 0 for the shard of `before`; None: all are in that shard.
      first: P at the start of every other shard, [h, d, d]; with shards.
    """
    batch, time, heads, width = keys.shape
    dtype = wide_dtype(keys.dtype)
    size = min(BLOCK, time)
    keys = keys if mask is None else jnp.where(mask[..., None, None], keys, 0)
    wide = keys.astype(dtype)
    square = jnp.maximum(jnp.sum(jnp.square(wide), axis=-1, keepdims=True), SMALLEST_KEY)
    values = (wide / square).astype(keys.dtype)

    def blocks(x: jax.Array) -> jax.Array:
        """[b, t, ...] as [blocks, b, tokens, ...], with zeros behind: a key of zeros adds nothing."""
        x = jnp.pad(x, [(0, 0), (0, -time % size)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, -1, size, *x.shape[2:]), 1, 0)

    def product(equation: str, *operands: jax.Array) -> jax.Array:
        operands = (transposed_operand(x.astype(keys.dtype)) for x in operands)
        return jnp.einsum(equation, *operands, precision="highest", preferred_element_type=dtype)

    earlier = jnp.tril(jnp.ones((size, size), bool))

    def one(carry: tuple[jax.Array, jax.Array], block: tuple) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        (P, shard), (q, k, v, shards) = carry, block
        seen, own = earlier, v
        reads = product("bthd,bhde->bthe", q, P)
        if shards is not None:
            fresh = product("bthd,hde->bthe", q, first)
            reads = jnp.where((shards == shard)[None, :, None, None], reads, fresh)
            seen = earlier & (shards[:, None] == shards[None, :])
            own = jnp.where((shards == shards[-1])[None, :, None, None], v, 0)
            P = jnp.where(shards[-1] == shard, P, first[None])
            shard = shards[-1]
        scores = jnp.where(seen[None, None], product("bthd,bshd->bhts", q, k), 0)
        reads = reads + product("bhts,bshe->bthe", scores, v)
        return (P + product("bshd,bshe->bhde", k, own), shard), reads

    if shards is not None:
        shards = jnp.pad(shards, (0, -time % size), mode="edge").reshape(-1, size)
    carry = before.astype(dtype), jnp.zeros((), jnp.int32)
    (after, _), reads = jax.lax.scan(
        jax.checkpoint(one, prevent_cse=False), carry, (*map(blocks, (queries, keys, values)), shards)
    )
    reads = jnp.moveaxis(reads, 0, 1).reshape(batch, -1, heads, width)[:, :time]
    return reads.astype(queries.dtype), after
