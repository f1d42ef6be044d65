"""Rows of tokens cut into segments, which a scan takes one by one, and joined again."""

import jax
import jax.numpy as jnp


def to_segments(count: int, segment: int, rows: jax.Array) -> jax.Array:
    """[b, t, ...] to its first `count` segments, [count, b, segment, ...]."""
    whole = rows[:, : count * segment].reshape(-1, count, segment, *rows.shape[2:])
    return jnp.moveaxis(whole, 1, 0)


def from_segments(segments: jax.Array) -> jax.Array:
    """[count, b, segment, ...] as rows [b, count * segment, ...]."""
    count, batch, segment = segments.shape[:3]
    return jnp.moveaxis(segments, 0, 1).reshape(batch, count * segment, *segments.shape[3:])


def flags_like(flags: jax.Array, leaf: jax.Array) -> jax.Array:
    """[b] with trailing axes, to broadcast against leaf [b, ...]."""
    return flags.reshape(-1, *(1,) * (leaf.ndim - 1))


def report_of_tokens(report: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The report of a piece that was read token by token: leaves [t, b, 1] to [b, t], weight_norm that of the last."""
    return {n: r[-1] if n == "weight_norm" else jnp.moveaxis(r[..., 0], 0, 1) for n, r in report.items()}
