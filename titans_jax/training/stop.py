"""Stopping in good order when the machine is taken away (SIGTERM) or someone presses Ctrl-C."""

import signal
import threading
from types import FrameType
from typing import Any

from jax.experimental import multihost_utils


class StopRequest:
    """Inside the `with` block the first SIGTERM or SIGINT asks to stop; a second SIGINT ends the process at once.

    With several processes jax.distributed owns SIGTERM: it tells the others, and all of them agree where to stop. A
    process alone is ended at once by a second SIGTERM too.
    """

    def __init__(self, processes: int = 1):
        self._alone = processes == 1
        # Python allows handlers in the main thread only; elsewhere the caller owns the signals.
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._signals = [signal.SIGINT, *[signal.SIGTERM] * self._alone] if in_main_thread else []
        self._before: list[Any] = []
        self._requested, self._calls = False, 0

    def requested(self) -> bool:
        """Whether to stop now; the n-th call gives every process the same answer, so all must call it equally often."""
        if not self._alone and not self._requested:
            # jax settles on the call after the latest one of any process, and says yes at exactly that one. Counting
            # calls, not steps, it works before the first step too, and while a step's evaluation goes on.
            self._calls += 1
            self._requested = multihost_utils.reached_preemption_sync_point(self._calls)
        return self._requested

    def _request(self, number: int, frame: FrameType | None) -> None:
        for each in self._signals:
            signal.signal(each, signal.SIG_DFL)
        if self._alone:
            self._requested = True
        else:
            signal.raise_signal(signal.SIGTERM)

    def __enter__(self) -> "StopRequest":
        self._before = [signal.signal(number, self._request) for number in self._signals]
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in zip(self._signals, self._before, strict=True):
            signal.signal(number, handler)
