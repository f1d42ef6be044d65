"""Retention gates: how much of the memory survives a token (papers 3.4)."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Retention:
    """How the carried weights lose their past before a step is added."""


@dataclasses.dataclass(frozen=True)
class Decay(Retention):
    """W_t = (1 - alpha_t) W_{t-1} + S_t: the local L2 retention of Titans (eq 13) and Yaad."""


decay = Decay
