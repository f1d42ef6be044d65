"""How far a study is: a bar on a terminal, and elsewhere, as in a log, a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from titans_jax.quiet_lines import QuietLines


class StudyProgress:
    """Shows how many training steps of a study's models are done, and which model is being trained.

    Args:
      total: steps of all models that are not finished.
      now: the time in seconds.
    """

    def __init__(self, console: Console, total: int, now: Callable[[], float] = time.monotonic):
        self.console, self._total, self._done, self._now = console, total, 0, now
        self._words, self._begun, self._lines = "", now(), QuietLines(console, now)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(
            *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bar.add_task("", total=total)

    def model(self, words: str, done: int) -> None:
        """A model begins; done: the steps of the models before it, even those that were not all taken."""
        self._words, self._done = words, done
        self._bar.update(self._task, description=words, completed=done)

    def step(self) -> None:
        """One more step has been taken."""
        self._done += 1
        self._bar.advance(self._task)
        if self._lines.due():
            left = (self._total - self._done) * (self._now() - self._begun) / self._done
            self.console.print(f"{self._words}  step {self._done:,} of {self._total:,}  eta {left:,.0f} s")

    def __enter__(self) -> StudyProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()
