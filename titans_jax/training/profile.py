"""A trace of some steps, for xprof or TensorBoard."""

from pathlib import Path
from typing import Any

import jax


class Profile:
    """Traces the steps of a range into a folder; call `step` before each of them.

    Of several processes only the first traces, and only its own devices. Every step carries its number in the trace.
    Calls of Python functions are not in it: to record them the profiler walks the list of Python's threads, and where
    one that native code began ends just then, the process ends in a segmentation fault (as in CPython's issue 137400).
    """

    def __init__(self, steps: range, folder: Path):
        self._steps = steps if jax.process_index() == 0 else range(0)
        self._folder, self._tracing = folder, False

    def step(self, number: int, state: Any) -> jax.profiler.StepTraceAnnotation:
        """The annotation to run step `number` in.

        Args:
          state: the result of the step before, waited for where tracing starts or stops.
        """
        if self._tracing != (number in self._steps):
            jax.block_until_ready(state)  # a step belongs to the trace as a whole or not at all
            self._stop() if self._tracing else self._start()
        return jax.profiler.StepTraceAnnotation("train", step_num=number)

    def finish(self, state: Any) -> None:
        """End the trace, if the run's last step is in it."""
        if self._tracing:
            jax.block_until_ready(state)
            self._stop()

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(self._folder, profiler_options=options)
        self._tracing = True

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self._tracing = False
