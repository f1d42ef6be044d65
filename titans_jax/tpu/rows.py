"""Parts shared by the tables of compiled steps: a report if the step fits, and rows that are saved as they come."""

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console

from titans_jax import plots
from titans_jax.config import Config
from titans_jax.tpu.compile import DoesNotFit, Report, compile_step
from titans_jax.tpu.topology import Topology


def report_if_it_fits(config: Config, topology: Topology) -> Report | None:
    """The report of config's training step, None where a chip has too little memory; raises as `compile_step`."""
    try:
        return compile_step(config, topology)
    except DoesNotFit:
        return None


def keep_rows(rows: list[Any], file: Path, console: Console) -> None:
    """Print the known values of the last row, and write all rows, which are dataclasses, into a CSV file."""
    known = {name: value for name, value in dataclasses.asdict(rows[-1]).items() if value is not None}
    console.print("  ".join(f"{name} {value}" for name, value in known.items()), soft_wrap=True)
    plots.save_csv(rows, file)
