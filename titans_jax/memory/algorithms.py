"""Memory algorithms: how a token's inner gradient becomes a step."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """How gradients are turned into the step S_t; `has_momentum` says whether S is carried."""

    has_momentum = False


@dataclasses.dataclass(frozen=True)
class GradientDescent(Algorithm):
    """S_t = -theta_t u_t (Miras eq 5)."""


@dataclasses.dataclass(frozen=True)
class Momentum(Algorithm):
    """S_t = eta_t S_{t-1} - theta_t u_t, past and momentary surprise (Titans eq 9-10)."""

    has_momentum = True


gradient_descent, momentum = GradientDescent, Momentum
