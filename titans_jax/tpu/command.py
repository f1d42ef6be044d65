"""`titans compile`, which needs no TPU: the report of a training step on one, the comparison with Transformer++, and
weak scaling."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from titans_jax.config import Config, ConfigError
from titans_jax.ops.chips import GIB
from titans_jax.tpu.compile import DoesNotFit, Report, compile_step, nearest_fit
from titans_jax.tpu.topology import find_topology


@dataclass(frozen=True)
class Options(Config):
    """A configuration, and the TPU slice that its training step is compiled for; needs libtpu, and no TPU."""

    topology: str | None = None
    """The slice, by shape (v5p:8x8x8) or accelerator type (v5p-1024); None is the configuration's mesh.topology."""
    slices: int = 1
    """Slices of this shape, joined by the data center's network."""
    batch: int | None = None
    """Rows of a step; None is the configuration's data.batch_size."""
    json: bool = False
    """Print one JSON object instead of tables."""
    estimate: bool = True
    """Estimate the step's time. False: only say what a chip holds and what is sent, in about half of the time, as the
    compiler then need not write the schedules by which Pallas kernels are counted."""
    compare: str | None = None
    """Compare models instead: folder for a csv and a plot of their tokens/s relative to a Transformer++ of the same
    size, by row length, on one chip of the slice's generation."""
    models: tuple[Literal["lmm", "mac", "mag", "mal"], ...] = ("lmm", "mac", "mag", "mal")
    """Models of the comparison."""
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768)
    """Row lengths of the comparison."""
    scaling: str | None = None
    """Measure weak scaling instead: folder for a csv and a plot of the step's speed and network traffic, on more and
    more chips of the topology's generation, and on the topology itself if it has several slices."""
    chips: tuple[int, ...] = (8, 64, 128, 256, 512)
    """Weak scaling: numbers of chips of the slices."""
    rows_of_chip: int | None = None
    """Weak scaling: rows of every chip in a step; None: training.gradient_accumulation, which is one row a
    microbatch."""


def main(name: str, options: Options) -> None:
    """Print the report.

    Raises:
      ConfigError: no such topology, a mesh or a batch that does not divide, no libtpu, a step that does not fit; a
        comparison and weak scaling at once.
    """
    if options.compare is not None and options.scaling is not None:
        raise ConfigError(f"scaling is {options.scaling}, and compare {options.compare}; use one of them at a time")
    if not options.estimate and (options.compare or options.scaling):
        raise ConfigError("estimate is False, and compare and scaling are of estimates; leave one of them out")
    config = Config(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Config)})
    asked = options.topology or config.mesh.topology
    if asked is None:
        raise ConfigError(f"mesh.topology of {name} is None; name a slice, such as --topology v5e:2x4")
    topology = find_topology(asked, options.slices)
    if options.compare is not None:
        from titans_jax.tpu.relative import compare

        compare(config, options.models, topology.generation, options.lengths, Path(options.compare), Console())
        return
    if options.scaling is not None:
        from titans_jax.tpu.scaling import scale

        rows = config.training.gradient_accumulation if options.rows_of_chip is None else options.rows_of_chip
        scale(name, config, topology, options.chips, rows, Path(options.scaling), Console())
        return
    if options.batch is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=options.batch))
    try:
        report = compile_step(config, topology, options.estimate)
    except DoesNotFit as error:
        fits = nearest_fit(config, topology, error.used)
        raise ConfigError(f"{error}; {advice(config, fits)}") from None
    if options.json:
        found = report.to_dict()
        print(json.dumps({"config": name} | found | ({} if options.estimate else {"estimate": None})))
    else:
        show(name, report, Console(), options.estimate)


def advice(config: Config, fits: Config | None) -> str:
    """The changes that turn a configuration that does not fit into `fits`, in words."""
    if fits is None:
        return "one row at a time on a chip does not either: use a larger slice, or shorter rows"
    changed = []
    if fits.model.remat != config.model.remat:
        changed.append(f"--model.remat {fits.model.remat}")
    parts = fits.training.gradient_accumulation
    if parts != config.training.gradient_accumulation:
        changed.append(f"--training.gradient_accumulation {parts}")
    return f"{' '.join(changed)} fits"


def show(name: str, report: Report, console: Console, estimate: bool = True) -> None:
    """Print a report as tables, with or without the estimate of the step's time."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in report.mesh.items() if size > 1) or "one device"
    console.print(f"{name} on {report.topology}; mesh {mesh}; compiled in {report.compile_seconds:,.0f} s")
    console.print(
        f"{report.rows} rows of {report.sequence_length:,} tokens a step in {report.accumulation} microbatches; "
        f"remat {report.remat}"
    )
    limit = report.topology.generation.hbm
    table = Table("memory of a chip", "GiB", "share")
    for kind, size in report.hbm.items():
        table.add_row(kind, f"{size / GIB:,.3f}", f"{size / limit:.1%}")
    table.add_row("headroom", f"{report.headroom / GIB:,.3f}", f"{report.headroom / limit:.1%}", style="bold")
    if report.host:
        table.add_row("(in the host's memory)", f"{report.host / GIB:,.3f}", "")
    console.print(table)
    if report.collectives:
        table = Table("collective", "mesh axes", "calls a step", "GB a device sends")
        for collective in report.collectives:
            axes = " x ".join(collective.axes)
            table.add_row(collective.kind, axes, f"{collective.calls:,}", f"{collective.sent / 1e9:,.3f}")
        console.print(table)
    if not estimate:
        return
    table = Table("estimate, not measured", "value", "unit")
    table.add_row("step", f"{report.step_seconds:,.4g}", "s")
    table.add_row("model FLOPs", f"{report.flops / 1e12:,.4g}", "TFLOP a chip, counted analytically")
    table.add_row("model FLOPs utilisation", f"{report.utilisation:.1%}", "")
    table.add_row("speed", f"{report.tokens_per_second:,.0f}", "tokens/s a chip")
    for axes, seconds in report.network_seconds.items():
        table.add_row(f"collectives on {axes}", f"{seconds:,.4g}", "s at least, not in the step's")
    if report.kernels.calls:
        table.add_row("Pallas kernels", f"{report.kernel_share:.1%}", f"of the cycles, {report.kernels.calls:,} calls")
    total = report.cycles.total()
    for source, cycles in report.cycles.most_common(6):
        table.add_row(f"of the cycles: {source or 'not of one file'}", f"{cycles / total:.1%}", "")
    console.print(table)
    counts = f" It counts {'; '.join(report.includes)}." if report.includes else ""
    console.print(f"The step's time is the compiler's estimate.{counts} It leaves out: {'; '.join(report.leaves_out)}.")
