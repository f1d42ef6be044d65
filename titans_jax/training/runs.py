"""`titans runs FOLDER`: the runs below a folder in a table, and their losses in one picture."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from titans_jax.config import ConfigError, leaves
from titans_jax.config.saved import from_saved
from titans_jax.plots import figure, save_csv
from titans_jax.training.metrics import read_metrics

SHOWN = {
    "run": "run",
    "step": "step",
    "steps": "of",
    "parameters": "parameters",
    "bits_per_byte": "bits/byte",
    "memory_gain": "gain",
    "tokens_per_second": "tokens/s",
}
"""Columns of the table, and their titles."""


@dataclass(frozen=True)
class RunsOptions:
    """Compare runs: their last numbers, the fields in which they differ, and their losses in one picture."""

    folder: Positional[Path] = Path("runs")
    """A folder with runs in it, at any depth; runs.csv and runs.png are written there."""


def find_runs(folder: Path) -> list[Path]:
    """Folders with a metrics.jsonl and a config.json, sorted: `folder` itself, if it has them, and those below it."""
    return sorted(file.parent for file in folder.rglob("metrics.jsonl") if (file.parent / "config.json").is_file())


def compare_runs(folder: Path) -> list[dict[str, Any]]:
    """A row for every run below `folder`: its last numbers, and its values of the fields in which the runs differ.

    Prints the table, and writes runs.csv and runs.png into the folder.

    Raises:
      ConfigError: there is no run below it.
    """
    if not (runs := find_runs(folder)):
        raise ConfigError(
            f"folder is {str(folder)!r}, below which there is no run; give one that holds some, such as runs"
        )
    configs = {}
    for run in runs:
        try:
            configs[run] = leaves(from_saved(json.loads((run / "config.json").read_text())))
        except (ConfigError, ValueError, TypeError, AttributeError):
            configs[run] = {}  # another version's, or damaged: its numbers can be shown all the same
    known = [config for config in configs.values() if config]
    unlike = [
        name
        for name in (known or [{}])[0]
        if len({str(config.get(name)) for config in known}) > 1 and not name.startswith(("processes.", "profile."))
    ]
    rows = [_row(run, folder, configs[run], unlike) for run in runs]
    save_csv(rows, folder / "runs.csv")
    table = Table(box=box.SIMPLE)
    for name, title in SHOWN.items():
        table.add_column(title, justify="left" if name == "run" else "right")
    for row in rows:
        table.add_row(*(_shown(row[name]) for name in SHOWN))
    console = Console()
    console.print(table)
    for row in rows:
        if row["differs"]:
            console.print(f"{row['run']}: {row['differs']}", soft_wrap=True, highlight=False, markup=False)
    _plot(runs, folder)
    console.print(f"the table is in {folder / 'runs.csv'}, the losses in {folder / 'runs.png'}", soft_wrap=True)
    return rows


def _row(run: Path, folder: Path, config: dict[str, Any], unlike: list[str]) -> dict[str, Any]:
    lines = list(read_metrics(run))
    last = {line["kind"]: line for line in lines}
    validation, train = last.get("validation", {}), last.get("train", {})
    return {
        "run": _name(run, folder),
        "step": max((line["step"] for line in lines), default=0),
        "steps": config.get("training.steps"),
        "parameters": _count(config),
        "bits_per_byte": validation.get("bits_per_byte"),
        "loss": validation.get("loss"),
        "memory_gain": validation.get("memory_gain"),
        "train_loss": train.get("loss"),
        "tokens_per_second": train.get("tokens_per_second"),
        "differs": " ".join(f"{name}={config[name]}" for name in unlike if name in config),
    }


def _count(config: dict[str, Any]) -> int | None:
    """Parameters of a run's model; None where this version cannot build it."""
    from titans_jax.config.schema import Config, replaced
    from titans_jax.training.run import count_params

    built = Config()
    for name, value in config.items():
        *path, field = name.split(".")
        if path[:1] == ["model"]:
            built = replaced(built, path, field, value)
    try:
        return count_params(built.model) if config else None
    except Exception:  # a part of one's own that is not registered here
        return None


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _name(run: Path, folder: Path) -> str:
    return run.relative_to(folder).as_posix() if run != folder else run.name


def _plot(runs: list[Path], folder: Path) -> None:
    with figure(folder / "runs.png", width=8, height=5, dpi=120) as axes:
        for run in runs:
            lines = [x for x in read_metrics(run) if x["kind"] == "validation" and "bits_per_byte" in x]
            points = [(x["step"], x["bits_per_byte"]) for x in lines]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=_name(run, folder))
        axes.set(xlabel="step", ylabel="validation loss (bits per byte)", title=f"runs below {folder}")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
