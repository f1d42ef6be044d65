"""Estimated speed of the Titans models over that of a Transformer++ of the same size, by length (Titans, figure 9).

All train on one chip of a generation (on its smallest slice, where that has more): the same tokens a step however long
a row is, in one microbatch. What is compared is `Report.tokens_per_second`; see `Report` for what it counts and leaves
out. A program with Pallas kernels whose schedule is not known is not compared.
"""

import csv
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from titans_jax.config import Config, MeshConfig
from titans_jax.tpu.compile import DoesNotFit, Report, compile_step
from titans_jax.tpu.topology import Generation, Topology, slice_shapes

TOKENS = 8192
"""Tokens a chip takes at once, as the configurations of the papers cut their batches; more where a row is longer."""

BASELINE = "transformer"
FIELDS = (
    "topology", "model", "length", "tokens_per_second", "relative", "utilisation", "headroom_gib", "kernels",
    "most_cycles",
)  # fmt: skip


def compare(
    config: Config,
    models: Iterable[str],
    generation: Generation,
    lengths: Iterable[int],
    folder: Path,
    console: Console,
) -> None:
    """Compile a Transformer++ of config's size and `models`, blocks by name, at every length; print each as it comes,
    and write relative_<generation>.csv and .png into `folder`. What does not fit has no figures."""
    topology = Topology(generation, slice_shapes(generation)[0])
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        baseline = None
        for model in (BASELINE, *models):
            report = _compile(config, "attention" if model == BASELINE else model, topology, length)
            baseline = report if model == BASELINE else baseline
            rows.append(_row(model, topology, length, report, baseline))
            console.print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), soft_wrap=True)
            with (folder / f"relative_{generation.name}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, FIELDS)
                writer.writeheader()
                writer.writerows(rows)
    _plot(rows, topology, folder / f"relative_{generation.name}.png")


def _compile(config: Config, block: str, topology: Topology, length: int) -> Report | None:
    """The report of a model of these blocks, None if it does not fit."""
    chips = topology.chips
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, pattern=(block,)),
        data=dataclasses.replace(config.data, sequence_length=length, batch_size=max(TOKENS // length, 1) * chips),
        training=dataclasses.replace(config.training, gradient_accumulation=1),
        mesh=MeshConfig(data=1, fsdp=-1),
    )
    try:
        return compile_step(config, topology)
    except DoesNotFit:
        return None


def _row(model: str, topology: Topology, length: int, report: Report | None, baseline: Report | None) -> dict[str, Any]:
    row: dict[str, Any] = {"topology": topology.name, "model": model, "length": length}
    if report is None:
        return row | {"most_cycles": "does not fit"}
    shares = [f"{source} {cycles / report.cycles.total():.0%}" for source, cycles in report.cycles.most_common(4)]
    row["tokens_per_second"] = round(report.tokens_per_second)
    if baseline is not None and all(each.kernels.calls == each.kernels.scheduled for each in (report, baseline)):
        row["relative"] = round(report.tokens_per_second / baseline.tokens_per_second, 3)
    row["utilisation"] = round(report.utilisation, 4)
    row["headroom_gib"] = round(report.headroom / 2**30, 2)
    row["kernels"] = f"{report.kernel_share:.0%} of the cycles"
    if report.kernels.calls > report.kernels.scheduled:
        row["kernels"] += f", {report.kernels.calls - report.kernels.scheduled} calls without a schedule"
    return row | {"most_cycles": ", ".join(shares)}


def _plot(rows: list[dict[str, Any]], topology: Topology, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for model in dict.fromkeys(row["model"] for row in rows):
        points = [(row["length"], row["relative"]) for row in rows if row["model"] == model and "relative" in row]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=model)
    axes.set(
        xlabel="tokens in a row",
        ylabel=f"estimated tokens/s over {BASELINE}",
        title=f"{topology.name}, at least {TOKENS:,} tokens a chip and step (compiler's estimate)",
    )
    lengths = sorted({row["length"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
