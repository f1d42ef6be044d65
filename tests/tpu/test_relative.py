"""The comparison with Transformer++, of a compiler whose answers are known."""

import csv
from collections import Counter

from rich.console import Console

from titans_jax.config import Config
from titans_jax.ops.chips import GENERATIONS
from titans_jax.tpu import relative, rows
from titans_jax.tpu.compile import DoesNotFit, Report
from titans_jax.tpu.schedules import Kernels


def compiler(config, topology):
    """Attention costs a token as much as its row is long, a memory 4096, half of it a kernel's; MAC does not fit, and
    MAG has calls of a kernel without a schedule."""
    (block,), data = config.model.pattern, config.data
    if block == "mac":
        raise DoesNotFit("too large", 0)
    cycles = data.batch_size * data.sequence_length * (data.sequence_length if block == "attention" else 4096)
    return Report(
        topology=topology,
        mesh={},
        rows=data.batch_size,
        sequence_length=data.sequence_length,
        accumulation=1,
        remat="full",
        compile_seconds=1.0,
        hbm={},
        host=0.0,
        flops=1e12,
        cycles=Counter({"memory/engine": cycles // 2, "kernel memorize": cycles // 2}),
        kernels=Kernels(3, 1 if block == "mag" else 3, Counter({"memorize": cycles // 2})),
        collectives=[],
        unknown_loops=0,
    )


def test_comparison_is_written_as_csv_and_plot(monkeypatch, tmp_path):
    monkeypatch.setattr(rows, "compile_step", compiler)
    lengths = (2048, 16384)
    relative.compare(Config(), ("lmm", "mac", "mag"), GENERATIONS["v5p"], lengths, tmp_path, Console(quiet=True))
    with (tmp_path / "relative_v5p.csv").open() as file:
        found = {(row["model"], int(row["length"])): row for row in csv.DictReader(file)}
    assert len(found) == 4 * 2
    assert found["lmm", 2048]["relative"] == "0.5" and found["lmm", 16384]["relative"] == "4.0"
    clock = 459e12 / (2 * 8 * 128**2)
    of_a_chip = round(clock / 2048 / 4)  # of the slice's four
    assert float(found["transformer", 2048]["tokens_per_second"]) == of_a_chip
    assert found["mac", 2048]["most_cycles"] == "does not fit"
    assert found["lmm", 2048]["kernels"] == "50% of the cycles"
    assert found["mag", 2048]["relative"] == ""
    assert found["mag", 2048]["kernels"] == "50% of the cycles, 2 calls without a schedule"
    assert (tmp_path / "relative_v5p.png").stat().st_size > 5000
