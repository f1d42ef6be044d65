"""Memory algorithms: how a token's inner gradient becomes a step (Miras, fourth choice), and how the memory is read.

An algorithm sees the architecture through `shapes`, `slow`, `read` and `inner_loss`, which plain descent leaves as they
are; least squares, which keeps sufficient statistics instead of a solution, replaces them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from titans_jax.memory.rule.architectures import Apply, Architecture, Params, Shapes
from titans_jax.memory.rule.biases import AttentionalBias
from titans_jax.memory.rule.capabilities import drop_inherited
from titans_jax.ops.newton_schulz import COEFFICIENTS, newton_schulz

Split = Callable[[int], tuple[Apply, ...]]
"""n -> n functions that apply fast matrix i, each with its share of the outputs."""


class Written(NamedTuple):
    """What tokens write, leaves [..., head_dim]. gate: `Gates.bias_gate`, [..., 1 or head_dim], or None. at_read: zeros
    that are added to the read, so that the gradient with respect to them is the cotangent at the read."""

    key: jax.Array
    value: jax.Array
    gate: jax.Array | None
    at_read: jax.Array


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """How gradients are turned into the step S_t. An algorithm declares:

    has_momentum: S is carried. steps: inner steps (key-value pairs) per token. window: tokens whose gradients a step
    sums, its own and those before it, weighed by `Gates.window_weight`. decay_first: the gradient is taken at the
    memory that retention has already acted on (Gated DeltaNet), not before it (Titans). steps_by_chunk: a token's
    gradient only goes into S; the memory moves once a chunk, at its end, by the mean step size of the chunk's tokens
    times `direction(S)`. momentum_by_chunk: eta acts once a chunk too, that of its first token.
    linear_only: the algorithm is defined for a linear memory with an L2 bias and plain decay.
    descends: the step is the gradient of the bias at the architecture's own read, which queries use too; the closed
    forms need this. keeps_statistics: the fast weights are sums over tokens that do not depend on the memory, so
    that chunks of any length are exact (Mesa).
    products_per_read: how often a read applies the memory.
    operations: operations that it uses and not every backend has ("custom_linear_solve").

    A subclass that overrides `read`, `inner_loss` or `shapes` has descends and keeps_statistics only if it declares
    them.
    """

    has_momentum = False
    steps = 1
    window = 1
    decay_first = False
    steps_by_chunk = False
    momentum_by_chunk = False
    linear_only = False
    descends = True
    keeps_statistics = False
    products_per_read = 1
    operations: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        drop_inherited(cls, {"descends": False, "keeps_statistics": False}, ("read", "inner_loss", "shapes"))

    def with_momentum(self, momentum: bool) -> Algorithm | None:
        """The same algorithm with momentum, or without it; None where there is none."""
        return self if momentum == self.has_momentum else None

    def step_sizes(
        self, step_size: jax.Array, key_step: jax.Array | None, value_step: jax.Array | None, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """(the step size that is taken, its factor per value channel), from the gates' step size [time, matrices],
        their factors per key and per value channel [time, head_dim] or None, and the keys [time, head_dim]."""
        return step_size, value_step

    @property
    def whole_tokens(self) -> bool:
        """Whether the algorithm weighs tokens as a whole, so that no gate may differ between channels."""
        return self.window > 1 or self.steps_by_chunk

    def direction(self, step: jax.Array, operand_dtype: jnp.dtype, unrolled: bool = False) -> jax.Array:
        """The direction in which S [in, out] changes a fast matrix: S itself, except for rules that step by chunks,
        whose change is this direction times a step size. That of S transposed must be the direction transposed, as a
        kernel keeps some matrices so. unrolled: without loops, of which a kernel has no gradient."""
        return step

    def shapes(self, architecture: Architecture, head_dim: int) -> Shapes:
        """[in, out] of every fast matrix."""
        return architecture.shapes(head_dim)

    def slow(self, architecture: Architecture, head_dim: int) -> Params:
        """Start values of slow parameters other than the fast weights' start."""
        return architecture.slow(head_dim)

    def read(self, architecture: Architecture, linears: Split, params: Params, x: jax.Array) -> jax.Array:
        """What a query reads, [..., head_dim]; linears(n): n functions `linear`, each with its share of the outputs."""
        (linear,) = linears(1)
        return architecture.read(linear, params, x)

    def inner_loss(
        self,
        architecture: Architecture,
        bias: AttentionalBias,
        linear: Apply,
        params: Params,
        written: Written,
    ) -> jax.Array:
        """The losses [...] whose gradient is written."""
        key, value, gate, at_read = written
        return bias(architecture.read(linear, params, key) + at_read, value, gate)


@dataclasses.dataclass(frozen=True)
class GradientDescent(Algorithm):
    """S_t = -theta_t u_t (Miras eq 5); several steps per token are DeltaProduct's (arXiv 2502.10297), each at the
    memory its predecessor left (chunk_size counts steps). Keys and values are then [time, steps, head_dim].

    Raises ValueError for steps that are no integer of 1 or more.
    """

    steps: int = 1
    decay_first: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps is {self.steps!r}: a token needs an integer of 1 or more, for example 2.")

    def with_momentum(self, momentum: bool) -> Algorithm | None:
        """See `Algorithm`: momentum needs a single step a token, with its gradient taken before forgetting."""
        if not momentum:
            return self
        return Momentum() if self == GradientDescent() else None

    @property
    def linear_only(self) -> bool:
        return self.decay_first


@dataclasses.dataclass(frozen=True)
class Momentum(Algorithm):
    """S_t = eta_t S_{t-1} - theta_t u_t, past and momentary surprise (Titans eq 9-10)."""

    has_momentum = True

    def with_momentum(self, momentum: bool) -> Algorithm | None:
        """See `Algorithm`."""
        if momentum:
            return self
        return GradientDescent() if self == Momentum() else None


@dataclasses.dataclass(frozen=True)
class Omega(Algorithm):
    """S_t = eta_t S_{t-1} - sum_{j < window} gamma_t[j] theta_{t-j} u_{t-j}, gamma_t[0] = 1: the Omega rule of ATLAS
    (arXiv 2505.23735), which descends the losses of the last tokens together, all at the memory of the chunk's start
    (memory/later_models.md, The Omega rule). Without momentum S_t is the sum alone. A window of 1 is `Momentum` or
    `GradientDescent`.

    Raises ValueError for a window that is no integer of 1 or more.
    """

    window: int = 16
    has_momentum: bool = False

    def __post_init__(self) -> None:
        check_window(self.window)

    def with_momentum(self, momentum: bool) -> Algorithm:
        """See `Algorithm`."""
        return dataclasses.replace(self, has_momentum=momentum)


@dataclasses.dataclass(frozen=True)
class Muon(Algorithm):
    """S_t = eta_t S_{t-1} - sum_{j < window} gamma_t[j] theta_{t-j} u_{t-j} as in `Omega`, and at a chunk's end
    W_C = beta_C W_0 + thetabar NS(S_C), NS(S) the orthogonal matrix near S by Newton-Schulz, thetabar the mean of the
    chunk's theta, beta_C the product of its retentions (ATLAS, arXiv 2505.23735; memory/later_models.md, Steps of whole
    chunks). Tokens before the chunk's last read beta_t W_0. With chunk_size 1 it is the paper's rule at every token.

    coefficients: of the polynomial, a name of `ops.newton_schulz.COEFFICIENTS`. momentum_by_chunk: eta of the chunk's
    first token takes the place of all (LaCT, arXiv 2505.23884, whose S is a plain sum over the chunk).

    Raises ValueError for a window that is no integer of 1 or more, or unknown coefficients.
    """

    window: int = 1
    coefficients: Literal["muon", "lact"] = "muon"
    momentum_by_chunk: bool = False
    has_momentum = True
    steps_by_chunk = True

    def __post_init__(self) -> None:
        check_window(self.window)
        if self.coefficients not in COEFFICIENTS:
            raise ValueError(
                f"coefficients is {self.coefficients!r}: it must be {' or '.join(map(repr, COEFFICIENTS))}."
            )

    def direction(self, step: jax.Array, operand_dtype: jnp.dtype, unrolled: bool = False) -> jax.Array:
        return newton_schulz(step, operand_dtype, self.coefficients, unrolled)


@dataclasses.dataclass(frozen=True)
class DeltaGradientDescent(Algorithm):
    """W_t = (a_t I - theta_t x^T x) W_{t-1} - theta_t u_t for the matrices that read the key, x being their input;
    W_t = a_t W_{t-1} - theta_t u_t for the others (Nested Learning, arXiv 2512.24695; memory/later_models.md, Hope).

    The erased term is the gradient of ||x W||^2 / 2, which is therefore added to the bias in the inner loss. With
    momentum both are in S_t.
    """

    has_momentum: bool = False

    def with_momentum(self, momentum: bool) -> Algorithm:
        """See `Algorithm`."""
        return dataclasses.replace(self, has_momentum=momentum)

    def inner_loss(
        self,
        architecture: Architecture,
        bias: AttentionalBias,
        linear: Apply,
        params: Params,
        written: Written,
    ) -> jax.Array:
        answers = []

        def kept(i: int, x: jax.Array) -> jax.Array:
            y = linear(i, x)
            if i < architecture.input_matrices:
                answers.append(y)
            return y

        loss = super().inner_loss(architecture, bias, kept, params, written)
        return loss + sum(jnp.sum(jnp.square(y), axis=-1) for y in answers) / 2


@dataclasses.dataclass(frozen=True)
class Implicit(Algorithm):
    """The step that solves argmin_W theta/2 ||k W - v||^2 + 1/2 ||W - W_{t-1}||^2: the gradient times
    theta / (1 + theta ||k||^2) (Longhorn, arXiv 2407.14207).

    `value_step_size` s gives column j of W a theta of its own, theta s_j, as the paper has it, and the exact step
    theta s_j / (1 + theta s_j ||k||^2). With `key_step_size` m, the entries w of row i of W are held by
    (w - w_{t-1})^2 / m_i in place of the plain square, and ||k||^2 is the sum of m_i k_i^2 (derived).
    """

    linear_only = True

    def step_sizes(
        self, step_size: jax.Array, key_step: jax.Array | None, value_step: jax.Array | None, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        squares = jnp.square(keys) if key_step is None else jnp.square(keys) * key_step
        once = step_size * jnp.sum(squares, axis=-1, keepdims=True)
        if value_step is not None:  # relative to the step with the factor 1
            value_step = value_step * (1 + once) / (1 + once * value_step)
        return step_size / (1 + once), value_step


@dataclasses.dataclass(frozen=True)
class LeastSquares(Algorithm):
    """W_t = argmin_W sum_i zeta_ti ||k_i W - v_i||^2 + ||ridge^(1/2) W||^2, exactly, at every token (Mesa, arXiv
    2506.05233).

    One fast matrix [head_dim, 2 head_dim] holds the sums of k^T v and of k^T k, the latter called K, with the retention
    zeta. A read solves (K + ridge) x = q by conjugate gradients, and is x times the sum of k^T v. The ridge is a
    learned positive diagonal ("log_ridge").

    Raises ValueError for iterations that are no integer of 1 or more, or a ridge that is not above 0.
    """

    iterations: int = 30
    ridge: float = 1.0
    linear_only = True
    keeps_statistics = True
    operations: ClassVar = frozenset({"custom_linear_solve"})

    def __post_init__(self) -> None:
        if not isinstance(self.iterations, int) or self.iterations < 1:
            raise ValueError(f"iterations is {self.iterations!r}: it must be an integer of 1 or more, for example 30.")
        if not self.ridge > 0:
            raise ValueError(f"ridge is {self.ridge!r}: it must be above 0, for example 1.")

    @property
    def products_per_read(self) -> int:
        return self.iterations + 1

    def shapes(self, architecture: Architecture, head_dim: int) -> Shapes:
        return ((head_dim, 2 * head_dim),)

    def slow(self, architecture: Architecture, head_dim: int) -> Params:
        return {"log_ridge": jnp.full((head_dim,), jnp.log(self.ridge), jnp.float32)}

    def read(self, architecture: Architecture, linears: Split, params: Params, x: jax.Array) -> jax.Array:
        values, keys = linears(2)
        ridge = jnp.exp(params["log_ridge"].astype(x.dtype))

        def covariance(y: jax.Array) -> jax.Array:
            return keys(0, y) + y * jnp.broadcast_to(ridge, y.shape)

        solve = lambda matvec, b: conjugate_gradients(matvec, b, self.iterations)  # noqa: E731
        solution = jax.lax.custom_linear_solve(covariance, x, solve, symmetric=True)
        return values(0, solution)

    def inner_loss(
        self,
        architecture: Architecture,
        bias: AttentionalBias,
        linear: Apply,
        params: Params,
        written: Written,
    ) -> jax.Array:
        key, value, _, at_read = written
        statistics = linear(0, key) + jnp.concatenate([at_read, jnp.zeros_like(at_read)], axis=-1)
        return -jnp.sum(statistics * jnp.concatenate([value, key], axis=-1), axis=-1)


def conjugate_gradients(matvec: Callable[[jax.Array], jax.Array], right: jax.Array, iterations: int) -> jax.Array:
    """x of A x = right for every row [..., n], each with its own symmetric positive definite A."""

    def dot(x: jax.Array, y: jax.Array) -> jax.Array:
        # As a product: the sum of x * y takes XLA ten times as long on a CPU.
        return jnp.einsum("...n,...n->...", x, y, precision="highest")[..., None]

    def ratio(x: jax.Array, y: jax.Array) -> jax.Array:  # a row that has converged stays where it is
        return jnp.where(y > 0, x / jnp.where(y > 0, y, 1), 0)

    def step(carry: tuple[jax.Array, ...], _: None) -> tuple[tuple[jax.Array, ...], None]:
        x, residual, direction, size = carry
        image = matvec(direction)
        length = ratio(size, dot(direction, image))
        residual = residual - length * image
        after = dot(residual, residual)
        return (x + length * direction, residual, residual + ratio(after, size) * direction, after), None

    start = (jnp.zeros_like(right), right, right, dot(right, right))
    return jax.lax.scan(step, start, length=iterations)[0][0]


def check_window(window: int) -> None:
    """Raises ValueError for a window that is no whole number of 1 or more tokens."""
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"window is {window!r}: it must be an integer of 1 or more, for example 16.")


gradient_descent, momentum, omega, muon = GradientDescent, Momentum, Omega, Muon
delta_gradient_descent, implicit, least_squares = DeltaGradientDescent, Implicit, LeastSquares
