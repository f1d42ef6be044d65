"""What fails on a device or between processes, told in a sentence: memory that runs out, a process that has died."""

import contextlib
from collections.abc import Iterator

import jax

from titans_jax.training.device_memory import out_of_memory
from titans_jax.training.report import lost, of_devices


@contextlib.contextmanager
def told_as_stops() -> Iterator[None]:
    """Raise TrainingStopped where a device is out of memory, or (ProcessLost) an operation of several processes fails.

    Untold, the process would wait at its end for the one that died, until jax.distributed takes that for dead.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if not of_devices(error):
            raise
        if "RESOURCE_EXHAUSTED" in str(error):
            raise out_of_memory(error) from error
        if jax.process_count() == 1:
            raise
        raise lost(error) from error
