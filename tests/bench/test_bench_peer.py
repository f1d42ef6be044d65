"""`titans bench peer`: our side of every kind of case in a process, and what a Python without the peer gets."""

import csv
import dataclasses
import sys

import pytest

from titans_jax.bench import peer
from titans_jax.config import ConfigError
from titans_jax.training.run import count_params

SMALL = peer.Case("memory", 16, 2, 8, num_heads=2, head_dim=8, depth=1, segment=8, num_persistent=2)

PEER = """
import time
def make(case):
    assert case["kind"] in ("memory", "train", "decode")
    return 7, lambda: time.sleep({"memory": 0.02, "train": 0.04, "decode": 0.001}[case["kind"]])
"""
"""A peer whose calls take as long as they say."""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["memory", "train", "decode"])
def test_our_side_runs_in_a_process(kind):
    case = dataclasses.replace(SMALL, kind=kind)
    with peer.started(sys.executable, "titans_jax.bench.peer", case) as (parameters, run):
        assert 0 < run() < 60
    whole = count_params(case.model)
    assert parameters < whole if kind == "memory" else parameters == whole  # a layer has no embedding


@pytest.mark.slow
@pytest.mark.processes
def test_every_case_is_a_row_of_the_table_and_a_bar_of_the_plot(tmp_path, monkeypatch, capsys):
    (tmp_path / "peer_torch.py").write_text(PEER)
    (tmp_path / "peer_program.py").write_text(peer.PROGRAM.read_text())  # beside it lies this peer, not titans-pytorch
    monkeypatch.setattr(peer, "PROGRAM", tmp_path / "peer_program.py")
    monkeypatch.setattr(peer, "CASES", (SMALL, dataclasses.replace(SMALL, kind="decode")))
    peer.main(peer.Options(python=sys.executable, kinds=("memory",), repeats=1, output=str(tmp_path / "out")))
    (row,) = csv.DictReader((tmp_path / "out" / "peer.csv").read_text().splitlines())
    assert (row["kind"], row["time"], row["chunk_size"], row["peer_parameters"]) == ("memory", "16", "8", "7")
    assert float(row["peer_seconds"]) >= 0.02
    assert float(row["times_as_fast"]) == pytest.approx(float(row["peer_seconds"]) / float(row["seconds"]))
    assert (tmp_path / "out" / "peer.png").stat().st_size > 0
    assert "times as fast" in capsys.readouterr().out


@pytest.mark.parametrize("python", ["/nowhere/python", sys.executable])
def test_a_python_without_the_peer_is_one_sentence(python, capfd):
    said = "cannot be run" if python.startswith("/nowhere") else "did not run peer_torch"
    with pytest.raises(ConfigError, match=said), peer.started(python, "peer_torch", SMALL):
        pass
