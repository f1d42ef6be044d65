"""What differs between machines that run the same formulas: one `Backend` each, chosen once at the entry of a form.

A backend changes no result beyond rounding. A new one (a GPU's own, say) is one more object here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax

from titans_jax.ops import channel_decay, channel_decay_pallas, matmul, solve_tril
from titans_jax.ops.platform import LANES, target_platform


class BlockSize(NamedTuple):
    """tokens: how many tokens a block has, which one triangular solve takes at once. group: how many blocks are
    prepared together, and rematerialised together in the backward pass."""

    tokens: int
    group: int


@dataclasses.dataclass(frozen=True)
class Backend:
    """How one kind of machine runs the memory's formulas fastest.

    name: "cpu", "gpu", "tpu" (XLA's programs) or "pallas" (inside a TPU kernel).
    pallas: whether Pallas TPU kernels compile for it.
    cudnn: whether it has cuDNN's attention.
    decay_tile: tokens of a tile in which products of gates are computed; None: a whole block at once.
    delta_rule, gated_delta_rule: block sizes of a linear memory with scalar gates, and with channel-wise gates.
    read_tile: tokens of a tile in which a read that takes many products is done; None: a whole chunk at once.
    parallel_scan: whether `selective_scan` takes the tokens of a chunk by a parallel scan; else one after the other.
    number_lanes: width of the row that holds a number by which a matrix is scaled: a kernel has no scalars.
    broadcast_column: (column [n, 1], width) -> [n, width].
    weighted_outer_products: see `matmul.weighted_outer_products`.
    inverse: (strictly lower [n, n], operand dtype) -> (I + lower)^-1.
    channel_decay: (log gates [tokens, channels], visible or None) -> an object with the methods of
      `channel_decay.ChannelDecay`.
    unrolled: whether loops inside a step are written out, since there is no gradient of loops.
    missing: operations that the backend lacks, by the names used in the `operations` of a rule's parts.
    """

    name: str
    broadcast_column: Callable[[jax.Array, int], jax.Array]
    weighted_outer_products: Callable[..., list]
    inverse: Callable[[jax.Array, jax.typing.DTypeLike], jax.Array]
    channel_decay: Callable[..., channel_decay.ChannelDecay | channel_decay_pallas.ChannelDecay]
    pallas: bool = False
    cudnn: bool = False
    decay_tile: int | None = None
    delta_rule: BlockSize = BlockSize(64, 8)
    gated_delta_rule: BlockSize = BlockSize(64, 8)
    read_tile: int | None = None
    parallel_scan: bool = True
    number_lanes: int = 1
    unrolled: bool = False
    missing: frozenset[str] = frozenset()


TPU = Backend(
    name="tpu",
    pallas=True,
    broadcast_column=matmul.broadcast_column,
    weighted_outer_products=matmul.weighted_outer_products,
    inverse=solve_tril.inverse,
    channel_decay=channel_decay.ChannelDecay,
)
# Small tiles take fewer exponentials; on a TPU they would not fill the lanes.
GPU = dataclasses.replace(TPU, name="gpu", pallas=False, cudnn=True, decay_tile=16)
# A core's cache holds shorter blocks only. Channel-wise decay takes work at every halving of a block: shorter still.
CPU = dataclasses.replace(
    GPU,
    name="cpu",
    cudnn=False,
    delta_rule=BlockSize(32, 4),
    gated_delta_rule=BlockSize(16, 8),
    read_tile=16,
    parallel_scan=False,
    broadcast_column=matmul.broadcast_column_by_product,
    weighted_outer_products=matmul.weighted_outer_products_of_columns,
    channel_decay=channel_decay.ChannelDecayByProducts,
)
PALLAS = Backend(
    name="pallas",
    pallas=True,
    number_lanes=LANES,
    unrolled=True,
    broadcast_column=matmul.broadcast_column,
    weighted_outer_products=matmul.weighted_outer_products,
    inverse=solve_tril.inverse_in_kernel,
    channel_decay=channel_decay_pallas.ChannelDecay,
    missing=frozenset({"arctan", "array_constant", "custom_linear_solve", "lag_token", "start_weights"}),
)


def current_backend() -> Backend:
    """The XLA backend (not that of a kernel) for the platform that the program being traced will run on."""
    return {"cpu": CPU, "gpu": GPU, "tpu": TPU}[target_platform()]
