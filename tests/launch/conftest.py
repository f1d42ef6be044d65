"""A launcher with fake commands, and launch/ importable, for every test of this folder."""

import sys

import pytest

from tests.launch.launching import CHECKOUT, Launcher

sys.path.insert(0, str(CHECKOUT / "launch"))


@pytest.fixture
def launcher(tmp_path, monkeypatch, capfd) -> Launcher:
    return Launcher(tmp_path, monkeypatch, capfd)
