"""What differs between machines that run the same formulas: one `Backend` each, chosen once at the entry of a form.

A backend never changes what is computed beyond rounding. A new one (a GPU's own, say) is one more object here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax

from titans_jax.ops import channel_decay, channel_decay_pallas, matmul, solve_tril
from titans_jax.ops.platform import LANES, target_platform


class BlockSize(NamedTuple):
    """tokens: of a block, which one triangular solve takes at once. group: blocks that are prepared together, and
    rematerialised together in the backward pass."""

    tokens: int
    group: int


@dataclasses.dataclass(frozen=True)
class Backend:
    """How one kind of machine runs the memory's formulas fastest.

    name: "cpu", "gpu", "tpu" (XLA's programs) or "pallas" (inside a TPU kernel).
    pallas: whether Pallas TPU kernels compile for it.
    decay_tile: tokens of a tile in which products of gates are made; None makes a whole block at once.
    delta_rule, gated_delta_rule: how a linear memory's tokens are cut, with scalar gates and with gates of every
      channel.
    read_tile: tokens of a tile in which a read of many products is done; None reads a whole chunk at once.
    number_lanes: width of the row that a number which scales a matrix fills: a kernel has no scalars.
    broadcast_column: (column [n, 1], width) -> [n, width].
    weighted_outer_products: see `matmul.weighted_outer_products`.
    inverse: (strictly lower [n, n], operand dtype) -> (I + lower)^-1.
    channel_decay: (log gates [tokens, channels], visible or None) -> an object with the methods of
      `channel_decay.ChannelDecay`.
    missing: operations that it has not, by the names that the `operations` of a rule's parts use.
    """

    name: str
    broadcast_column: Callable[[jax.Array, int], jax.Array]
    weighted_outer_products: Callable[..., list]
    inverse: Callable[[jax.Array, jax.typing.DTypeLike], jax.Array]
    channel_decay: Callable[..., channel_decay.ChannelDecay | channel_decay_pallas.ChannelDecay]
    pallas: bool = False
    decay_tile: int | None = None
    delta_rule: BlockSize = BlockSize(64, 8)
    gated_delta_rule: BlockSize = BlockSize(64, 8)
    read_tile: int | None = None
    number_lanes: int = 1
    missing: frozenset[str] = frozenset()


TPU = Backend(
    name="tpu",
    pallas=True,
    broadcast_column=matmul.broadcast_column,
    weighted_outer_products=matmul.weighted_outer_products,
    inverse=solve_tril.inverse,
    channel_decay=channel_decay.ChannelDecay,
)
# Small tiles take fewer exponentials; a TPU's lanes are not filled by one.
GPU = dataclasses.replace(TPU, name="gpu", pallas=False, decay_tile=16)
# Shorter blocks are what a core's cache holds. Channels that decay apart take work at every halving of a block.
CPU = dataclasses.replace(
    GPU,
    name="cpu",
    delta_rule=BlockSize(32, 4),
    gated_delta_rule=BlockSize(16, 8),
    read_tile=16,
    broadcast_column=matmul.broadcast_column_by_product,
    weighted_outer_products=matmul.weighted_outer_products_of_columns,
    channel_decay=channel_decay.ChannelDecayByProducts,
)
PALLAS = Backend(
    name="pallas",
    pallas=True,
    number_lanes=LANES,
    broadcast_column=matmul.broadcast_column,
    weighted_outer_products=matmul.weighted_outer_products,
    inverse=solve_tril.inverse_in_kernel,
    channel_decay=channel_decay_pallas.ChannelDecay,
    missing=frozenset({"arctan", "array_constant", "custom_linear_solve", "lag_token", "start_weights"}),
)


def current_backend() -> Backend:
    """The backend of XLA's programs for what the program that is being traced will run on."""
    return {"cpu": CPU, "gpu": GPU, "tpu": TPU}[target_platform()]
