"""`titans bench schedule`: one small kernel compiled for a TPU that is not there."""

import importlib.util

import pytest

from titans_jax import cli
from titans_jax.bench import schedule

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, which holds the TPU compiler, is not installed"
)


@needs_libtpu
def test_the_kernels_compile_for_a_tpu():
    """Forward and gradient; 'no more than the slots there are, and the matrix unit in use' is what a schedule is."""
    row = schedule.measure("v5e:1x1", schedule.Case(64, 16, expansion=2, rows=1, heads=2))
    assert (row.hidden, row.forward_heads, row.backward_heads) == (128, 2, 2)
    assert 0 < row.forward < row.both - row.forward
    assert 0 < row.xla_forward < row.xla_both
    for slots in (row.forward_slots, row.backward_slots):
        assert 0 < slots["MXU"] and all(0 <= share <= 1 for share in slots.values())


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--topologies v6f:2x2", "there is no topology v6f:2x2"),
        ("--chunk_sizes 32", "chunk_sizes has 32; use any of 16, 64, 256"),
    ],
)
def test_what_is_not_there_is_refused_in_a_sentence(arguments, sentence, capsys):
    assert cli.main(["bench", "schedule", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_without_the_compiler(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "schedule"]) == 2
    assert "pip install libtpu" in capsys.readouterr().err
