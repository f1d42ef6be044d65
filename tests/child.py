"""Programs in a process of their own, for what a process decides once: its devices, its libtpu."""

import os
import subprocess
import sys


def run(program: str, *folders: str, **environment: str) -> str:
    """What a program prints; `folders` are imported from first. Fails with what it says last if it does."""
    paths = os.pathsep.join([*folders, *filter(None, sys.path)])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths} | environment
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
