"""Retention gates: which matrices are carried from token to token, and which weights are read from them (Miras eq
18-27; memory/README.md, Retention gates that are not linear).

Every gate of Miras carries matrices A (an accumulator, logits, or the weights themselves) that evolve linearly inside a
chunk, A_t = alpha_t A_{t-1} + S_t, which is what the parallel forms need. A token of a chunk that starts at A_0 reads

    W_t = weights(close(A_t, A_0))                            its own weights, exactly, or
    W_t = weights(A_0) + slope(A_0) (A_t - A_0)               where one slope per matrix is near enough (`one_slope`)

and after the chunk's last token A_0 <- close(A_t, A_0), so that token reads weights(A_0). With chunk_size 1 both are
the paper's rule at every token. `decay` is linear throughout: weights(A) = A.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from titans_jax.memory.rule.architectures import Params, Shapes
from titans_jax.memory.rule.capabilities import drop_inherited
from titans_jax.memory.rule.simplex import check_size, simplex_size, simplex_start_size, start_logits
from titans_jax.ops.bisection import bisect
from titans_jax.ops.softmax import softmax
from titans_jax.ops.whole_matrix import norm
from titans_jax.registry import Registry

EPSILON = 1e-6
MOST_GROWTH = 1e20
"""Stands for infinity where a multiplicative step is not defined, so that its product with a weight of 0 is 0."""
Matrices = tuple[jax.Array, ...]
Slopes = tuple[jax.Array | float, ...]

RETENTIONS: Registry[Callable[..., Retention]] = Registry("retention gate")
"""Retention gates by name."""

register_retention = RETENTIONS.register


@dataclasses.dataclass(frozen=True)
class Retention:
    """How the carried matrices [in, out] lose their past, and which weights are read from them. A gate declares:

    linear: weights(A) = A and nothing happens at a chunk's end. homogeneous: weights(A) = slope(A) A.
    one_slope: inside a chunk the weights that are read move with the carried ones by `slope`, so that reads are matrix
    products; without it every token's weights are formed, which is exact, but takes elementwise work on whole matrices
    for every token (`forms.token_weights`).
    positive: the weights cannot be negative, so the memory must be one that needs no negative ones. lags: a chunk's
    first token takes a step of its own, `first`, after which its anchor is taken (see `forms.lag_token`).
    operations: operations that it uses and not every backend has ("arctan", "lag_token", "start_weights"). In a TPU
    kernel, a number that belongs to a whole matrix must be a row, as `norm` makes it.

    A subclass that overrides `weights`, `slope`, `close` or `first` has linear, homogeneous and one_slope only if it
    declares them.
    """

    linear = False
    homogeneous = False
    one_slope = True
    positive = False
    lags = False
    operations: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        lost = {"linear": False, "homogeneous": False, "one_slope": False}
        drop_inherited(cls, lost, ("weights", "slope", "close", "first"))

    @property
    def uneven(self) -> bool:
        """Whether a model's first steps must be small. By default those of positive weights, which may lose more than
        twice as much of an error from some directions as in the mean."""
        return self.positive

    def start(self, weights: jax.Array) -> jax.Array:
        """The carried matrix that a memory starts from, given a random normal one of fan-in scale."""
        return weights

    def start_size(self, shape: tuple[int, int]) -> float:
        """Size of the start weights relative to the random ones drawn, for gates that keep their distribution."""
        return 1.0

    def weights(self, carried: Matrices, params: Params) -> Matrices:
        """The weights that are read, given the carried matrices at a chunk's start."""
        return carried

    def slope(self, carried: Matrices, params: Params) -> Slopes:
        """With one_slope, how far the weights move with the carried ones inside a chunk: their derivative, with norms
        and thresholds held as at the chunk's start. One number per matrix, as a row [1, out] or 1.0."""
        return (1.0,) * len(carried)

    def close(self, carried: Matrices, opened: Matrices, params: Params) -> Matrices:
        """The matrices carried on after a chunk that started at `opened`; without one_slope, also those whose `weights`
        a token inside the chunk reads."""
        return carried

    def slow(self, shapes: Shapes) -> Params:
        """Start values of slow parameters, each [matrices]: a number per matrix. `weights`, `slope` and `close` get
        them in this form, or as a row [1, out] per matrix."""
        return {}


@register_retention()
@dataclasses.dataclass(frozen=True)
class Decay(Retention):
    """W_t = (1 - alpha_t) W_{t-1} + S_t: the local L2 retention of Titans (eq 13) and Yaad."""

    linear = True


@dataclasses.dataclass(frozen=True)
class Threshold(Retention):
    """Base of the elastic nets: a soft threshold, "exact" or in one of two smooth forms. "arctan" is the paper's |z|
    arctan(z / threshold) 2 / pi, which shrinks by 2/pi of the threshold; "tanh" is z - threshold tanh(z / threshold),
    which shrinks by all of it. Raises ValueError for a threshold that is not above 0, or another `smooth`."""

    threshold: float = 1e-4
    smooth: Literal["exact", "arctan", "tanh"] = "exact"

    def __post_init__(self) -> None:
        threshold, smooth = self.threshold, self.smooth
        if not threshold > 0:
            raise ValueError(
                f"threshold is {threshold!r}: it must be above 0, for example 1e-4; without one use decay()."
            )
        if smooth not in ("exact", "arctan", "tanh"):
            raise ValueError(f"smooth is {smooth!r}: it must be 'exact', 'arctan' or 'tanh'.")

    @property
    def operations(self) -> frozenset[str]:
        return frozenset({"arctan"} if self.smooth == "arctan" else ())

    def shrink(self, matrices: Matrices) -> Matrices:
        """The soft threshold of every entry."""
        if self.smooth == "arctan":
            return tuple(jnp.abs(z) * jnp.arctan(z / self.threshold) * (2 / jnp.pi) for z in matrices)
        if self.smooth == "tanh":
            return tuple(z - self.threshold * jnp.tanh(z / self.threshold) for z in matrices)
        return tuple(jnp.sign(z) * jnp.maximum(jnp.abs(z) - self.threshold, 0) for z in matrices)


@register_retention()
@dataclasses.dataclass(frozen=True)
class ElasticNet(Threshold):
    """W_t = S_threshold(alpha_t W_{t-1} + S_t) (Miras eq 22): alpha forgets softly, the threshold hard.

    Inside a chunk W is linear; the threshold is applied once, at its end.
    """

    one_slope = True

    def close(self, carried: Matrices, opened: Matrices, params: Params) -> Matrices:
        return self.shrink(carried)


@register_retention()
@dataclasses.dataclass(frozen=True)
class WeightNorm(Retention):
    """At a chunk's end every unit's incoming weights, a column of W [in, out], are scaled back to their norm in the
    learned start (LaCT, arXiv 2505.23884: L2 normalisation along the inputs, in place of weight decay); inside a chunk
    W is linear."""

    homogeneous = True
    one_slope = True
    operations: ClassVar = frozenset({"start_weights"})

    def close(self, carried: Matrices, opened: Matrices, params: Params) -> Matrices:
        return tuple(w * self.scale(w, start) for w, start in zip(carried, params["weights"], strict=True))

    def scale(self, weights: jax.Array, start: jax.Array) -> jax.Array:
        """Factors that take the columns' norms to those of the start, [1, out]; finite for columns of 0."""
        before, now = (jnp.sum(jnp.square(w), axis=0, keepdims=True) for w in (start.astype(weights.dtype), weights))
        return jnp.sqrt((before + 1e-30) / (now + 1e-30))


@register_retention()
@dataclasses.dataclass(frozen=True)
class FtrlElasticNet(Threshold):
    """A_t = alpha_t A_{t-1} + S_t, W_t = S_threshold(A_t) (Miras eq 23): small sums are not read, but are kept.

    Inside a chunk, entries below the threshold move like those above it.
    """

    one_slope = True

    def weights(self, carried: Matrices, params: Params) -> Matrices:
        return self.shrink(carried)


@register_retention()
@dataclasses.dataclass(frozen=True)
class NormPower(Retention):
    """A_t = alpha_t A_{t-1} + S_t, W_t = A_t / (||A_t||_q + epsilon)^(q-2), per matrix (Miras eq 24, Moneta: q = 4).

    Inside a chunk the scale is that of the chunk's start. ||W||_q = ||A||_q^(3-q), so that some A gives any start
    weights, except for q = 3, where the norm is 1 whatever A is: such a memory starts in the direction of the start
    weights, with norm 1 (derived). A matrix that is exactly 0 stays finite. Raises ValueError for a q below 1 or
    infinite.
    """

    q: float = 4.0
    homogeneous = True
    one_slope = True

    def __post_init__(self) -> None:
        if not 1 <= self.q < math.inf:
            raise ValueError(f"q is {self.q!r}: it must be 1 or more and finite, for example 4.")

    def start(self, weights: jax.Array) -> jax.Array:
        if self.q == 3:
            return weights
        return weights * norm(weights, self.q) ** ((self.q - 2) / (3 - self.q))

    def start_size(self, shape: tuple[int, int]) -> float:
        """1; for q = 3, 1 over the 3-norm of the drawn weights, in x out normal numbers of variance 1/in: the mean of
        |x|^3 for a standard normal x is 2 sqrt(2 / pi)."""
        inputs, outputs = shape
        cubes = 2 * math.sqrt(2 / math.pi) * inputs * outputs
        return math.sqrt(inputs) / cubes ** (1 / 3) if self.q == 3 else 1.0

    def slope(self, carried: Matrices, params: Params) -> Slopes:
        return tuple((norm(a, self.q) + EPSILON) ** (2 - self.q) for a in carried)

    def weights(self, carried: Matrices, params: Params) -> Matrices:
        return tuple(s * a for s, a in zip(self.slope(carried, params), carried, strict=True))


@register_retention()
@dataclasses.dataclass(frozen=True)
class Lq(Retention):
    """A_t = alpha_t A_{t-1} + S_t, W_t = (q-1) sign(A) |A|^(p-1) / (||A||_p + epsilon)^(p-2), p = q / (q-1).

    1 < q <= 2, else it raises ValueError. The exact minimiser but for epsilon; the form printed in the paper is
    `norm_power(p)`, the same at q = 2.
    """

    q: float = 1.5
    unconfigured = ("q",)
    """Fields that fields of `MemoryConfig` of the same name do not set: the q there is that of `NormPower`."""

    def __post_init__(self) -> None:
        if not 1 < self.q <= 2:
            raise ValueError(f"q is {self.q!r}: the mirror map of L_q needs 1 < q <= 2, for example 1.5.")

    @property
    def p(self) -> float:
        """The dual exponent."""
        return self.q / (self.q - 1)

    def start(self, weights: jax.Array) -> jax.Array:
        size = jnp.maximum(jnp.abs(weights), EPSILON) ** (self.q - 1)
        return jnp.sign(weights) * size * norm(weights, self.q) ** (2 - self.q) / (self.q - 1)

    def weights(self, carried: Matrices, params: Params) -> Matrices:
        powers = (jnp.sign(a) * jnp.abs(a) ** (self.p - 1) for a in carried)
        return tuple(
            (self.q - 1) * x * (norm(a, self.p) + EPSILON) ** (2 - self.p) for x, a in zip(powers, carried, strict=True)
        )


@register_retention()
@dataclasses.dataclass(frozen=True)
class KullbackLeibler(Retention):
    """Z_t = alpha_t Z_{t-1} + S_t, W_t = c Softmax(Z_t) (Miras eq 21 and 27, Memora; memory/README.md, Retention gates
    that are not linear, on carrying logits).

    The softmax runs over the inputs of a matrix, so each output unit is a convex combination, scaled by a learned c per
    matrix ("simplex_size"), which starts at `size` (None: the root of the number of inputs). Equal to eq 27 as long as
    alpha is constant inside each slice. start_deviation: the standard deviation of a fresh memory's logits. The larger
    it is, the more of its error a write removes from one direction, and the less from the others
    (memory/what_was_tried.md). Raises ValueError for a size or a start_deviation that is not above 0.
    """

    size: float | None = None
    start_deviation: float = 0.5
    positive = True

    def __post_init__(self) -> None:
        check_size(self.size)
        if not self.start_deviation > 0:
            raise ValueError(f"start_deviation is {self.start_deviation!r}: it must be above 0, for example 0.5.")

    @property
    def uneven(self) -> bool:
        # Up to the default, first steps that remove the error once are stable (memory/what_was_tried.md).
        return self.start_deviation > KullbackLeibler.start_deviation

    def start(self, weights: jax.Array) -> jax.Array:
        return start_logits(weights, self.start_deviation)

    def start_size(self, shape: tuple[int, int]) -> float:
        return simplex_start_size(self.size, shape, self.start_deviation)

    def weights(self, carried: Matrices, params: Params) -> Matrices:
        return tuple(c * softmax(z) for z, c in zip(carried, params["simplex_size"], strict=True))

    def slow(self, shapes: Shapes) -> Params:
        return {"simplex_size": jnp.array([simplex_size(self.size, rows) for rows, _ in shapes], jnp.float32)}


@register_retention()
@dataclasses.dataclass(frozen=True)
class LaggedKullbackLeibler(KullbackLeibler):
    """Memora with a lag token (Miras eq 30-32): W_1 = c Softmax(alpha_1 log W_0 + S_1) for the first token of a chunk,
    and W_t = alpha_t W_{t-1} + S_t, with gradients at W_1, for the others; weights below epsilon count as epsilon in
    the logarithm, since the linear steps can leave any sign."""

    homogeneous = True
    one_slope = True
    lags = True
    operations: ClassVar = frozenset({"lag_token"})

    def start(self, weights: jax.Array) -> jax.Array:
        return simplex_size(self.size, len(weights)) * jax.nn.softmax(super().start(weights), axis=0)

    def weights(self, carried: Matrices, params: Params) -> Matrices:
        return carried

    def first(self, carried: jax.Array, retention: jax.Array, step: jax.Array, i: int, params: Params) -> jax.Array:
        """W_1 of matrix i, from W_0, the token's retention and its step."""
        size = params["simplex_size"].astype(carried.dtype)[i]
        return size * jax.nn.softmax(retention * jnp.log(jnp.maximum(carried, EPSILON)) + step, axis=0)


@register_retention()
@dataclasses.dataclass(frozen=True)
class FDivergence(Retention):
    """W_t = W_{t-1} * g(S_t - zeta_t), zeta_t such that every output unit's weights keep their sum (Miras eq 18).

    g: any increasing function that is not negative, (f')^-1 of the divergence; `jnp.exp` is Kullback-Leibler. It must
    be a function of one argument that jax can trace. Inside a chunk the carried matrix evolves linearly, and a token
    reads one multiplicative step from the chunk's start, whose S_t is the change of the carried matrix since: with
    alpha = 1, the sum of the steps. Raises ValueError for a size (as in `KullbackLeibler`) that is not above 0.
    """

    g: Callable[[jax.Array], jax.Array] = jnp.exp
    size: float | None = None
    positive = True

    def __post_init__(self) -> None:
        check_size(self.size)

    def start(self, weights: jax.Array) -> jax.Array:
        return simplex_size(self.size, len(weights)) * jax.nn.softmax(start_logits(weights), axis=0)

    def start_size(self, shape: tuple[int, int]) -> float:
        return simplex_start_size(self.size, shape)

    def weights(self, carried: Matrices, params: Params) -> Matrices:
        return tuple(jnp.where(w < 0, 0, w) for w in carried)  # a learned start may have left the positive side

    def close(self, carried: Matrices, opened: Matrices, params: Params) -> Matrices:
        return tuple(self.step(a, w) for a, w in zip(carried, opened, strict=True))

    def step(self, carried: jax.Array, opened: jax.Array) -> jax.Array:
        """One multiplicative step per column, by bisection and one Newton step, which also carries the gradient."""
        moved, opened = carried - opened, jnp.where(opened < 0, 0, opened)
        total = jnp.sum(opened, axis=0, keepdims=True)

        def excess(zeta: jax.Array) -> jax.Array:
            return jnp.sum(opened * self.g(moved - zeta), axis=0, keepdims=True) - total

        # g(-unit) = 1 is found on a wide bracket; zeta lies between where no entry and where every entry would shrink.
        unit = bisect(lambda x: self.g(-x) - 1, jnp.full_like(total, -50), jnp.full_like(total, 50))
        low, high = (f(moved, axis=0, keepdims=True) + unit for f in (jnp.min, jnp.max))
        zeta = jax.lax.stop_gradient(bisect(excess, low, high))
        value, change = jax.jvp(excess, (zeta,), (jnp.ones_like(zeta),))
        change = jax.lax.stop_gradient(jnp.where(change == 0, -1, change))  # 0: nothing in the column to step
        return opened * self.g(moved - (zeta - value / change))


@register_retention()
def chi_squared(size: float | None = None) -> FDivergence:
    """f(t) = (t - 1)^2 / 2: W_t = W_{t-1} max(0, 1 + S_t - zeta_t). An entry that reaches 0 stays there."""
    return alpha_divergence(2.0, size)


@register_retention()
def jensen_shannon(size: float | None = None) -> FDivergence:
    """f(t) = t log t - (1 + t) log((1 + t) / 2): g(x) = e^x / (2 - e^x), below x = log 2."""
    return FDivergence(jensen_shannon_growth, size)


@register_retention()
def alpha_divergence(alpha: float = 0.5, size: float | None = None) -> FDivergence:
    """f'(t) = (t^(alpha - 1) - 1) / (alpha - 1), alpha from 0 to 2, else it raises ValueError: 0 is the reverse
    Kullback-Leibler divergence, 1 Kullback-Leibler, 2 chi squared."""
    return FDivergence(AlphaGrowth(alpha), size)


@dataclasses.dataclass(frozen=True)
class AlphaGrowth:
    """g(x) = (1 + (alpha - 1) x)^(1 / (alpha - 1)), 0 or `MOST_GROWTH` where that is not defined."""

    alpha: float

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 2:
            raise ValueError(f"alpha is {self.alpha!r}: the alpha divergence needs 0 to 2, for example 0.5.")

    def __call__(self, x: jax.Array) -> jax.Array:
        power = self.alpha - 1
        if power == 0:
            return jnp.exp(x)
        return jnp.maximum(1 + power * x, 0.0 if power > 0 else MOST_GROWTH**power) ** (1 / power)


def jensen_shannon_growth(x: jax.Array) -> jax.Array:
    """e^x / (2 - e^x), `MOST_GROWTH` where that is not defined."""
    grown = jnp.exp(jnp.minimum(x, math.log(2)))
    return grown / jnp.maximum(2 - grown, 1 / MOST_GROWTH)


@register_retention()
@dataclasses.dataclass(frozen=True)
class BregmanLogit(Retention):
    """Z_t = alpha_t Z_{t-1} + S_t, W_t = sigmoid(Z_t): Bregman retention with f' = logit (Miras, unnumbered;
    memory/README.md, Retention gates that are not linear); logits are carried, so a saturated weight has no logarithm
    to lose."""

    positive = True

    def start(self, weights: jax.Array) -> jax.Array:
        return weights * weights.shape[0] ** 0.5

    def weights(self, carried: Matrices, params: Params) -> Matrices:
        return tuple(jax.nn.sigmoid(z) for z in carried)


decay, elastic_net, ftrl_elastic_net, norm_power, lq = Decay, ElasticNet, FtrlElasticNet, NormPower, Lq
weight_norm = WeightNorm
kullback_leibler, lagged_kullback_leibler = KullbackLeibler, LaggedKullbackLeibler
f_divergence, bregman_logit = FDivergence, BregmanLogit
