"""Presets of the ATLAS paper (arXiv 2505.23735) beside OmegaNet, and LaCT (arXiv 2505.23884), whose steps are made
orthogonal too.

ATLAS' equations are from secondary notes; LaCT's also from its public code.
"""

from __future__ import annotations

from titans_jax.memory.rule import algorithms, architectures, biases, retentions
from titans_jax.memory.rule.gate_choices import FORGET_BIAS, GateChoices
from titans_jax.memory.rule.presets import WINDOW, register_preset
from titans_jax.memory.rule.rule import MemoryRule


# These steps do not shrink with the error, so half of the largest is too far at first (memory/later_models.md).
@register_preset(gates=GateChoices("forget", "bounded_low", forget_bias=FORGET_BIAS))
def atlas(omega_window: int | None = None, depth: int = 2, expansion: int = 4, chunk_size: int = 16) -> MemoryRule:
    """ATLAS (arXiv 2505.23735): OmegaNet with momentum, which takes one orthogonal step (Newton-Schulz) along its
    momentum at every chunk's end; the paper's step at every token is chunk_size 1.

    omega_window: None is 16, or the chunk where that is shorter. With the architecture `residual_gated_mlp` in place of
    this one it is Atlas++.
    """
    algorithm = algorithms.muon(min(WINDOW, chunk_size) if omega_window is None else omega_window)
    return MemoryRule(
        architectures.residual_mlp(depth, expansion), biases.l2(), retentions.decay(), algorithm, chunk_size
    )


@register_preset(gates=GateChoices("forget", "bounded", forget_bias=FORGET_BIAS))
def dla(omega_window: int | None = None, depth: int = 2, expansion: int = 4, chunk_size: int = 16) -> MemoryRule:
    """Deep linear attention (ATLAS, arXiv 2505.23735): a deep memory that descends -<M(k), v>, as linear attention does
    with a matrix.

    omega_window: tokens whose losses are descended together; None is 1. With more it is the sliding-window version.
    """
    algorithm = algorithms.gradient_descent() if omega_window in (None, 1) else algorithms.omega(omega_window)
    return MemoryRule(
        architectures.residual_mlp(depth, expansion), biases.dot_product(), retentions.decay(), algorithm, chunk_size
    )


# 2 sigmoid: at first the step is the matrix of singular values near 1 itself, as in LaCT's code.
@register_preset(gates=GateChoices(step_size="double"))
def lact(expansion: int = 4, chunk_size: int = 16) -> MemoryRule:
    """LaCT (arXiv 2505.23884): SwiGLU fast weights that descend -<M(k), v> by one orthogonal step a chunk, after which
    every unit's incoming weights get their norm back. The paper's chunks have 2,048 tokens, its expansion is 1.
    """
    algorithm = algorithms.muon(coefficients="lact", momentum_by_chunk=True)
    return MemoryRule(
        architectures.gated_mlp(expansion), biases.dot_product(), retentions.weight_norm(), algorithm, chunk_size
    )
