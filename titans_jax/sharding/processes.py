"""Several processes, one per host, that train one model together: joining, agreeing, and sharing out the rows.

    processes.start(config.processes)      # before anything else touches jax
    with processes.together():             # an error in one process ends them all
        ...

Every process runs the same program; what only one process sees (a file, a signal) must be sent to the others.
"""

import contextlib
import functools
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from titans_jax.config import ConfigError, ProcessesConfig
from titans_jax.errors import TitansError

PATIENCE = 300
"""Seconds that a process waits for the others at the start."""
SIGN_OF_LIFE = 100
"""Seconds without a sign of life after which jax.distributed takes a process for dead."""


class ProcessesError(TitansError, RuntimeError):
    """The processes cannot work together. The message says what is missing."""

    exit_code = 1


class ProcessLost(ProcessesError):
    """Another process has died. The exit code is that of jax where it notices first, on which launchers start again."""

    exit_code = 134


def start(config: ProcessesConfig) -> None:
    """Join the processes of this run, by the configuration or on a TPU slice of several hosts; alone, do nothing.

    A process that dies ends the others: at once where a collective notices it, else after `SIGN_OF_LIFE` seconds.

    Raises:
      ProcessesError: the coordinator's port is taken, nobody answers there within `PATIENCE` seconds, or the hosts of a
        slice do not find each other.
    """
    if config.coordinator is None:
        if _may_be_one_of_several_tpu_hosts():
            try:
                jax.distributed.initialize()
            except (ValueError, OSError) as error:  # jax finds no slice, or no server that could name one
                if jax.process_count() > 1:  # but the chips know of other hosts
                    raise ProcessesError(
                        f"the other hosts of this slice were not found ({error}); start all {jax.process_count()} "
                        "again, or name them with --processes.coordinator, --processes.count and --processes.index"
                    ) from error
        return
    host, port = config.coordinator.rsplit(":", 1)
    if config.index == 0:
        _check_free(int(port))  # jax ends in a segmentation fault where the port is taken
    else:
        _wait_for(host.strip("[]"), int(port), config.index)
    waiting = f"titans: process {config.index} waits for all {config.count} at {config.coordinator}, up to {PATIENCE} s"
    notice = threading.Timer(5, print, [waiting], {"file": sys.stderr, "flush": True})
    notice.daemon = True
    notice.start()
    jax.distributed.initialize(
        config.coordinator,
        config.count,
        config.index,
        initialization_timeout=PATIENCE,
        heartbeat_timeout_seconds=SIGN_OF_LIFE,
    )
    notice.cancel()


def _may_be_one_of_several_tpu_hosts() -> bool:
    """Whether jax should look for the other hosts: on Kubernetes the environment names them, else a server knows."""
    if "tpu" not in (jax.config.jax_platforms or ""):  # jax sets it on a machine with TPU chips
        return False
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES")
    return hosts is None or "," in hosts or "MEGASCALE_COORDINATOR_ADDRESS" in os.environ


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ProcessesError(
                f"port {port} of processes.coordinator cannot be used ({error.strerror}); use another one"
            ) from error


def _wait_for(host: str, port: int, index: int) -> None:
    give_up = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > give_up:
                raise ProcessesError(
                    f"process {index} got no answer from processes.coordinator {host}:{port} in {PATIENCE} s "
                    f"({error.strerror or error}); start process 0 there, and open the port between the hosts"
                ) from error
            time.sleep(0.5)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Continue after the `with` block only if every process got through it.

    Raises:
      ProcessesError: another process failed in it.
    """
    if jax.process_count() == 1:
        yield
        return
    try:
        yield
    except Exception:
        multihost_utils.process_allgather(np.array(False))
        raise
    passed = multihost_utils.process_allgather(np.array(True))
    if not passed.all():
        failed = ", ".join(str(i) for i in np.flatnonzero(~passed))
        raise ProcessesError(f"process {failed} of {len(passed)} cannot go on; what it printed says why")


def of_devices(error: Exception) -> bool:
    """Whether an operation on the devices, or between processes, has failed.

    jax raises JaxRuntimeError, but of Gloo, by which processes on CPUs talk, a plain ValueError where it fails in the
    call itself. TensorStore's errors of files are ValueErrors too.
    """
    return isinstance(error, jax.errors.JaxRuntimeError) or (type(error) is ValueError and "Gloo" in str(error))


@contextlib.contextmanager
def told_if_lost(what_now: str) -> Iterator[None]:
    """Raise ProcessLost, whose message ends with `what_now`, where an operation of several processes fails.

    Untold, the process would wait at its end for the one that died, until jax.distributed takes that for dead.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if not of_devices(error) or "RESOURCE_EXHAUSTED" in str(error) or jax.process_count() == 1:
            raise
        raise ProcessLost(
            f"process {jax.process_index()} of {jax.process_count()} cannot go on ({str(error).splitlines()[0]}); if "
            f"another one has died, what it printed says why; {what_now}"
        ) from error


def check_same(values: dict[str, Any]) -> None:
    """Refuse values, given by name, that are not the same in all processes.

    Raises:
      ConfigError: names the first value that differs, and a process in which it does.
    """
    sums = np.array([zlib.crc32(repr(value).encode()) for value in values.values()], np.uint32)
    differs = multihost_utils.process_allgather(sums).reshape(-1, len(sums)) != sums
    if differs.any():
        process, which = np.argwhere(differs)[0]
        name, value = list(values.items())[which]
        raise ConfigError(
            f"{name} is {value!r} for process {jax.process_index()} and something else for process {process}; "
            "give all the same"
        )


def make_shared_folder(folder: Path) -> None:
    """Make a folder, and check that it is the same one for all processes.

    Raises:
      ConfigError: some process sees another folder under that name.
    """
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    if jax.process_count() == 1:
        return
    name = multihost_utils.broadcast_one_to_all(np.uint32(time.time_ns() % (1 << 32)))
    mark = folder / f".seen_by_all_{int(name)}"
    with together():
        if jax.process_index() == 0:
            mark.touch()
    with together():
        if not mark.exists():
            raise ConfigError(
                f"training.run_dir {folder} is not the same folder for process {jax.process_index()} as for process "
                "0; use one on a disk that all hosts share, such as a mounted bucket"
            )
    if jax.process_index() == 0:
        mark.unlink()


def first_says(answer: bool) -> bool:
    """The answer of process 0, for all processes."""
    return bool(multihost_utils.broadcast_one_to_all(np.array(answer)))


def any_says(answer: bool) -> jax.Array:
    """Whether any process says yes: a bool scalar, computed on the devices after the work they were given before."""
    mesh, compiled = _vote()
    place = NamedSharding(mesh, PartitionSpec("devices"))
    with jax.set_mesh(mesh):
        return compiled(jax.make_array_from_process_local_data(place, np.full(jax.local_device_count(), answer)))


@functools.cache
def _vote() -> tuple[jax.sharding.Mesh, Callable[[jax.Array], jax.Array]]:
    mesh = jax.make_mesh((jax.device_count(),), ("devices",), axis_types=(AxisType.Auto,))
    return mesh, jax.jit(jnp.any, out_shardings=NamedSharding(mesh, PartitionSpec()))


def share_of_batch(place: jax.sharding.Sharding, rows: int) -> tuple[int, int]:
    """The block of a batch of `rows` rows that this process reads: (index of the block, number of blocks).

    Processes whose devices hold the same rows, because the tensor axis spans them, read the same block.

    Args:
      place: the sharding of the batch; its first dimension is the rows.
    """
    held: dict[int, set[int]] = {}
    for device, (where, *_) in place.devices_indices_map((rows, 1)).items():
        held.setdefault(device.process_index, set()).update(range(rows)[where])
    blocks = sorted({tuple(sorted(each)) for each in held.values()})
    return blocks.index(tuple(sorted(held[jax.process_index()]))), len(blocks)
