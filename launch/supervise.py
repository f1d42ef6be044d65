#!/usr/bin/env python3
"""Run `titans train` on one host and tell by the exit code whether the run is finished.

    supervise.py TITANS train CONFIG [--field value ...] --training.run_dir RUN_DIR
    supervise.py --step RUN_DIR                 print the step of the latest checkpoint

`titans train` ends with 0 both at its last step and when SIGTERM made it save and stop. A program that restarts
interrupted work (the queued-resource launcher, Kubernetes) must distinguish the two. Here exit code 0 means finished,
42 stopped and saved, 2 a mistake in the configuration, anything else a failure.

Compiled programs are kept next to the run folders, in the bucket, unless JAX_COMPILATION_CACHE_DIR is set: a preempted
run goes on on a new machine, whose own cache is empty.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from common import STOPPED

COMMITTED = "commit_success.txt"
"""The last file of a checkpoint, where training.checkpoint_commit is "file"."""


def training(run_dir: Path) -> dict:
    """The section "training" of the run's configuration; {} before there is one."""
    config = run_dir / "config.json"
    return json.loads(config.read_text())["training"] if config.is_file() else {}


def latest_step(run_dir: Path) -> int:
    """Step of the latest complete checkpoint; 0 without one."""
    folder = run_dir / "checkpoints"
    found = [path for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    if training(run_dir).get("checkpoint_commit") == "file":  # a checkpoint's folder may be incomplete
        found = [path for path in found if (path / COMMITTED).exists()]
    return max((int(path.name) for path in found), default=0)


def finished(run_dir: Path) -> bool:
    """Whether the latest checkpoint is of the last step."""
    steps = training(run_dir).get("steps")
    return steps is not None and latest_step(run_dir) >= steps


def supervise(command: list[str], run_dir: Path) -> int:
    """Run the command, pass SIGTERM and SIGINT on to it, and return the exit code that the module describes."""
    compiled = {"JAX_COMPILATION_CACHE_DIR": str(run_dir.absolute().parent / "compiled")}
    process, passed = subprocess.Popen(command, env=compiled | os.environ), []

    def pass_on(received: int, _: object) -> None:
        passed.append(received)
        process.send_signal(received)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    code = process.wait()
    if -code in passed:  # before training began to listen for it, so there was nothing to save
        return STOPPED
    if code:
        return code if code > 0 else 128 - code
    return 0 if finished(run_dir) else STOPPED


def main(arguments: list[str]) -> int:
    """Print the latest step of the run folder after "--step", or supervise `titans train` with the arguments given;
    returns the exit code."""
    if arguments[:1] == ["--step"]:
        print(latest_step(Path(arguments[1])))
        return 0
    return supervise(arguments, Path(arguments[arguments.index("--training.run_dir") + 1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
