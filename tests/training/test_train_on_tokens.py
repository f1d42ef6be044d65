"""Training on prepared rows and on mixtures of them."""

import dataclasses
import io

import pytest
from rich.console import Console

from tests.training.tiny import tiny_config
from titans_jax import cli
from titans_jax.training import train
from titans_jax.training.metrics import read_metrics


@pytest.mark.slow
def test_a_run_on_a_mixture_says_the_loss_of_each_source(tmp_path, capsys):
    config_file = tmp_path / "small.py"
    config_file.write_text("from tests.training.tiny import tiny_config\nconfig = tiny_config()\n")
    folders = [str(tmp_path / name) for name in ("code", "more")]
    for folder in folders:
        arguments = ["data", "prepare", str(config_file), "--output", folder, "--workers", "1"]
        assert cli.main([*arguments, "--shard_bytes", "5000"]) == 0
        assert f"train with --data.source tokens --data.path {folder}\n" in capsys.readouterr().out
    assert cli.main(["data", str(config_file), "--data.source", "tokens", "--data.path", folders[0]]) == 0
    assert "the first row begins" in capsys.readouterr().out

    config = tiny_config(steps=1, evaluate_every=1, sample_tokens=0)
    data = dataclasses.replace(config.data, source="tokens", path=None, mixture=tuple(f"{f}=1" for f in folders))
    train(dataclasses.replace(config, data=data), tmp_path / "run", Console(file=io.StringIO()))
    last = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "validation"][-1]
    # The two folders hold the same text.
    assert last["loss/code"] == last["loss/more"] and 2 < last["loss/code"] < 6


def test_output_is_asked_for(capsys):
    assert cli.main(["data", "prepare", "quickstart"]) == 2
    assert "output is missing; give the folder to write to" in capsys.readouterr().err
