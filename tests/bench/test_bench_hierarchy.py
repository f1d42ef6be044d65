"""`titans bench hierarchy`: what it saves, and what it refuses."""

import csv

import pytest

from titans_jax import cli

SMALL = "--time 16 --chunk 2 --shard 8 --num_heads 1 --head_dim 4 --expansion 1 --repeats 1 --output".split()


@pytest.mark.exhaustive
def test_both_layers_are_timed_and_saved(tmp_path, capsys):
    assert cli.main(["bench", "hierarchy", *SMALL, str(tmp_path)]) == 0
    with open(tmp_path / "hierarchy.csv") as file:
        one, several = csv.DictReader(file)
    assert (one["layer"], one["speed"]) == ("one memory", "1.0")
    assert float(several["speed"]) == pytest.approx(float(one["seconds"]) / float(several["seconds"]))
    assert "global and local, chunk 2, 16 tokens" in capsys.readouterr().out


def test_chunks_that_do_not_divide_a_shard_are_refused(tmp_path, capsys):
    assert cli.main(["bench", "hierarchy", "--chunk", "3", "--output", str(tmp_path)]) == 2
    assert "model.memory.local_chunks is (3,); use chunks" in capsys.readouterr().err
