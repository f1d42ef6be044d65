"""What fails on a device or between processes, told in a sentence: memory that runs out, a process that has died."""

import contextlib
from collections.abc import Iterator

import jax

from titans_jax.sharding import processes
from titans_jax.training.device_memory import out_of_memory


@contextlib.contextmanager
def told_as_stops() -> Iterator[None]:
    """Raise TrainingStopped where a device is out of memory, ProcessLost where an operation of several processes
    fails."""
    try:
        with processes.told_if_lost("run the same commands again to go on from the last checkpoint"):
            yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise out_of_memory(error) from error
