"""Weak scaling by the TPU compiler's estimates: a training step on more and more chips, with equal rows on each.

A chip's own work then stays the same, and only the traffic over the network changes. The time of the collectives is a
lower bound: their bytes over all links of a chip at once, without latency; how much of it overlaps with other work is
not known. So a row has both extremes: all of it hidden, and none.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from titans_jax import plots
from titans_jax.config import Config, ConfigError
from titans_jax.tpu.compile import Report
from titans_jax.tpu.rows import keep_rows, report_if_it_fits
from titans_jax.tpu.topology import Topology, find_topology, slice_shapes


@dataclass(frozen=True)
class Row:
    """One step. Unknown values are None; if it does not fit, all but the first four are unknown.

    hidden, exposed: tokens/s a chip if all of a slice's collectives overlap with other work, and if none does.
    network_share: time of these collectives over the step's time without them.
    sent: GB a device sends in a step by mesh axes, with calls.
    between_slices: bytes/s that a chip must send to other slices for their collectives to take no longer than the step.
    """

    topology: str
    slices: int
    chips: int
    rows: int
    hidden: int | None = None
    exposed: int | None = None
    network_share: float | None = None
    step_seconds: float | None = None
    sent: str = "does not fit"
    between_slices: float | None = None
    headroom_gib: float | None = None
    compile_seconds: int | None = None


def scale(
    name: str, config: Config, topology: Topology, chips: Sequence[int], rows: int, folder: Path, console: Console
) -> None:
    """Compile config's step with `rows` rows a chip on slices of topology's generation with these numbers of `chips`,
    and on topology itself if it has several slices; print each row as it comes, and write
    scaling_<name>_<generation>.csv and .png into `folder`.

    Raises:
      ConfigError: there is no slice with a number of chips, or the rows are not whole microbatches.
    """
    generation = topology.generation
    parts = config.training.gradient_accumulation
    if rows < 1 or rows % parts:
        raise ConfigError(
            f"rows_of_chip is {rows}, cut into {parts} by training.gradient_accumulation; use a multiple of {parts}"
        )
    known = {math.prod(shape) for shape in slice_shapes(generation)}
    if wrong := [count for count in chips if count not in known]:
        raise ConfigError(f"chips is {wrong[0]}, and {generation.name} has no such slice; use some of {sorted(known)}")
    topologies = [find_topology(f"{generation.ordered_as}-{count * generation.counted}") for count in sorted(chips)]
    done: list[Row] = []
    stem = f"scaling_{name}_{generation.name}"
    for each in topologies + ([topology] if topology.slices > 1 else []):
        data = replace(config.data, batch_size=rows * each.chips)
        done.append(_row(each, rows, report_if_it_fits(replace(config, data=data), each)))
        keep_rows(done, folder / f"{stem}.csv", console)
    _plot(name, done, folder / f"{stem}.png")


def _row(topology: Topology, rows: int, report: Report | None) -> Row:
    known = {
        "topology": topology.name,
        "slices": topology.slices,
        "chips": topology.chips,
        "rows": rows * topology.chips,
    }
    if report is None:
        return Row(**known)
    step, network = report.step_seconds, sum(report.network_seconds.values())
    sent, calls = Counter[str](), Counter[str]()
    for collective in report.collectives:
        axes = "+".join(collective.axes)
        sent[axes] += collective.sent
        calls[axes] += collective.calls
    across = sum(collective.sent for collective in report.collectives if "slice" in collective.axes)
    return Row(
        **known,
        hidden=round(report.tokens_per_second),
        exposed=round(report.tokens_per_second * step / (step + network)),
        network_share=round(network / step, 4),
        step_seconds=round(step, 4),
        sent=", ".join(f"{axes} {size / 1e9:.3g} ({calls[axes]:,} calls)" for axes, size in sent.items()),
        between_slices=round(across * topology.generation.devices / step) if across else None,
        headroom_gib=round(report.headroom / 2**30, 2),
        compile_seconds=round(report.compile_seconds),
    )


def _plot(name: str, rows: list[Row], file: Path) -> None:
    """Tokens/s a chip over chips; steps on several slices have a marker of their own."""
    fitting = [row for row in rows if row.hidden is not None]
    if not fitting:
        return
    with plots.figure(file, dpi=120) as axes:
        for field, label in (("hidden", "all collectives hidden"), ("exposed", "none hidden")):
            one = [(row.chips, getattr(row, field)) for row in fitting if row.slices == 1]
            (line,) = axes.plot(*zip(*one, strict=True), marker="o", label=label) if one else axes.plot([], [])
            for row in fitting:
                if row.slices > 1:
                    value = getattr(row, field)
                    axes.plot(row.chips, value, "s", color=line.get_color(), label=f"{row.slices} slices: {label}")
        chips = sorted({row.chips for row in fitting})
        axes.set_xscale("log", base=2)
        axes.set_xticks(chips, [f"{count:,}" for count in chips])
        axes.set_ylim(bottom=0)
        axes.set(
            xlabel="chips",
            ylabel="estimated tokens/s a chip",
            title=f"{name} on {fitting[0].topology.split(':')[0]}, rows of a chip: "
            f"{fitting[0].rows // fitting[0].chips} (compiler's estimate)",
        )
        axes.legend()
