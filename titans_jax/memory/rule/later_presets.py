"""Models that came after Miras' Table 1, as presets: linear recurrent ones, and the memories of Hope.

The linear ones start from zero and take every token as a chunk of its own, exact in every form. Around them is the
backbone that all memories here share, not that of their papers: a short convolution and SiLU (Mamba-3 has neither), a
norm and a SiLU gate behind the read (Kimi's and Gated DeltaNet-2's gates are sigmoids of low rank, Mamba-3's norm is an
option), keys and queries for every head (in Mamba-3 all heads share them, but for their bias), and channel-wise
gates through a low rank (Gated DeltaNet-2's b and w are of full rank).
"""

from __future__ import annotations

from titans_jax.memory.rule import algorithms, architectures, biases, retentions
from titans_jax.memory.rule.gate_choices import GateChoices
from titans_jax.memory.rule.presets import gated_deltanet, matrix, register_preset
from titans_jax.memory.rule.rule import MemoryRule


@register_preset(gates=GateChoices(step_size="sigmoid", key="rate"))
def kimi_delta_attention() -> MemoryRule:
    """Diag(a) W - step k^T (k Diag(a) W - v): Gated DeltaNet that forgets by key channel (arXiv 2510.26692).

    The retention a is Mamba2's, with a rate for every head and a step for every channel.
    """
    return gated_deltanet()


@register_preset(gates=GateChoices("rate", "sigmoid", erase="head", corrected_queries=True))
def comba() -> MemoryRule:
    """a W - step k^T (p a W - v) with p = b k, read with q - d k (arXiv 2506.02475).

    a and step are as in Gated DeltaNet; b, a sigmoid, and d are learned numbers, one per head. The equations are from
    secondary notes and public code.
    """
    return gated_deltanet()


@register_preset(gates=GateChoices(key="rate", erase="channels"))
def gated_deltanet_2() -> MemoryRule:
    """Diag(a) W - k^T ((b * k) Diag(a) W - w * v): erasing and writing have gates of their own (arXiv 2605.22791).

    a is as in Kimi's; b, for every key channel, and w, for every value channel, are sigmoids. With b = w = step it is
    Kimi's rule. The equation is from secondary notes and public code.
    """
    return gated_deltanet()


@register_preset(gates=GateChoices("rate", "sigmoid", preconditioned=True))
def preconditioned_delta() -> MemoryRule:
    """a W - step (m * k)^T (k a W - v): Gated DeltaNet whose written key is preconditioned (arXiv 2604.21100).

    m is in `key_step_size`; `titans_jax.layers.preconditioner` has its equations and their source.
    """
    return gated_deltanet()


@register_preset(gates=GateChoices(step_size="sigmoid", key="rate", preconditioned=True))
def preconditioned_kimi() -> MemoryRule:
    """Diag(a) W - step (m * k)^T (k Diag(a) W - v): Kimi Delta Attention, preconditioned (arXiv 2604.21100)."""
    return gated_deltanet()


@register_preset(gates=GateChoices(keys="rotated"))
def mamba3() -> MemoryRule:
    """a W + (1 - l) step a k_before^T v_before + l step k^T v, keys turned by phases (arXiv 2603.15569, SISO).

    Two inner steps, first that of the token before, then the token's own; `titans_jax.layers.rotation` has the
    equations and their source.
    """
    return mamba3_mimo(mimo_rank=1)


@register_preset(gates=GateChoices(keys="rotated"))
def mamba3_mimo(mimo_rank: int = 4) -> MemoryRule:
    """a W + sum_j (1 - l) step a k_before,j^T v_before,j + l step k_j^T v_j (arXiv 2603.15569, MIMO): a token has
    `mimo_rank` keys, queries and values, whose reads are mixed; with 1 it is `mamba3`.

    Two inner steps for each key, first those of the token before; `titans_jax.layers.rotation` has the equations.
    Raises ValueError for a rank that is no integer of 1 or more.
    """
    if not isinstance(mimo_rank, int) or mimo_rank < 1:
        raise ValueError(f"mimo_rank is {mimo_rank!r}: a token has an integer of 1 or more keys, for example 4.")
    return matrix(biases.dot_product(), algorithms.gradient_descent(steps=2 * mimo_rank))


@register_preset(gates=GateChoices("forget", "bounded_lowest"))
def hope(depth: int = 2, expansion: int = 4, chunk_size: int = 16) -> MemoryRule:
    """x + LN(MLP(x)) by delta gradient descent with decay, without momentum (Nested Learning, arXiv 2512.24695).

    The block "hope" has five of these in every head, which make one another's keys, values and gates
    (`titans_jax.layers.self_referential`). The paper's memories have no norm (`architectures.skip_mlp`); the equations
    are from secondary notes, not checked against the print.
    """
    architecture = architectures.residual_mlp(depth, expansion)
    return MemoryRule(architecture, biases.l2(), retentions.decay(), algorithms.delta_gradient_descent(), chunk_size)
