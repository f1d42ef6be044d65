"""Runs a launcher with fake commands first on PATH."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
FAKES = ("gcloud", "titans", "docker", "xpk", "tar")

OPTIONS = "--name titans-1 --project my-project --zone us-east5-b --bucket my-bucket".split()
DATA = {
    "source": "jsonl",
    "path": "/mnt/titans/data/text",
    "validation_path": None,
    "tokenizer": "/mnt/titans/data/t.model",
}
CHECKED = {"expect": "titans configs mac_170m", "contains": ["--training.run_dir /mnt/titans/runs/titans-1"]}
PREFLIGHT = [
    {**CHECKED, "stdout": json.dumps({"data": DATA}) + "\n"},
    {"expect": "titans compile mac_170m --topology"},
    {
        "expect": "gcloud storage buckets describe gs://my-bucket --project my-project --raw",
        "contains": ["value(hierarchicalNamespace.enabled)"],
        "stdout": "True\n",
    },
    {"expect": "gcloud storage ls --project my-project gs://my-bucket/data/text"},
    {"expect": "gcloud storage ls --project my-project gs://my-bucket/data/t.model"},
]
UPLOAD = [
    {"expect": "tar --create", "contains": ["titans-1.tar.gz", " titans_jax configs launch pyproject.toml"]},
    {"expect": "gcloud storage cp", "contains": ["titans-1.tar.gz gs://my-bucket/code/titans-1.tar.gz"]},
]


@dataclass
class Launched:
    """What came of it."""

    code: int
    out: str
    err: str
    asked: list[str]
    """The command lines that the fakes were asked, in order."""


class Launcher:
    """`launcher("tpu_vm.py", arguments, scenario)`: in this process, the fakes in processes of their own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
        self.folder, self._monkeypatch, self._capfd = folder, monkeypatch, capfd
        self.bin, self._fake = folder / "bin", folder / "fake"
        self.bin.mkdir()
        self._fake.mkdir()
        for name in FAKES:
            shutil.copy(Path(__file__).parent / "fake_command.sh", self.bin / name)
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        # Nothing else of the machine's: a real gcloud must not be found.
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setenv("FAKE", str(self._fake))

    def record(self, scenario: list[dict[str, Any]]) -> None:
        """What the fakes answer from now on; a step is what fake_command.sh says, all but `expect` optional."""
        shutil.rmtree(self._fake)
        for i, step in enumerate(scenario):
            (self._fake / str(i)).mkdir(parents=True)
            step = {"stdout": "", "stderr": "", "code": 0, **step, "contains": "\n".join(step.get("contains", []))}
            for name, value in step.items():
                text = str(value)
                (self._fake / str(i) / name).write_text(text if not text or text.endswith("\n") else text + "\n")
        self._fake.mkdir(exist_ok=True)
        (self._fake / "position").write_text("0\n")
        (self._fake / "log").write_text("")

    def asked(self) -> list[str]:
        """The command lines so far."""
        return (self._fake / "log").read_text().splitlines()

    def __call__(self, script: str, arguments: list[str], scenario: list[dict[str, Any]] = ()) -> Launched:
        import common

        self.record(scenario)
        self._monkeypatch.setattr("sys.argv", [script, *arguments])
        code = common.main(__import__(script.removesuffix(".py")).run)
        return Launched(code, *self._capfd.readouterr(), self.asked())

    def start(self, script: str, arguments: list[str], scenario: list[dict[str, Any]]) -> subprocess.Popen:
        """The launcher as a process of its own, running."""
        self.record(scenario)
        command = [sys.executable, str(CHECKOUT / "launch" / script), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        # A suite in the background of a shell ignores the signal, and so would its children. (Not by a function
        # of the child's: that would fork, which jax warns of, where Popen otherwise does not.)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return subprocess.Popen(command, env=os.environ, cwd=self.folder, **pipes)
        finally:
            signal.signal(signal.SIGINT, before)


def status(*hosts: tuple[str, int | str, int]) -> str:
    """What the hosts print: (state, code, step) of each."""
    lines = (f"titans-host t1k-w-{i} {state} {code} {step}\n" for i, (state, code, step) in enumerate(hosts))
    return "some banner of ssh\n" + "".join(lines)
