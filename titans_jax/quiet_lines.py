"""Lines of progress in a log, where long work has no progress bar: when the next one is due."""

import time
from collections.abc import Callable

from rich.console import Console

QUIET_SECONDS = 30.0
"""Time between two lines."""


class QuietLines:
    """Tells when the next line is due: every 30 seconds, and never on a terminal, which shows a bar.

    Args:
      now: the time in seconds.
    """

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic):
        self._terminal, self._now, self._said = console.is_terminal, now, now()

    def due(self) -> bool:
        """Whether to print a line now; then the next is due in 30 seconds."""
        due = not self._terminal and self._now() - self._said >= QUIET_SECONDS
        if due:
            self._said = self._now()
        return due
