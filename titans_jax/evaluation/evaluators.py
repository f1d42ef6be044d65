"""Evaluators: tasks that a trained model is measured on, by name.

    @register_evaluator("word_count")
    def word_count(run: Run, batches: int | None) -> dict[str, float]: ...

`titans evaluate RUN word_count` runs it on a run whose configuration file, or another of its extensions, registers it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from titans_jax.registry import Registry

if TYPE_CHECKING:
    from titans_jax.training import Run

Evaluator = Callable[["Run", int | None], dict[str, float]]
"""(a trained model, how many batches to read at most or None for all) -> numbers by name."""

EVALUATORS: Registry[Evaluator] = Registry("evaluator")
"""Evaluators by name."""

register_evaluator: Callable[..., Callable[[Evaluator], Evaluator]] = EVALUATORS.register
