"""Stands in for systemctl, systemd-run, sudo and mountpoint on a host in the tests: units are plain processes.

A unit's files are in $FAKE_UNITS: NAME.command (JSON), NAME.pid, and NAME.code once it has ended.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

units, (program, *arguments) = Path(os.environ["FAKE_UNITS"]), [Path(sys.argv[0]).name, *sys.argv[1:]]


def show(unit: str, name: str) -> str:
    """What systemd says of a unit with --remain-after-exit."""
    loaded, code = (units / f"{unit}.pid").exists(), units / f"{unit}.code"
    if not loaded:
        return {"LoadState": "not-found", "ActiveState": "inactive", "SubState": "dead"}[name]
    if not code.exists():
        pid = (units / f"{unit}.pid").read_text()
        return {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "MainPID": pid}[name]
    number = int(code.read_text())
    states = (
        {"ActiveState": "failed", "SubState": "failed"} if number else {"ActiveState": "active", "SubState": "exited"}
    )
    states |= {"LoadState": "loaded", "ExecMainCode": "1" if number >= 0 else "2", "ExecMainStatus": str(abs(number))}
    return states[name]


def run() -> None:
    """systemd-run: the options, then the command, under a keeper that notes its exit code."""
    settings, rest = {"properties": {}, "environment": {}}, list(arguments)
    while rest[0].startswith("--"):
        option = rest.pop(0)
        if option in ("--quiet", "--remain-after-exit"):
            continue
        value = rest.pop(0)
        if option in ("--property", "--setenv"):
            kind = "properties" if option == "--property" else "environment"
            settings[kind].update([value.split("=", 1)])
        elif option in ("--unit", "--uid", "--gid"):
            settings[option[2:]] = value
        else:
            sys.exit(f"fake: {option}")
    name = settings["unit"]
    if (units / f"{name}.pid").exists():
        sys.exit(f"fake: unit {name} exists")
    (units / f"{name}.command").write_text(json.dumps({**settings, "command": rest}))
    log = open(settings["properties"].get("StandardOutput", "append:/dev/null").removeprefix("append:"), "ab")
    environment = os.environ | settings["environment"]
    if os.fork():
        while not (units / f"{name}.pid").exists():
            time.sleep(0.01)
        return
    os.setsid()
    for stream in (0, 1, 2):  # the keeper must not hold the caller's pipes
        os.dup2(log.fileno(), stream)
    process = subprocess.Popen(
        rest, stdout=log, stderr=log, env=environment, cwd=settings["properties"].get("WorkingDirectory")
    )
    (units / f"{name}.new").write_text(str(process.pid))
    (units / f"{name}.new").rename(units / f"{name}.pid")
    code = process.wait()
    (units / f"{name}.code").write_text(str(code))


def stop(unit: str) -> None:
    """systemctl stop with KillMode=mixed: SIGTERM to the main process, wait; a unit that failed stays loaded."""
    pid, code = units / f"{unit}.pid", units / f"{unit}.code"
    if not pid.exists():
        sys.exit(5)
    if not code.exists():
        os.kill(int(pid.read_text()), signal.SIGTERM)
    while not (code.exists() and code.read_text()):
        time.sleep(0.01)
    if code.read_text() == "0":
        forget(unit)


def forget(unit: str) -> None:
    """systemctl reset-failed."""
    for suffix in ("pid", "code"):
        (units / f"{unit}.{suffix}").unlink(missing_ok=True)


if program == "sudo":
    os.execvp(arguments[0], arguments)
elif program == "systemd-run":
    run()
elif arguments[0] == "show":
    print(show(arguments[1], arguments[3]))
else:
    {"stop": stop, "reset-failed": forget}[arguments[0]](arguments[1])
