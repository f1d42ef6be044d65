"""Weak scaling, of a compiler whose answers are known."""

import csv
import dataclasses
from collections import Counter

import pytest
from rich.console import Console

from titans_jax import cli
from titans_jax.config import Config, DataConfig, TrainingConfig
from titans_jax.tpu import rows, scaling
from titans_jax.tpu.compile import DoesNotFit, Report
from titans_jax.tpu.hlo import Collective
from titans_jax.tpu.schedules import Kernels
from titans_jax.tpu.topology import find_topology

CONFIG = Config(
    data=DataConfig(sequence_length=1000, batch_size=4),
    training=dataclasses.replace(TrainingConfig(), gradient_accumulation=2),
)


def compiler(config, topology):
    """A second of work for every chip, half a second of its links, and gradients between slices; eight chips hold
    too little."""
    if topology.chips == 8:
        raise DoesNotFit("too large", 0)
    generation = topology.generation
    collectives = [
        Collective("all-gather", ("fsdp",), 40, generation.ici / 4),
        Collective("reduce-scatter", ("fsdp",), 20, generation.ici / 4),
    ]
    if topology.slices > 1:
        collectives.append(Collective("all-reduce", ("slice",), 1, 3e9))
    return Report(
        topology=topology,
        mesh={},
        rows=config.data.batch_size,
        sequence_length=config.data.sequence_length,
        accumulation=config.training.gradient_accumulation,
        remat="full",
        compile_seconds=1.0,
        hbm={"parameters": generation.hbm / 2},
        host=0.0,
        flops=1e12,
        cycles=Counter({"memory/engine": int(generation.clock)}),
        kernels=Kernels(0, 0, Counter()),
        collectives=collectives,
        unknown_loops=0,
    )


def test_weak_scaling_is_written_as_csv_and_plot(monkeypatch, tmp_path):
    """Every chip has its six rows whatever their number, and one row of the table is of two slices."""
    monkeypatch.setattr(rows, "compile_step", compiler)
    topology = find_topology("v5p:2x2x2", slices=2)
    scaling.scale("small", CONFIG, topology, (64, 8), 6, tmp_path, Console(quiet=True))
    with (tmp_path / "scaling_small_v5p.csv").open() as file:
        eight, cube, slices = csv.DictReader(file)
    assert [row["topology"] for row in (eight, cube, slices)] == ["v5p:2x2x2", "v5p:4x4x4", "v5p:2x2x2"]
    assert [row["rows"] for row in (eight, cube, slices)] == ["48", "384", "96"]
    assert eight["sent"] == "does not fit" and eight["hidden"] == ""
    assert cube["step_seconds"] == "1.0" and cube["hidden"] == "6000"
    assert cube["network_share"] == "0.5" and cube["exposed"] == "4000"
    assert cube["sent"] == "fsdp 300 (60 calls)" and cube["between_slices"] == ""
    assert slices["slices"] == "2" and float(slices["between_slices"]) == pytest.approx(3e9)
    assert (tmp_path / "scaling_small_v5p.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--chips 8 100", "chips is 100, and v5p has no such slice; use some of [4, 8, 16, 32, 64, 128, "),
        ("--rows_of_chip 3", "rows_of_chip is 3, cut into 8 by training.gradient_accumulation; use a multiple of 8"),
        ("--rows_of_chip 0", "rows_of_chip is 0; use 1 to "),
        ("--compare other", "and compare other; use one of them at a time"),
    ],
)
def test_what_cannot_be_scaled_is_refused(arguments, sentence, tmp_path, capsys):
    folder = tmp_path / "scaling"
    asked = f"compile lmm_170m --topology v5p:2x2x2 --scaling {folder} {arguments}"
    assert cli.main(asked.split()) == 2
    assert sentence in capsys.readouterr().err and not folder.exists()
