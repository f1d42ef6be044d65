"""Estimated speed of the Titans models relative to a Transformer++ of the same size, by length (Titans, figure 9).

All train on one chip of a generation (on its smallest slice, where that has more), with the same number of tokens a
step whatever the length of a row, in one microbatch. `Report.tokens_per_second` is compared; see `Report` for what it
counts and leaves out. A program with Pallas kernels whose schedule is not known is not compared.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from titans_jax import plots
from titans_jax.config import Config, MeshConfig
from titans_jax.ops.chips import Generation
from titans_jax.tpu.compile import Report
from titans_jax.tpu.rows import keep_rows, report_if_it_fits
from titans_jax.tpu.topology import Topology, slice_shapes
from titans_jax.training.run import count_params, with_parameters

TOKENS = 8192
"""Tokens of a chip in a step, as in the microbatches of the papers' configurations; more where a row is longer."""

BASELINE = "transformer"


@dataclass(frozen=True)
class Row:
    """One model at one length. Unknown values are None; if the step does not fit, all but the first three are unknown.

    relative: tokens_per_second over the baseline's. most_cycles: the sources with the most cycles, and their shares.
    """

    topology: str
    model: str
    length: int
    tokens_per_second: int | None = None
    relative: float | None = None
    utilisation: float | None = None
    headroom_gib: float | None = None
    kernels: str | None = None
    most_cycles: str | None = None


def compare(
    config: Config,
    models: Iterable[str],
    generation: Generation,
    lengths: Iterable[int],
    folder: Path,
    console: Console,
) -> None:
    """Compile a Transformer++ of config's size and `models`, blocks by name, at every length; print each as it comes,
    and write relative_<generation>.csv and .png into `folder`. A model that does not fit has no figures."""
    topology = Topology(generation, slice_shapes(generation)[0])
    rows: list[Row] = []
    for length in lengths:
        baseline = None
        for model in (BASELINE, *models):
            block = "attention" if model == BASELINE else model
            report = report_if_it_fits(_compared(config, block, topology.chips, length), topology)
            baseline = report if model == BASELINE else baseline
            rows.append(_row(model, topology, length, report, baseline))
            keep_rows(rows, folder / f"relative_{generation.name}.csv", console)
    _plot(rows, topology, folder / f"relative_{generation.name}.png")


def _compared(config: Config, block: str, chips: int, length: int) -> Config:
    """A model of these blocks with as many parameters as config's, and the same tokens a step at any length."""
    model = dataclasses.replace(config.model, pattern=(block,))
    return dataclasses.replace(
        config,
        model=with_parameters(model, count_params(config.model)),
        data=dataclasses.replace(config.data, sequence_length=length, batch_size=max(TOKENS // length, 1) * chips),
        training=dataclasses.replace(config.training, gradient_accumulation=1),
        mesh=MeshConfig(data=1, fsdp=-1),
    )


def _row(model: str, topology: Topology, length: int, report: Report | None, baseline: Report | None) -> Row:
    if report is None:
        return Row(topology.name, model, length, most_cycles="does not fit")
    shares = [f"{source} {cycles / report.cycles.total():.0%}" for source, cycles in report.cycles.most_common(4)]
    relative = None
    if baseline is not None and all(each.kernels.calls == each.kernels.scheduled for each in (report, baseline)):
        relative = round(report.tokens_per_second / baseline.tokens_per_second, 3)
    kernels = f"{report.kernel_share:.0%} of the cycles"
    if report.kernels.calls > report.kernels.scheduled:
        kernels += f", {report.kernels.calls - report.kernels.scheduled} calls without a schedule"
    return Row(
        topology.name,
        model,
        length,
        tokens_per_second=round(report.tokens_per_second),
        relative=relative,
        utilisation=round(report.utilisation, 4),
        headroom_gib=round(report.headroom / 2**30, 2),
        kernels=kernels,
        most_cycles=", ".join(shares),
    )


def _plot(rows: list[Row], topology: Topology, file: Path) -> None:
    with plots.figure(file, dpi=120) as axes:
        for model in dict.fromkeys(row.model for row in rows):
            points = [(row.length, row.relative) for row in rows if row.model == model and row.relative is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=model)
        axes.set(
            xlabel="tokens in a row",
            ylabel=f"estimated tokens/s over {BASELINE}",
            title=f"{topology.name}, at least {TOKENS:,} tokens a chip and step (compiler's estimate)",
        )
        lengths = sorted({row.length for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_ylim(bottom=0)
        axes.legend()
