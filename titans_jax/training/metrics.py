"""The metrics of a run: metrics.jsonl, scalars for TensorBoard or wandb, and the picture loss.png."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from titans_jax.config import ConfigError
from titans_jax.plots import figure, json_text


class MetricsWriter:
    """Appends lines to `run_dir`/metrics.jsonl and gives scalars to a logger: "tensorboard", "wandb" or "none".

    A line is {"kind": "train" | "validation" | "memory", "step": n, name: number or list of numbers, ...}; a list has a
    number per memory layer, and "memory_gain" of a validation is in bits per byte. Lines later than step `after` are
    dropped first: a resumed run repeats them, with the same numbers. Only the first of several processes writes. A
    number that is not finite is null.
    """

    def __init__(self, run_dir: Path, after: int, logger: str = "tensorboard"):
        self._file = self._events = None
        if jax.process_index() != 0:
            return
        path = run_dir / "metrics.jsonl"
        lines = [json_text(line) + "\n" for line in read_metrics(run_dir) if line["step"] <= after]
        rewritten = path.with_suffix(".tmp")  # replaced in one move: a full disk must not empty the file
        rewritten.write_text("".join(lines))
        rewritten.replace(path)
        self._file = path.open("a", buffering=1)
        self._events = LOGGERS[logger](run_dir, after)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write one line, and one scalar per number; a list's numbers become name/0, name/1, ..."""
        if self._file is None:
            return
        self._file.write(json_text({"kind": kind, "step": step, **values}) + "\n")
        self._events.log(kind, step, values)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._file is not None:
            self._file.close()
            self._events.close()


class TensorBoard:
    """Events in `run_dir`/tensorboard."""

    def __init__(self, run_dir: Path, after: int):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=after + 1)

    def log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """One scalar per number; a list's numbers become name/0, name/1, ..."""
        for name, value in values.items():
            if isinstance(value, list):
                self._writer.add_scalars(f"{kind}/{name}", {str(i): v for i, v in enumerate(value)}, step)
            else:
                self._writer.add_scalar(f"{kind}/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """A run of wandb, whose id is kept in `run_dir`/wandb_id: a run that is resumed continues the same wandb run.

    Raises:
      ConfigError: the package is not installed.
    """

    def __init__(self, run_dir: Path, after: int):
        wandb, file = import_wandb(), run_dir / "wandb_id"
        known = file.read_text().strip() if file.is_file() else None
        self._run = wandb.init(id=known, resume="allow" if known else None, name=run_dir.name, dir=str(run_dir))
        file.write_text(self._run.id)

    def log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """As `TensorBoard.log`."""
        flat = {}
        for name, value in values.items():
            several = {f"{kind}/{name}/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else None
            flat |= several or {f"{kind}/{name}": value}
        self._run.log(flat, step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


class NoLogger:
    """No logger: the run writes metrics.jsonl only."""

    def __init__(self, run_dir: Path, after: int):
        pass

    def log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


LOGGERS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "none": NoLogger}
"""The logger by `training.logger`."""


def import_wandb() -> Any:
    """The package; raises ConfigError without it."""
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            "training.logger is wandb, which is not installed; pip install 'titans-jax[wandb]', or use tensorboard"
        ) from error
    return wandb


def read_metrics(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, without any that cannot be read, such as one cut off by a crash.

    A number that was not finite is a null in the file, and NaN here.
    """
    path = run_dir / "metrics.jsonl"
    for text in path.read_bytes().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:  # UnicodeDecodeError among them
            continue
        if isinstance(line, dict) and isinstance(line.get("kind"), str) and type(line.get("step")) is int:
            yield {name: _with_nan(value) for name, value in line.items()}


def _with_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_nan(each) for each in value]
    return math.nan if value is None else value


def plot_losses(run_dir: Path) -> None:
    """Draw `run_dir`/loss.png: training and validation loss in bits per byte over the steps."""
    lines = list(read_metrics(run_dir))
    with figure(run_dir / "loss.png", width=7, height=4.2, dpi=120) as axes:
        for kind, style in (("train", {"color": "tab:blue", "linewidth": 1}), ("validation", {"color": "tab:red"})):
            points = [(x["step"], x["bits_per_byte"]) for x in lines if x["kind"] == kind and "bits_per_byte" in x]
            if points:
                marker = {"marker": "o", "markersize": 4} if kind == "validation" or len(points) == 1 else {}
                axes.plot(*zip(*points, strict=True), label=kind, **style, **marker)
        values = sorted(line["bits_per_byte"] for line in lines if "bits_per_byte" in line)
        if values and values[-1] > 2 * values[len(values) // 2]:
            axes.set_yscale("log")  # the first steps would flatten everything after them
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
        axes.set(xlabel="step", ylabel="loss (bits per byte)", title=run_dir.name)
        axes.grid(alpha=0.3, which="both")
        axes.legend()
