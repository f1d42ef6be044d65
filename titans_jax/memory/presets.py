"""Named models as rules: one function each, with its citation."""

from __future__ import annotations

from titans_jax.memory import algorithms, architectures, biases, retentions
from titans_jax.memory.types import MemoryRule


def titans(
    depth: int = 2, expansion: int = 4, chunk_size: int = 16, residual: bool = True, momentum: bool = True
) -> MemoryRule:
    """The neural long-term memory of Titans (arXiv 2501.00663 eq 8-14; Miras Table 1, Titans-LMM).

    residual: M(x) = x + LN(MLP(x)); without it, depth 1 is the linear memory x @ W.
    """
    if residual:
        architecture = architectures.residual_mlp(depth, expansion)
    else:
        architecture = architectures.linear() if depth == 1 else architectures.mlp(depth, expansion)
    algorithm = algorithms.momentum() if momentum else algorithms.gradient_descent()
    return MemoryRule(architecture, biases.l2(), retentions.decay(), algorithm, chunk_size)
