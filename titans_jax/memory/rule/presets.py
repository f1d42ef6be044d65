"""Named models as rules with their gates: the rows of Miras' Table 1, its three models among them, Mesa and OmegaNet.
The table's Transformer, whose memory grows with the text, is a block (`titans_jax.models`).

`PRESETS` holds a `Preset` under each name, in the table's order: a function that makes its rule, and its gate choices.
How a model makes keys and values (HGRN2's key is 1 - retention) is in its docstring and its gate choices, and is done
in `titans_jax.layers`. The models with a matrix memory start from zero and take every token as a chunk of its own, so
all their forms are exact. A preset of your own is a function like these:

    @register_preset(gates=GateChoices("forget", "sigmoid"))
    def fading_memory() -> MemoryRule: ...
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

from titans_jax.memory.rule import algorithms, architectures, biases, retentions
from titans_jax.memory.rule.gate_choices import FORGET_BIAS, GateChoices
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.registry import Registry


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model by name: make(**choices) -> its rule, and the choices that make its gates from a token.

    The arguments of `make` that are fields of `titans_jax.config.MemoryConfig` too (depth, expansion, chunk_size, p, q,
    steps, mimo_rank, omega_window) are set by it.
    """

    name: str
    make: Callable[..., MemoryRule]
    gates: GateChoices = GateChoices()


PRESETS: Registry[Preset] = Registry("preset")
"""Presets by name."""

Make = Callable[..., MemoryRule]


def register_preset(name: str | None = None, gates: GateChoices = GateChoices()) -> Callable[[Make], Make]:  # noqa: B008
    """A decorator that adds a function returning a rule to `PRESETS`, under `name` or its own, and returns it.

    Raises ValueError for a name that is taken.
    """
    file = sys._getframe(1).f_code.co_filename

    def add(make: Make) -> Make:
        PRESETS.add(name or make.__name__, Preset(name or make.__name__, make, gates), file)
        return make

    return add


WINDOW = 16
"""Tokens of the Omega rule's window: the longest that ATLAS tries, and the best."""
MIRAS = GateChoices("forget", "bounded", "forget", "forget", channel_steps=True, forget_bias=FORGET_BIAS)
"""The gates of Miras' own models."""


@register_preset(gates=GateChoices("retnet"))
def retnet() -> MemoryRule:
    """a W + k^T v with a constant a = 1 - 2^(-5-h) of head h (arXiv 2307.08621)."""
    return hebbian()


@register_preset()
def linear_attention() -> MemoryRule:
    """W + k^T v (arXiv 2006.16236): retention 1, step 1."""
    return hebbian()


@register_preset(gates=GateChoices(key="forget", value="forget"))
def dfw() -> MemoryRule:
    """(a_t^T b_t) * W + k^T v: `log_key_retention` a_t and `log_value_retention` b_t (arXiv 2210.04243)."""
    return hebbian()


@register_preset(gates=GateChoices("lightning"))
def lightning_attention() -> MemoryRule:
    """a W + k^T v with a constant a per head (arXiv 2405.17381)."""
    return hebbian()


@register_preset(gates=GateChoices(key="gla"))
def gla() -> MemoryRule:
    """Diag(a_t) W + k^T v, a_t per key channel: `log_key_retention` (arXiv 2312.06635)."""
    return hebbian()


@register_preset(gates=GateChoices("rate", "rate"))
def mamba2() -> MemoryRule:
    """a_t W + step_t k^T v, a_t = exp(-A step_t) a scalar per head (arXiv 2405.21060)."""
    return hebbian()


@register_preset(gates=GateChoices(key="forget", lower_bound=True, keys="complement"))
def hgrn2() -> MemoryRule:
    """Diag(a_t) W + (1 - a_t)^T v: gated linear attention whose key is 1 - a_t (arXiv 2404.07904)."""
    return hebbian()


@register_preset(gates=GateChoices(step_size="sigmoid"))
def deltanet() -> MemoryRule:
    """W - step k^T (k W - v) (arXiv 2406.06484): retention 1."""
    return matrix(biases.l2())


@register_preset(gates=GateChoices(step_size="softplus"))
def longhorn() -> MemoryRule:
    """DeltaNet with the implicit step b / (1 + b ||k||^2) (arXiv 2407.14207), with one b per head.

    The paper has one b, and so one step, per value channel: that is `MemoryConfig.channel_steps` "value".
    """
    return matrix(biases.l2(), algorithms.implicit())


@register_preset(gates=GateChoices(step_size="bounded"))
def ttt_linear(chunk_size: int = 16) -> MemoryRule:
    """x + LN(x W), one gradient step a token, nothing forgotten (arXiv 2407.04620)."""
    return deep(biases.l2(), retentions.decay(), depth=1, chunk_size=chunk_size)


@register_preset(gates=GateChoices("rate", "sigmoid"))
def gated_deltanet() -> MemoryRule:
    """a W - step k^T (k a W - v): the error is taken after forgetting (arXiv 2412.06464)."""
    return matrix(biases.l2(), algorithms.gradient_descent(decay_first=True))


@register_preset(gates=GateChoices(key="rwkv", keys="removal"))
def rwkv7() -> MemoryRule:
    """Diag(w) W - (a * r)^T (r W) + k^T v, r the removal key (arXiv 2503.14456).

    Two inner steps: keys (r, k), values (0, v), `key_step_size` (a, 1), `bias_gate` (1, 0), step size 1.
    """
    return matrix(biases.affine(), algorithms.gradient_descent(steps=2))


@register_preset(gates=GateChoices("rate", "double"))
def delta_product(steps: int = 2) -> MemoryRule:
    """Several keys and values a token, a DeltaNet step for each, after one retention (arXiv 2502.10297)."""
    return matrix(biases.l2(), algorithms.gradient_descent(steps, decay_first=True))


@register_preset(gates=GateChoices("forget", "sigmoid"))
def mesa(iterations: int = 30, ridge: float = 1.0, chunk_size: int = 16) -> MemoryRule:
    """argmin_W sum_i zeta_i ||k_i W - v_i||^2 + ridge (arXiv 2506.05233), solved at every read; exact in any chunk."""
    return dataclasses.replace(matrix(biases.l2(), algorithms.least_squares(iterations, ridge)), chunk_size=chunk_size)


@register_preset(gates=GateChoices(step_size="bounded"))
def ttt_mlp(expansion: int = 4, chunk_size: int = 16) -> MemoryRule:
    """x + LN(MLP(x)) with two matrices, else as TTT-Linear (arXiv 2407.04620)."""
    return deep(biases.l2(), retentions.decay(), expansion=expansion, chunk_size=chunk_size)


@register_preset(gates=GateChoices("forget", "bounded", forget_bias=FORGET_BIAS))
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


@register_preset(gates=GateChoices("forget", "bounded", forget_bias=FORGET_BIAS))
def omeganet(
    omega_window: int | None = None, depth: int = 2, expansion: int = 4, chunk_size: int = 16, degree: int | None = None
) -> MemoryRule:
    """OmegaNet (arXiv 2505.23735): plain descent of the losses of the last omega_window tokens together, each with a
    weight from a gate; equations from secondary notes.

    omega_window: None is 16, or the chunk where that is shorter. degree: of the polynomial features of keys and queries
    (`architectures.polynomial_mlp`). None: no such features, as the paper states no degree, and degree 2 makes the
    memory of a head of 64 seventeen times as large.
    """
    if degree is None:
        architecture = architectures.residual_mlp(depth, expansion)
    else:
        architecture = architectures.polynomial_mlp(depth, expansion, degree)
    algorithm = algorithms.omega(min(WINDOW, chunk_size) if omega_window is None else omega_window)
    return MemoryRule(architecture, biases.l2(), retentions.decay(), algorithm, chunk_size)


@register_preset(gates=dataclasses.replace(MIRAS, step_size="bounded_low"))
def moneta(p: float = 3.0, q: float = 4.0, depth: int = 2, expansion: int = 4, chunk_size: int = 16) -> MemoryRule:
    """L_p bias, L_q retention (arXiv 2504.13173 eq 24-25)."""
    retention = retentions.decay() if q == 2 else retentions.norm_power(q)
    return deep(biases.lp(p), retention, depth, expansion, chunk_size)


@register_preset(gates=dataclasses.replace(MIRAS, bias_gate=True))
def yaad(depth: int = 2, expansion: int = 4, chunk_size: int = 16) -> MemoryRule:
    """Huber bias with a threshold per token and channel (`bias_gate`), L2 retention (arXiv 2504.13173 eq 26)."""
    return deep(biases.huber(), retentions.decay(), depth, expansion, chunk_size)


# A softmax over inputs is the paper's rule only while retention is the same for all inputs: no channel-wise key gate.
@register_preset(gates=dataclasses.replace(MIRAS, key=None))
def memora(depth: int = 2, expansion: int = 4, chunk_size: int = 16, lag_token: bool = False) -> MemoryRule:
    """L2 bias, Kullback-Leibler retention: weights are a softmax of carried logits (arXiv 2504.13173 eq 27).

    lag_token: only the first token of a chunk takes that step, and the others are linear around it (eq 30-32).
    """
    retention = retentions.lagged_kullback_leibler() if lag_token else retentions.kullback_leibler()
    return deep(biases.l2(), retention, depth, expansion, chunk_size)


def hebbian() -> MemoryRule:
    """W_t = a_t W_{t-1} + k_t^T v_t: what all linear attentions write; they differ in the retention a_t."""
    return matrix(biases.dot_product())


def matrix(bias: biases.AttentionalBias, algorithm: algorithms.Algorithm | None = None) -> MemoryRule:
    """A matrix memory that starts from zero, exact at every token."""
    algorithm = algorithm or algorithms.gradient_descent()
    return MemoryRule(architectures.linear(), bias, retentions.decay(), algorithm, chunk_size=1, learned_start=False)


def deep(
    bias: biases.AttentionalBias,
    retention: retentions.Retention,
    depth: int = 2,
    expansion: int = 4,
    chunk_size: int = 16,
) -> MemoryRule:
    """x + LN(MLP(x)) by gradient descent without momentum, the memory of TTT and of Miras' three models."""
    architecture = architectures.residual_mlp(depth, expansion)
    return MemoryRule(architecture, bias, retention, algorithms.gradient_descent(), chunk_size)


def state_floats(rule: MemoryRule, head_dim: int) -> int:
    """Numbers one head carries from token to token at a chunk's end: the carried matrices and their momentum, the keys,
    values and step sizes of a window, and the sums of step sizes of an algorithm that steps by chunks."""
    shapes = rule.shapes(head_dim)
    matrices = sum(rows * columns for rows, columns in shapes)
    window = (rule.algorithm.window - 1) * (2 * head_dim + len(shapes))
    totals = len(shapes) if rule.algorithm.steps_by_chunk else 0
    return matrices * (2 if rule.algorithm.has_momentum else 1) + window + totals
