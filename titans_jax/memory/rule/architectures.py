"""Memory architectures: what the fast weights compute. Written once, as a function of "apply fast matrix i to x".

Every form of the engine passes its own `linear(i, x)` (memory/README.md, Reads inside a chunk), so an architecture is
all a new memory needs: its matrix shapes and its read. Add one by subclassing `Architecture`; nothing else changes.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from titans_jax.memory.rule.capabilities import forget
from titans_jax.registry import Registry

NORM_EPSILON = 1e-6

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
    that overrides `read` or `shapes` has them only if it says so. input_matrices: how many of the first matrices read
    the input itself, which counts of operations need.
    """

    linear = False
    normalized = False
    input_matrices = 1

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        forget(cls, {"linear": False, "normalized": False}, ("read", "shapes"))

    @abc.abstractmethod
    def shapes(self, head_dim: int) -> Shapes:
        """[in, out] of every fast matrix."""

    @abc.abstractmethod
    def read(self, linear: Apply, params: Params, x: jax.Array) -> jax.Array:
        """[..., head_dim] -> [..., head_dim]; params holds the slow parameters of `slow`."""

    def slow(self, head_dim: int) -> Params:
        """Start values of the slow parameters other than the fast weights' start."""
        return {}

    def start_variance(self, head_dim: int) -> float:
        """Variance over channels of what a normalized memory's norm is given, for a unit key and start weights of
        standard deviation 1/sqrt(in) (`init_params`); 0 where it is not known."""
        return 0.0

    @property
    def slope_known(self) -> bool:
        """Whether there is a norm and its `start_variance`, which `MemoryRule.bound_slope` needs."""
        return self.normalized and self.start_variance(2) > 0


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
    """M(x) = gelu(... gelu(x W_0) ...) W_{depth-1}, hidden width expansion * head_dim (memory/README.md, The rule)."""

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
        x = linear(0, x)
        for i in range(1, self.depth):
            x = linear(i, gelu(x))
        return x


@register_architecture()
@dataclasses.dataclass(frozen=True)
class ResidualMlp(Mlp):
    """M(x) = x + LN(MLP(x)), the default memory of Titans and Miras; the norm's scale is slow (memory/README.md, The
    rule; Readings)."""

    normalized = True

    def read(self, linear: Apply, params: Params, x: jax.Array) -> jax.Array:
        return x + layer_norm(super().read(linear, params, x), params["norm_scale"])

    def slow(self, head_dim: int) -> Params:
        return {"norm_scale": jnp.ones((head_dim,), jnp.float32)}

    def start_variance(self, head_dim: int) -> float:
        """What a matrix gives is normal, with the mean square of what it is given as its variance."""
        variance = 1 / head_dim
        nodes, weights = np.polynomial.hermite_e.hermegauss(64)
        for _ in range(self.depth - 1):
            x = math.sqrt(variance) * nodes
            hidden = x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
            variance = float(np.sum(weights * hidden**2) / np.sum(weights))
        return variance * (1 - 1 / head_dim)


@register_architecture()
@dataclasses.dataclass(frozen=True)
class GatedMlp(Architecture):
    """M(x) = (silu(x W_0) * (x W_1)) W_2, the SwiGLU memory of LaCT (arXiv 2505.23884)."""

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


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
    """`jax.nn.gelu`, the tanh approximation, in as few operations as value and slope together take: apart from its
    matrix products, a memory does little else."""
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


linear, mlp, residual_mlp, gated_mlp = Linear, Mlp, ResidualMlp, GatedMlp
