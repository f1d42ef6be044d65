"""Attentional biases: the inner loss of one token (Miras eq 10-17; memory/README.md, The rule). Each is one function;
the engine differentiates it.

A bias may take a parameter from every token, `Gates.bias_gate`: the threshold of the Huber losses, the shift of
`value_shift`, the slope of `affine`. Where the gate is None, `delta` is used instead, and for `affine` a slope of 1.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from titans_jax.memory.rule.capabilities import drop_inherited
from titans_jax.registry import Registry

EPSILON = 1e-6

BIASES: Registry[Callable[..., AttentionalBias]] = Registry("attentional bias")
"""Attentional biases by name; `affine` belongs to RWKV-7 and is not among them."""

register_bias = BIASES.register


@dataclasses.dataclass(frozen=True)
class AttentionalBias(abc.ABC):
    """The inner loss of one token. A bias declares:

    takes_gate: it takes a parameter from every token, `Gates.bias_gate`. gate_by_channel: that may differ by channel.
    affine: its cotangent is slope(gate) * read - value, for which a linear memory has a closed form over a whole block
    of tokens; it then has `slope`. constant_slope: that slope where it is the same for all tokens, or None.

    A subclass that overrides `__call__` or `slope` has affine, constant_slope and gate_by_channel only if it
    declares them.
    """

    takes_gate = False
    gate_by_channel = False
    affine = False
    constant_slope: ClassVar[float | None] = None

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        drop_inherited(cls, {"affine": False, "constant_slope": None, "gate_by_channel": False}, ("__call__", "slope"))

    @abc.abstractmethod
    def __call__(self, read: jax.Array, value: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        """read, value [..., head_dim], gate [..., 1] or [..., head_dim] -> losses [...]."""

    def bounded(self) -> AttentionalBias:
        """The bias as models with bounded slopes have it: with a cotangent that is nowhere much steeper than for an
        error of 1. By default the bias itself."""
        return self


@dataclasses.dataclass(frozen=True)
class AffineBias(AttentionalBias):
    """A bias with the cotangent slope(gate) * read - value (memory/README.md, Linear memories: one triangular
    system)."""

    affine = True

    @abc.abstractmethod
    def slope(self, gate: jax.Array | None) -> float | jax.Array:
        """The factor of the read: a float, or [..., 1]."""


@dataclasses.dataclass(frozen=True)
class DeltaBias(AttentionalBias):
    """A bias with a threshold or shift `delta`, in whose place a token's gate is used unless it is `constant`.

    Raises ValueError for a delta that is not above 0 (`ValueShift`: that is below 0).
    """

    delta: float = 1.0
    constant: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def takes_gate(self) -> bool:
        """See `AttentionalBias`."""
        return not self.constant

    def __post_init__(self) -> None:
        check_positive("delta", self.delta)

    def delta_of(self, gate: jax.Array | None) -> float | jax.Array:
        """delta of every token, a float or [...], for a bias that measures the norm of the error."""
        return self.delta if gate is None else gate[..., 0]


@register_bias()
@dataclasses.dataclass(frozen=True)
class L2(AffineBias):
    """1/2 ||read - value||^2 (Titans eq 12 with the factor of its appendix C); cotangent read - value."""

    affine = True
    constant_slope: ClassVar = 1.0

    def __call__(self, read: jax.Array, value: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        return 0.5 * jnp.sum(jnp.square(read - value), axis=-1)

    def slope(self, gate: jax.Array | None) -> float | jax.Array:
        return 1.0


@register_bias()
@dataclasses.dataclass(frozen=True)
class DotProduct(AffineBias):
    """-<read, value>, the Hebbian bias of linear attention (Miras eq 8); cotangent -value."""

    affine = True
    constant_slope: ClassVar = 0.0

    def __call__(self, read: jax.Array, value: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        return -jnp.sum(read * value, axis=-1)

    def slope(self, gate: jax.Array | None) -> float | jax.Array:
        return 0.0


@dataclasses.dataclass(frozen=True)
class Affine(AffineBias):
    """1/2 s ||read||^2 - <read, value>, s the token's gate: s = 1 corrects as L2, s = 0 adds as the dot product.

    RWKV-7 erases with one and writes with the other (arXiv 2503.14456).
    """

    takes_gate = True
    affine = True

    def __call__(self, read: jax.Array, value: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        return jnp.sum(0.5 * self.slope(gate) * jnp.square(read) - read * value, axis=-1)

    def slope(self, gate: jax.Array | None) -> float | jax.Array:
        return 1.0 if gate is None else gate


@register_bias()
@dataclasses.dataclass(frozen=True)
class Lp(AttentionalBias):
    """||read - value||_p^p, p >= 1 (Miras eq 10-11), with the smooth sign and absolute value of its remark 5.

    cotangent p tanh(sharpness r) (r^2 + epsilon)^((p-1)/2); for even p the polynomial p r^(p-1), as it is. The paper
    leaves sharpness open. None is 50 or, if that is less, the sharpness for which the cotangent has slope 1 at 0: with
    a steeper one, each write magnifies the one before, and no model trains (memory/what_was_tried.md).

    linear_from: for larger errors the cotangent goes on as a straight line (memory/README.md, Gates); None: never, as
    printed.

    Raises ValueError for a p below 1 or infinite, or a sharpness, epsilon or linear_from that is not above 0.
    """

    p: float = 3.0
    sharpness: float | None = None
    epsilon: float = EPSILON
    linear_from: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.p < float("inf"):
            raise ValueError(f"p is {self.p!r}: the L_p bias needs a finite p of 1 or more, for example 3.")
        check_positive("epsilon", self.epsilon)
        for name in ("sharpness", "linear_from"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))

    def __call__(self, read: jax.Array, value: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        residual, p, most = read - value, self.p, self.linear_from
        if most is None:
            return jnp.sum(self._power(residual), axis=-1)
        near = jnp.clip(residual, -most, most)
        beyond = jnp.abs(residual) - jnp.abs(near)
        slope, curvature = p * most ** (p - 1), p * (p - 1) * most ** (p - 2)
        return jnp.sum(self._power(near) + slope * beyond + 0.5 * curvature * jnp.square(beyond), axis=-1)

    def bounded(self) -> AttentionalBias:
        """See `AttentionalBias`: a cotangent that grows faster than the error does so up to an error of 1."""
        return self if self.p <= 2 or self.linear_from is not None else dataclasses.replace(self, linear_from=1.0)

    def _power(self, residual: jax.Array) -> jax.Array:
        """|residual|^p of every coordinate."""
        if self.p % 2 == 0:
            return residual ** int(self.p)
        sharpness = self.sharpness or min(50.0, self.epsilon ** ((1 - self.p) / 2) / self.p)
        return smooth_power(self.p, sharpness, self.epsilon, residual)


@register_bias()
def value_less(sharpness: float | None = None, epsilon: float = EPSILON) -> Lp:
    """L_1 (Miras eq 12), whose cotangent is the sign of the error, whatever its size; by default tanh of the error, see
    `Lp`."""
    return Lp(1.0, sharpness, epsilon)


@register_bias()
@dataclasses.dataclass(frozen=True)
class Huber(DeltaBias):
    """Huber's loss of every coordinate (Miras eq 13-14); cotangent clip(read - value, -delta, delta)."""

    gate_by_channel = True

    def __call__(self, read: jax.Array, value: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        return jnp.sum(optax.losses.huber_loss(read, value, delta=self.delta if gate is None else gate), axis=-1)


@register_bias()
@dataclasses.dataclass(frozen=True)
class HuberNorm(DeltaBias):
    """Huber's loss of ||read - value|| (Miras eq 15); cotangent r min(1, delta / ||r||). The gate is [..., 1]."""

    def __call__(self, read: jax.Array, value: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        return optax.losses.huber_loss(safe_norm(read - value), delta=self.delta_of(gate))


@register_bias()
@dataclasses.dataclass(frozen=True)
class Mixture(DeltaBias):
    """Miras eq 16, literally: ||r||^2 while ||r|| <= delta, delta ||r||_1 beyond; the cotangent jumps at the switch.

    Raises ValueError for a delta or a sharpness that is not above 0.
    """

    sharpness: float = 50.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("sharpness", self.sharpness)

    def __call__(self, read: jax.Array, value: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        residual, delta = read - value, self.delta_of(gate)
        far = delta * jnp.sum(smooth_power(1.0, self.sharpness, EPSILON, residual), axis=-1)
        return jnp.where(safe_norm(residual) <= delta, jnp.sum(jnp.square(residual), axis=-1), far)


@register_bias()
@dataclasses.dataclass(frozen=True)
class ValueShift(DeltaBias):
    """max over ||shift|| <= delta of 1/2 ||r - shift||^2 = 1/2 (||r|| + delta)^2 (Miras eq 17); delta >= 0, learnable
    through the gate. Cotangent r + delta r / ||r||."""

    def __post_init__(self) -> None:
        if not self.delta >= 0:
            raise ValueError(f"delta is {self.delta!r}: the largest shift of a value must be 0 or more, for example 1.")

    def __call__(self, read: jax.Array, value: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        return 0.5 * jnp.square(safe_norm(read - value) + self.delta_of(gate))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def smooth_power(p: float, sharpness: float, epsilon: float, r: jax.Array) -> jax.Array:
    """(r^2 + epsilon)^(p/2), whose derivative is declared to be p tanh(sharpness r) (r^2 + epsilon)^((p-1)/2)."""
    return (jnp.square(r) + epsilon) ** (p / 2)


@smooth_power.defjvp
def smooth_power_jvp(
    p: float, sharpness: float, epsilon: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (r,), (dr,) = primals, tangents
    slope = p * jnp.tanh(sharpness * r) * (jnp.square(r) + epsilon) ** ((p - 1) / 2)
    return smooth_power(p, sharpness, epsilon, r), slope * dr


def safe_norm(r: jax.Array) -> jax.Array:
    """||r|| over the last axis, with gradient 0 at 0."""
    squares = jnp.sum(jnp.square(r), axis=-1)
    zero = squares == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, squares)))


def check_positive(field: str, value: float) -> None:
    """Raises ValueError for a number that is not above 0."""
    if not value > 0:
        raise ValueError(f"{field} is {value!r}: it must be above 0, for example 1.")


l2, dot_product, affine, lp, huber, huber_norm, mixture, value_shift = (
    L2, DotProduct, Affine, Lp, Huber, HuberNorm, Mixture, ValueShift
)  # fmt: skip
