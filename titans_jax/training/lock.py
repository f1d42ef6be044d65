"""One training at a time in a run folder: a file there names the process that trains, and a second one is refused.

The file, `lock.json`, holds the host, the process, its start time, and a count that the holder raises every `BEAT`
seconds. A holder that was killed leaves the file behind. On the same host its process is then known to be gone; from
another host (a folder on a shared disk or a mounted bucket) it is taken to be gone when the file does not change for
`PATIENCE` seconds. Clocks of different hosts are not compared.
"""

import functools
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from titans_jax.errors import TitansError

BEAT = 15.0
PATIENCE = 100.0
"""Longer than a few beats, and than the 60 seconds for which a mounted bucket may show an old file."""
SETTLE = 1.0
"""Seconds to wait after taking over a lock: of two processes that do so, the earlier then sees the later one's file."""


class RunInUse(TitansError, RuntimeError):
    """Another process trains in the run folder."""

    exit_code = 1


class RunLock:
    """Inside the `with` block this process is the only one to train in `run_dir`.

    Args:
      say: called with one sentence if it has to wait, and why.

    Raises:
      RunInUse: another process trains there.
    """

    def __init__(self, run_dir: Path, say: Callable[[str], None] = print):
        self._run_dir, self._path, self._say = run_dir, run_dir / "lock.json", say
        self._own = {"host": _host(), "process": os.getpid(), "started": _started(os.getpid()), "id": uuid.uuid4().hex}
        self._beside = run_dir / f"lock.{self._own['id']}.tmp"
        self._lost = False
        self._end = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)

    def check(self) -> None:
        """Raise RunInUse if another process has taken the folder over, as after a sleep of this machine."""
        if self._lost:
            raise RunInUse(
                f"{self._described(_parse(self._read()))}, and took it over while this process did not run; "
                "this one stops without writing"
            )

    def __enter__(self) -> "RunLock":
        while not self._create():
            text = self._read()
            holder = _parse(text)
            if text is None:
                continue  # released between the two calls
            if not self._is_abandoned(text, holder):
                raise RunInUse(
                    f"{self._described(holder)}; wait until it ends or stop it, or use another training.run_dir"
                )
            self._write(0)
            time.sleep(SETTLE)
            if _is_same(_parse(self._read()), self._own):
                break
        self._beats.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end.set()
        self._beats.join()
        if not self._lost and _is_same(_parse(self._read()), self._own):
            self._path.unlink(missing_ok=True)
            self._beside.unlink(missing_ok=True)

    def _create(self) -> bool:
        """Make the file, unless it is there."""
        try:
            with self._path.open("x") as file:
                json.dump(self._own, file)
        except FileExistsError:
            return False
        return True

    def _write(self, beat: int) -> None:
        # A write that fails, on a full disk, must not empty the file; two that take a lock over must not share one.
        self._beside.write_text(json.dumps({**self._own, "beat": beat}))
        self._beside.replace(self._path)

    def _read(self) -> str | None:
        try:
            return self._path.read_text(errors="replace")
        except FileNotFoundError:
            return None

    def _beat(self) -> None:
        beat = 0
        while not self._end.wait(BEAT):
            try:
                if not _is_same(_parse(self._read()), self._own):
                    self._lost = True
                    return
                self._write(beat := beat + 1)
            except OSError:  # a full disk or a bucket that does not answer: the next beat may get through
                continue

    def _is_abandoned(self, text: str, holder: dict[str, Any]) -> bool:
        if holder.get("host") == _host():
            started = _started(holder.get("process"))
            # Start times shift by less than a second if the clock is corrected in between.
            return started is None or abs(started - holder.get("started", 0.0)) > 2
        self._say(f"{self._described(holder)}; waiting up to {PATIENCE:.0f} s to see whether it still does")
        give_up = time.monotonic() + PATIENCE
        while time.monotonic() < give_up:
            time.sleep(min(1.0, PATIENCE / 10))
            if self._read() != text:
                return False
        return True

    def _described(self, holder: dict[str, Any]) -> str:
        who = f"process {holder.get('process', '(unknown)')} on {str(holder.get('host', '(unknown)')).split('/')[0]}"
        since = holder.get("started")
        since = f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(since))}" if since else ""
        return f"{who} trains in {self._run_dir}{since}"


def _parse(text: str | None) -> dict[str, Any]:
    """The content of a lock file; {} if it is absent or was not written to its end."""
    try:
        found = json.loads(text or "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_same(holder: dict[str, Any], own: dict[str, Any]) -> bool:
    return holder.get("id") == own["id"]


@functools.cache
def _host() -> str:
    """The scope in which process numbers are unique: this host, and in it this container."""
    space = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{os.readlink(space) if space.is_symlink() else ''}"


def _started(process: Any) -> float | None:
    """When a process of this host started, in seconds since 1970; None if there is none, or one that ended and whose
    parent has not asked for its exit code."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else None
        return None if found is None or found.status() == psutil.STATUS_ZOMBIE else found.create_time()
    except (psutil.Error, ValueError, OverflowError):
        return None
