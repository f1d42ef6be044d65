"""Stopping in good order when the machine is taken away (SIGTERM) or someone presses Ctrl-C."""

import signal
import threading
from types import FrameType
from typing import Any

import jax

from titans_jax.sharding import processes


class StopRequest:
    """Inside the `with` block the first SIGTERM or SIGINT asks to stop; a second one ends the process at once.

    A signal to one of several processes stops them all. jax has a service for that, but Orbax' threads call it too,
    with numbers of older steps, after which it may stop processes at different steps; here the processes vote instead.
    """

    def __init__(self) -> None:
        # Python allows handlers in the main thread only; elsewhere the caller owns the signals.
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._signals = (signal.SIGTERM, signal.SIGINT) if in_main_thread else ()
        self._before: list[Any] = []
        self._signalled = self._agreed = False
        self._vote: jax.Array | None = None

    def requested(self) -> bool:
        """Whether to stop now; the n-th call gives every process the same answer, so all must call it equally often.

        With several processes the answer is that of the call before, which the devices have computed by now, so that
        nothing waits for it.
        """
        if jax.process_count() == 1:
            return self._signalled
        if not self._agreed:
            before, self._vote = self._vote, processes.any_says(self._signalled)
            self._agreed = before is not None and bool(before)
        return self._agreed

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        for each in self._signals:
            signal.signal(each, signal.SIG_DFL)

    def __enter__(self) -> "StopRequest":
        self._before = [signal.signal(number, self._request) for number in self._signals]
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in zip(self._signals, self._before, strict=True):
            signal.signal(number, handler)
