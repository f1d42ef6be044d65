"""Memory architectures: what the fast weights compute. Written once, as a function of "apply fast matrix i to x".

Every form of the engine passes its own `linear(i, x)` (memory/README.md, Reads inside a chunk), so an architecture is
all a new memory needs: its matrix shapes and its read. Add one by subclassing `Architecture`; nothing else changes.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from titans_jax.memory.rule.capabilities import drop_inherited
from titans_jax.ops.matmul import matmul
from titans_jax.registry import Registry

NORM_EPSILON = 1e-6
MOST_FEATURES = 1 << 14
"""The most inputs of a polynomial memory's first matrix: with more, a single head would be as large as a model."""

Apply = Callable[[int, jax.Array], jax.Array]
"""(i, x [..., in]) -> fast matrix i applied to x, [..., out]; every form passes its own."""
Params = dict[str, jax.Array]
"""Slow parameters by name."""
Shapes = tuple[tuple[int, int], ...]
"""[in, out] of every fast matrix, in the order they are applied."""

ARCHITECTURES: Registry[Callable[..., Architecture]] = Registry("memory architecture")
"""Architectures by name."""

register_architecture = ARCHITECTURES.register


@dataclasses.dataclass(frozen=True)
class Architecture(abc.ABC):
    """A memory network of one head: `shapes` of its fast matrices in the order they are applied, and its `read`.

    An architecture declares normalized: a norm behind the last matrix takes out the mean, so positive weights suffice;
    and linear: M(x) = x W, one matrix [head_dim, head_dim] and nothing else, which the closed forms need. A subclass
    that overrides `read` or `shapes` has these two only if it declares them. input_matrices: how many of the first
    matrices read the input itself, for delta gradient descent and for counts of operations. operations: operations that
    it uses and not every backend has ("array_constant").
    """

    linear = False
    normalized = False
    input_matrices = 1
    operations: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        drop_inherited(cls, {"linear": False, "normalized": False}, ("read", "shapes"))

    @abc.abstractmethod
    def shapes(self, head_dim: int) -> Shapes:
        """[in, out] of every fast matrix."""

    @abc.abstractmethod
    def read(self, linear: Apply, params: Params, x: jax.Array) -> jax.Array:
        """[..., head_dim] -> [..., head_dim]; params holds the slow parameters of `slow`."""

    def slow(self, head_dim: int) -> Params:
        """Start values of the slow parameters other than the fast weights' start."""
        return {}

    def start_variance(self, head_dim: int, sizes: Sequence[float]) -> float:
        """Variance over channels of the input of a normalized memory's norm, for a unit key and start weights of
        standard deviation size/sqrt(in), one size per matrix (`init_params`); 0 where it is not known."""
        return 0.0

    def with_scaled_keys(self) -> Architecture:
        """The same network whose hidden layer starts with inputs of a root mean square of 1, where it can have them."""
        return self

    @property
    def slope_known(self) -> bool:
        """Whether there is a norm and its `start_variance`, which `MemoryRule.bound_slope` needs."""
        return self.normalized and self.start_variance(2, [1.0] * len(self.shapes(2))) > 0


@register_architecture()
@dataclasses.dataclass(frozen=True)
class Linear(Architecture):
    """M(x) = x W, the memory of every derivation in the papers and of all linear recurrent baselines."""

    linear = True

    def shapes(self, head_dim: int) -> Shapes:
        return ((head_dim, head_dim),)

    def read(self, linear: Apply, params: Params, x: jax.Array) -> jax.Array:
        return linear(0, x)


@register_architecture()
@dataclasses.dataclass(frozen=True)
class Mlp(Architecture):
    """M(x) = gelu(... gelu(x W_0) ...) W_{depth-1}, hidden width expansion * head_dim (memory/README.md, The rule).

    Raises ValueError for a depth or an expansion that is no integer of 1 or more.
    """

    depth: int = 2
    expansion: int = 4

    def __post_init__(self) -> None:
        for field in ("depth", "expansion"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} is {value!r}: a memory needs an integer of 1 or more, for example 2.")

    def shapes(self, head_dim: int) -> Shapes:
        widths = [head_dim] + [self.expansion * head_dim] * (self.depth - 1) + [head_dim]
        return tuple(zip(widths[:-1], widths[1:], strict=True))

    def read(self, linear: Apply, params: Params, x: jax.Array) -> jax.Array:
        x = linear(0, self.inputs(params, x))
        for i in range(1, self.depth):
            x = linear(i, gelu(x))
        return x

    def inputs(self, params: Params, x: jax.Array) -> jax.Array:
        """What the first matrix reads: [..., head_dim] -> [..., in]."""
        return x


@register_architecture()
@dataclasses.dataclass(frozen=True)
class SkipMlp(Mlp):
    """M(x) = x + MLP(x): a residual without a norm, the memory of ATLAS and of Hope (arXiv 2512.24695)."""

    def read(self, linear: Apply, params: Params, x: jax.Array) -> jax.Array:
        return x + super().read(linear, params, x)


@dataclasses.dataclass(frozen=True)
class BehindNorm(Architecture):
    """M(x) = x + LN(N(x)), N being the network of a subclass's next base. The norm's scale is a slow parameter, or 1
    without `learned_scale`."""

    learned_scale: bool = dataclasses.field(default=True, kw_only=True)
    normalized = True

    def read(self, linear: Apply, params: Params, x: jax.Array) -> jax.Array:
        return x + self.norm(params, super().read(linear, params, x))

    def norm(self, params: Params, x: jax.Array) -> jax.Array:
        """LN(x), with the scale."""
        return layer_norm(x, params["norm_scale"] if self.learned_scale else jnp.ones(x.shape[-1:], x.dtype))

    def slow(self, head_dim: int) -> Params:
        return {"norm_scale": jnp.ones((head_dim,), jnp.float32)} if self.learned_scale else {}


@register_architecture()
@dataclasses.dataclass(frozen=True)
class ResidualMlp(BehindNorm, Mlp):
    """M(x) = x + LN(MLP(x)), the default memory of Titans and Miras (memory/README.md, The rule; Readings).

    scale_keys: M(x) = x + LN(MLP(c x)), with c such that for a unit key c x has a root mean square of 1, and so have
    the inputs of fresh hidden units (memory/README.md, Gates). A single matrix has no hidden layer and no need.
    """

    scale_keys: bool = dataclasses.field(default=False, kw_only=True)

    def inputs(self, params: Params, x: jax.Array) -> jax.Array:
        features, scale = self.features(params, x), self.scale(x.shape[-1])
        return features if scale == 1 else scale * features

    def features(self, params: Params, x: jax.Array) -> jax.Array:
        """`inputs`, but for the scale."""
        return x

    def scale(self, head_dim: int) -> float:
        """c: one over the root mean square of a unit key's features, or 1."""
        return self.input_square(head_dim) ** -0.5 if self.scale_keys and self.depth > 1 else 1.0

    def with_scaled_keys(self) -> Architecture:
        return dataclasses.replace(self, scale_keys=True)

    def start_variance(self, head_dim: int, sizes: Sequence[float]) -> float:
        """The output of a matrix is normal, and its variance is the mean square of the matrix's input."""
        *hidden, last = sizes
        variance = self.scale(head_dim) ** 2 * self.input_square(head_dim)
        gelu = lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))  # noqa: E731
        for size in hidden:
            variance = normal_square(gelu, size**2 * variance)
        return last**2 * variance * (1 - 1 / head_dim)

    def input_square(self, head_dim: int) -> float:
        """The mean square of `features`, for a unit key."""
        return 1 / head_dim


@register_architecture()
@dataclasses.dataclass(frozen=True)
class PolynomialMlp(ResidualMlp):
    """M(x) = x + LN(MLP(phi(x))), phi(x) the monomials of x up to a degree, those of degree i times a slow parameter
    a_i that starts at 1/i! (ATLAS, arXiv 2505.23735, phi_p; that its memory keeps the residual and the norm of the
    others is our reading).

    The first matrix has C(head_dim + degree, degree) inputs, the constant among them. Raises ValueError for a degree
    that is no integer of 1 or more; `shapes` raises it for a head_dim that makes more than `MOST_FEATURES` inputs.
    """

    degree: int = 2
    normalized = True
    operations: ClassVar = frozenset({"array_constant"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.degree, int) or self.degree < 1:
            raise ValueError(f"degree is {self.degree!r}: it must be an integer of 1 or more, for example 2.")

    def shapes(self, head_dim: int) -> Shapes:
        width = math.comb(head_dim + self.degree, self.degree)
        if width > MOST_FEATURES:
            raise ValueError(
                f"degree is {self.degree}: heads of width {head_dim} have {width:,} monomials up to it, more than "
                f"{MOST_FEATURES:,}; use a smaller degree or narrower heads."
            )
        (_, hidden), *others = super().shapes(head_dim)
        return ((width, hidden), *others)

    def features(self, params: Params, x: jax.Array) -> jax.Array:
        return monomials(x, params["degree_scale"])

    def slow(self, head_dim: int) -> Params:
        scale = [1 / math.factorial(i) for i in range(self.degree + 1)]
        return super().slow(head_dim) | {"degree_scale": jnp.array(scale, jnp.float32)}

    def input_square(self, head_dim: int) -> float:
        """The mean over unit keys of all directions, whose squared entries have a Dirichlet distribution: the mean of
        the sum over squared monomials of degree i is the coefficient of t^i in (sum_n (1/2)_n t^n)^head_dim, divided by
        (head_dim / 2)_i, (x)_n being x (x + 1) .. (x + n - 1) (derived)."""
        one = [rising(0.5, n) for n in range(self.degree + 1)]
        sums = np.ones(1)
        for _ in range(head_dim):
            sums = np.polynomial.polynomial.polymul(sums, one)[: self.degree + 1]
        squares = (sums[i] / rising(head_dim / 2, i) / math.factorial(i) ** 2 for i in range(self.degree + 1))
        return float(sum(squares)) / math.comb(head_dim + self.degree, self.degree)


@register_architecture()
@dataclasses.dataclass(frozen=True)
class GatedMlp(Architecture):
    """M(x) = (silu(x W_0) * (x W_1)) W_2, the SwiGLU memory of LaCT (arXiv 2505.23884).

    Raises ValueError for an expansion that is no integer of 1 or more.
    """

    expansion: int = 4
    input_matrices = 2

    def __post_init__(self) -> None:
        if not isinstance(self.expansion, int) or self.expansion < 1:
            raise ValueError(f"expansion is {self.expansion!r}: a memory needs an integer of 1 or more, for example 2.")

    def shapes(self, head_dim: int) -> Shapes:
        hidden = self.expansion * head_dim
        return ((head_dim, hidden), (head_dim, hidden), (hidden, head_dim))

    def read(self, linear: Apply, params: Params, x: jax.Array) -> jax.Array:
        return linear(2, jax.nn.silu(linear(0, x)) * linear(1, x))


@register_architecture()
@dataclasses.dataclass(frozen=True)
class ResidualGatedMlp(BehindNorm, GatedMlp):
    """M(x) = x + LN((silu(x W_0) * (x W_1)) W_2): the gated memory of Atlas++ (arXiv 2505.23735), with the norm of the
    other memories here."""

    def start_variance(self, head_dim: int, sizes: Sequence[float]) -> float:
        """From the outputs of the two matrices in front, which are independent, and the matrix behind them."""
        silu = lambda x: x / (1 + np.exp(-x))  # noqa: E731
        first, second, last = (size**2 for size in sizes)
        return last * normal_square(silu, first / head_dim) * second / head_dim * (1 - 1 / head_dim)


def normal_square(function: Callable[[np.ndarray], np.ndarray], variance: float) -> float:
    """The mean of function(x)^2 over normal x of mean 0."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    return float(np.sum(weights * function(math.sqrt(variance) * nodes) ** 2) / np.sum(weights))


def rising(x: float, n: int) -> float:
    """x (x + 1) .. (x + n - 1)."""
    return math.prod(x + i for i in range(n))


def monomials(x: jax.Array, scale: jax.Array) -> jax.Array:
    """All monomials of x [..., n] up to degree p, from the constant on, those of degree i times scale[i] [p + 1]:
    [..., C(n + p, p)]."""
    scale = scale.astype(x.dtype)
    found = [jnp.broadcast_to(scale[0], (*x.shape[:-1], 1)), scale[1] * x]
    for degree in range(2, scale.shape[0]):
        # Factors are picked by matrix products: the gradient of indexing would be a scatter, one number after another.
        factors = (matmul(x, jnp.asarray(pick, x.dtype), x.dtype) for pick in picks(x.shape[-1], degree))
        found.append(scale[degree] * math.prod(factors))
    return jnp.concatenate(found, axis=-1)


@functools.cache
def picks(inputs: int, degree: int) -> np.ndarray:
    """bool [degree, inputs, monomials]: which input is each factor of each monomial of this degree."""
    factors = np.array(list(itertools.combinations_with_replacement(range(inputs), degree)))
    return factors.T[:, None, :] == np.arange(inputs)[None, :, None]


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
    """`jax.nn.gelu`, the tanh approximation, with few operations for value and slope together: a memory does little
    else besides matrix products."""
    return gelu_and_slope(x)[0]


@gelu.defjvp
def gelu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    value, slope = gelu_and_slope(*primals)
    return value, slope * tangents[0]


def gelu_and_slope(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """gelu(x) = x/2 (1 + tanh(u)), u = x (a + b x^2), and its derivative."""
    a = (2 / jnp.pi) ** 0.5
    b = 0.044715 * a
    square, half = x * x, 0.5 * x
    tanh = jnp.tanh(x * (a + b * square))
    twice = 1 + tanh
    return half * twice, 0.5 * twice + half * ((1 - tanh) * twice) * (a + 3 * b * square)


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """LayerNorm over the last axis without bias, in the accumulation dtype of x (float32; memory/README.md,
    Numerics)."""
    x, variance = centred(x)
    return x * jax.lax.rsqrt(variance + NORM_EPSILON) * jnp.broadcast_to(scale.astype(x.dtype), x.shape)


def centred(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x without the mean of its last axis, and its variance there, [..., 1]."""
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x, jnp.mean(jnp.square(x), axis=-1, keepdims=True)


linear, mlp, skip_mlp, residual_mlp, polynomial_mlp = Linear, Mlp, SkipMlp, ResidualMlp, PolynomialMlp
gated_mlp, residual_gated_mlp = GatedMlp, ResidualGatedMlp
