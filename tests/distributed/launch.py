"""Real processes on this machine that train together over Gloo, one CPU device each."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT = 150
"""Seconds after which the processes of a test are ended, whatever they do."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def launch(*commands: list[str], **variables: str) -> Iterator[list[subprocess.Popen]]:
    """Python processes with these arguments, output and errors piped; none is left behind the `with` block."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | variables
    started: list[subprocess.Popen] = []
    watchdog = threading.Timer(TIMEOUT, lambda: [process.kill() for process in started])
    watchdog.start()
    try:
        for command in commands:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            started.append(subprocess.Popen([sys.executable, *command], env=environment, text=True, **pipes))
        yield started
    finally:
        watchdog.cancel()
        for process in started:
            process.kill()
            process.communicate()


def finish(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """(exit code, output, errors) of each process when all have ended."""
    ended = [process.communicate() for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, ended, strict=True)]


def in_two(*arguments: str) -> list[list[str]]:
    """The same command for two processes, each told where the first one is and which one it is."""
    where = ["--processes.coordinator", f"localhost:{free_port()}", "--processes.count", "2", "--processes.index"]
    return [[*arguments, *where, str(index)] for index in range(2)]
