"""Stopping in good order when the machine is taken away (SIGTERM) or someone presses Ctrl-C."""

import signal
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """Inside the `with` block the first SIGTERM or SIGINT sets `requested`; a second one ends the process at once.

    With jax.distributed the runtime owns the signal and lets all processes stop at the same step
    (`Checkpoints.reached_preemption`), so `install=False` leaves the signals alone.
    """

    def __init__(self, install: bool = True):
        # Python allows handlers in the main thread only; elsewhere the caller owns the signals.
        self._signals = (signal.SIGTERM, signal.SIGINT) if install else ()
        self._signals = self._signals if threading.current_thread() is threading.main_thread() else ()
        self._before: list[Any] = []
        self.requested = False

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        for each in self._signals:
            signal.signal(each, signal.SIG_DFL)

    def __enter__(self) -> "StopRequest":
        self._before = [signal.signal(number, self._request) for number in self._signals]
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in zip(self._signals, self._before, strict=True):
            signal.signal(number, handler)
