"""A memory rule: the four choices of Miras and a chunk size."""

from __future__ import annotations

import dataclasses

from titans_jax.memory.rule.algorithms import Algorithm
from titans_jax.memory.rule.architectures import Architecture
from titans_jax.memory.rule.biases import AttentionalBias
from titans_jax.memory.rule.retentions import Retention


@dataclasses.dataclass(frozen=True)
class MemoryRule:
    """The four choices of Miras (network, inner loss, forgetting, descent) and the chunk size.

    chunk_size is part of the model (Titans eq 16; memory/README.md, Chunks and anchors): inner gradients are taken at
    the memory of the chunk's start.
    learned_start: the memory starts from learned weights (Titans, TTT, Miras) or from zero (linear recurrent models).
    forget_to_start: the state carries the change since the learned start, D = A - A_0, and retention acts on it alone:
    forgetting leads back to what was learned in training, not to zero. It is Miras' retention gate with R = ||W -
    M_0||^2 in place of ||W||^2 (memory/README.md, Forgetting to the start).
    orthogonal_start: the start's matrices are orthogonal, else their entries are independent (`init_params`).
    stale: every token reads the memory of its chunk's start and no write of its own chunk, which may then be long (the
    global memory of TNT, arXiv 2511.07343).
    bound_slope: where the norm behind the last matrix is steeper than at a fresh memory, a token's gradient is made
    smaller: it is multiplied by min(1, v / v_0), v the variance of the norm's input for the token's key, v_0 that at a
    fresh memory (memory/README.md, Gates).
    Raises ValueError for choices that exclude each other.
    """

    architecture: Architecture
    bias: AttentionalBias
    retention: Retention
    algorithm: Algorithm
    chunk_size: int
    learned_start: bool = True
    forget_to_start: bool = False
    bound_slope: bool = False
    orthogonal_start: bool = True
    stale: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.chunk_size, int) or self.chunk_size < 1:
            raise ValueError(f"chunk_size is {self.chunk_size!r}: it must be an integer of 1 or more, for example 16.")
        kinds = {
            "architecture": Architecture,
            "bias": AttentionalBias,
            "retention": Retention,
            "algorithm": Algorithm,
        }
        for field, kind in kinds.items():
            if not isinstance(getattr(self, field), kind):
                raise ValueError(
                    f"{field} is {getattr(self, field)!r}: it must be a value that {kind.__module__} makes."
                )
        if self.forget_to_start and (not self.learned_start or self.retention.lags or self.algorithm.keeps_statistics):
            raise ValueError(
                "forget_to_start is True: it needs a learned start, a retention gate without a lag token and an "
                "algorithm that keeps no statistics; use False."
            )
        if self.bound_slope and not self.architecture.slope_known:
            raise ValueError(
                f"bound_slope is True: it needs a memory with a norm and a start_variance, unlike {self.architecture}; "
                "use False."
            )
        if self.retention.positive and not self.architecture.normalized:
            raise ValueError(
                f"retention is {self.retention}: its weights are positive, and {self.architecture} needs negative "
                "ones; use residual_mlp, whose norm takes the mean out, or decay()."
            )
        plain = self.architecture.linear and self.bias.affine and self.retention.linear
        if self.algorithm.linear_only and not plain:
            raise ValueError(
                f"algorithm is {self.algorithm}: it is defined for a linear memory with an L2 bias and decay; use "
                "gradient_descent() or momentum() for any other."
            )
        if self.algorithm.decay_first and self.chunk_size > 1:
            raise ValueError(
                f"chunk_size is {self.chunk_size}: the algorithm, {self.algorithm}, takes every gradient at the memory "
                "that the token's own retention leaves; it must be 1."
            )
        algorithm = self.algorithm
        plain_descent = algorithm.descends and not algorithm.decay_first and algorithm.steps == algorithm.window == 1
        plain_descent = plain_descent and not algorithm.steps_by_chunk
        if self.stale and not (plain_descent and not self.retention.lags):
            raise ValueError(
                f"stale is True: it needs gradients at the chunk's start, one a token, unlike {algorithm} with "
                f"{self.retention}; use gradient_descent() or momentum(), and no lag token."
            )
        window = self.algorithm.window
        if window > self.chunk_size:
            raise ValueError(
                f"window is {window}: a window reaches at most into the chunk before, so it must be in [1, "
                f"{self.chunk_size}], the chunk_size."
            )
        if window > 1 and (self.bias.takes_gate or not self.retention.one_slope or self.retention.lags):
            raise ValueError(
                f"window is {window}: it needs a bias without a gate of its own and a retention whose reads have one "
                f"slope, unlike {self.bias} with {self.retention}; use a window of 1, or l2() and decay()."
            )
        if self.algorithm.steps_by_chunk and (not self.retention.one_slope or self.retention.lags):
            raise ValueError(
                f"algorithm is {self.algorithm}: a memory that moves once a chunk needs a retention whose reads have "
                f"one slope, unlike {self.retention}; use decay()."
            )

    @property
    def exact(self) -> bool:
        """Whether the parallel forms give the token-by-token rule: its gradients do not depend on where they are taken,
        or every token is a chunk of its own."""
        hebbian = self.architecture.linear and self.bias.constant_slope == 0 and self.algorithm.descends
        hebbian = hebbian and self.retention.linear and not self.algorithm.steps_by_chunk
        return self.chunk_size == 1 or self.algorithm.keeps_statistics or hebbian

    def shapes(self, head_dim: int) -> tuple[tuple[int, int], ...]:
        """[in, out] of every fast matrix."""
        return self.algorithm.shapes(self.architecture, head_dim)

    def start_variance(self, head_dim: int) -> float:
        """`Architecture.start_variance` of the weights that the retention gate makes of the drawn ones."""
        sizes = [self.retention.start_size(shape) for shape in self.shapes(head_dim)]
        return self.architecture.start_variance(head_dim, sizes)
