"""`titans study forecasting`: long horizons of ETT and Weather, with a memory in the place of attention.

The protocol is iTransformer's (arXiv 2310.06625): its borders, scaling by the training part, all channels in and out,
every window of the test part, mean squared and absolute error in scaled units, instance norm; training by squared error
with Adam, early stopping on the validation error, and a test of the best epoch. Each model has a last row with its mean
over horizons, the number that Titans prints. These things differ: the learning rate is 1e-3 (DLinear's 5e-3), not 1e-4,
and follows a cosine to a hundredth of it, where iTransformer halves it every epoch; gradients are clipped at norm 1;
channels are read separately, in patches of 16 steps every 8 (PatchTST's form); there is no dropout. It is not an exact
reproduction of Titans' row: its code for this is not public, and the paper does not say how it feeds its memory. The
memories are compared with DLinear, trained here too, and with the last value repeated.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from titans_jax import plots, sharding
from titans_jax.config import ConfigError, MemoryConfig, ModelConfig, OptimizerConfig
from titans_jax.data.series import Split, Windows, load_series
from titans_jax.data.sets import file_or_place
from titans_jax.models import check_model
from titans_jax.models.heads import num_patches
from titans_jax.models.loss import Batch
from titans_jax.studies import models
from titans_jax.studies.models import ATTENTION, MAMBA, one_graph
from titans_jax.studies.study import Cell, Column, Study, StudyOptions, at_least_one, register_study, with_seeds
from titans_jax.studies.table import Baseline, Row, draw_spreads, joined_row, means_by_seed
from titans_jax.studies.tasks import Numbers, Task
from titans_jax.training.fit import Selection

DLINEAR = "dlinear"
"""Name of the linear forecast in a table, in place of a preset."""

FILES = {
    "ETTh1": "ett/ETTh1.csv",
    "ETTh2": "ett/ETTh2.csv",
    "ETTm1": "ett/ETTm1.csv",
    "Weather": "weather/weather.csv",
}
"""Paths of the tables below the folder of data; the files may be compressed."""

HORIZONS = (96, 192, 336, 720)

PUBLISHED: dict[str, dict[str, tuple[float, float]]] = {
    "Titans LMM": {
        "ETTh1": (0.420, 0.421), "ETTh2": (0.336, 0.382), "ETTm1": (0.358, 0.387), "Weather": (0.231, 0.265)},
    "iTransformer": {
        "ETTh1": (0.454, 0.447), "ETTh2": (0.383, 0.407), "ETTm1": (0.407, 0.410), "Weather": (0.258, 0.278)},
    "PatchTST": {
        "ETTh1": (0.469, 0.454), "ETTh2": (0.387, 0.407), "ETTm1": (0.387, 0.400), "Weather": (0.259, 0.281)},
    "DLinear": {
        "ETTh1": (0.456, 0.452), "ETTh2": (0.559, 0.515), "ETTm1": (0.403, 0.407), "Weather": (0.265, 0.317)},
}  # fmt: skip
"""Squared and absolute error, means over the four horizons at look-back 96, as table 3 of Titans prints them."""


@dataclass(frozen=True)
class Forecast(Task):
    """The next `horizon` rows of a table from the last `look_back`."""

    name: ClassVar[str] = "forecast"

    batch_size: int = 32
    """Windows of a step."""
    learning_rate: float = 1e-4
    """Peak of the cosine schedule."""
    data: str = "ETTh1"
    """A table by name."""
    path: str = ""
    """The table's file."""
    look_back: int = 96
    """Rows read."""
    horizon: int = 96
    """Rows forecast."""
    patience: int = 3
    """Training ends after this many epochs without a better validation error."""

    @property
    def optimizer(self) -> OptimizerConfig:
        """Adam: no decay, no warm-up."""
        return OptimizerConfig(
            learning_rate=self.learning_rate, warmup_steps=0, weight_decay=0.0, beta2=0.999,
            final_learning_rate_ratio=0.01,
        )  # fmt: skip

    @property
    def sequence_length(self) -> int:
        """Patches of a window, the tokens of the blocks."""
        return num_patches(self.look_back, 16, 8)

    def fit_to(self, model: ModelConfig) -> ModelConfig:
        """See `Task`."""
        kind = DLINEAR if model.head == DLINEAR else "forecaster"
        return dataclasses.replace(model, head=f"{kind}(look_back={self.look_back}, horizon={self.horizon})")

    def check(self, model: ModelConfig) -> None:
        """See `Task`."""
        super().check(model)
        check_model(model)
        if self.patience < 1:
            raise ConfigError(f"patience is {self.patience}; use at least 1")
        for split in ("train", "validation", "test"):
            self.windows(split)

    def windows(self, split: Split) -> Windows:
        """Every window of a split."""
        return load_series(self.data, self.path).windows(split, self.look_back, self.horizon)

    @property
    def epoch(self) -> int:
        """Steps of one pass over the training windows; a rest of less than a batch is left out."""
        return max(self.windows("train").count // self.batch_size, 1)

    def fingerprint(self) -> str:
        """See `Task`."""
        return load_series(self.data, self.path).fingerprint

    def batches(self, seed: int) -> Iterator[Batch]:
        """See `Task`."""
        windows, generator = self.windows("train"), np.random.default_rng(seed)
        while True:
            order = generator.permutation(windows.count)
            if len(order) < self.batch_size:
                order = np.resize(order, self.batch_size)
            for first in range(0, len(order) - self.batch_size + 1, self.batch_size):
                yield _batch(windows, order[first : first + self.batch_size])

    def selection(self) -> Selection | None:
        """See `Task`: by validation error, once an epoch."""

        def score(graphdef: nnx.GraphDef, params: Any) -> float:
            return -self.errors(graphdef, params, "validation")["mse"]

        return Selection(score, min(self.epoch, self.steps), patience=self.patience)

    def errors(self, graphdef: nnx.GraphDef, params: Any, split: Split) -> Numbers:
        """mse, mae: mean squared and absolute error over every window of a split, in scaled units."""
        windows, step, size = self.windows(split), make_error_step(graphdef), 4 * self.batch_size
        sums = np.zeros(2)
        for first in range(0, windows.count, size):
            which = np.arange(first, min(first + size, windows.count))
            # The last batch is filled up with its first window, so that all have one shape.
            batch = _batch(windows, np.concatenate([which, np.full(size - len(which), first)]))
            found = np.stack(jax.device_get(step(params, sharding.spread(batch, None)[0])))
            sums += found[:, : len(which)].astype(np.float64).sum(axis=1)
        mse, mae = sums / (windows.count * self.horizon * windows.values.shape[1])
        return {"mse": float(mse), "mae": float(mae)}

    def measure(self, graphdef: nnx.GraphDef, params: Any) -> Numbers:
        """mse and mae over every test window; validation_mse: the error by which the parameters are chosen."""
        return self.errors(graphdef, params, "test") | {
            "validation_mse": self.errors(graphdef, params, "validation")["mse"]
        }

    def baseline(self) -> tuple[str, Numbers]:
        """See `Task`."""
        return f"the last value repeated, {self.data} {self.look_back}/{self.horizon}", self._repeated()

    def _repeated(self) -> Numbers:
        windows, sums = self.windows("test"), np.zeros(2)
        for first in range(0, windows.count, 256):
            values, ahead = windows.take(np.arange(first, min(first + 256, windows.count)))
            error = (ahead - values[:, -1:]).astype(np.float64)
            sums += np.sum(error**2), np.sum(np.abs(error))
        mse, mae = sums / (windows.count * self.horizon * windows.values.shape[1])
        return {"mse": float(mse), "mae": float(mae)}


def _batch(windows: Windows, which: np.ndarray) -> Batch:
    values, ahead = windows.take(which)
    return {"tokens": values, "targets": ahead, "segment_ids": None}


@one_graph
def make_error_step(graphdef: nnx.GraphDef) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
    """Compiled (params, batch) -> summed squared and absolute error of each window, float32 [rows]."""

    @jax.jit
    def error_step(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        error = nnx.merge(graphdef, params)(batch["tokens"]) - batch["targets"]
        return jnp.sum(jnp.square(error), axis=(1, 2)), jnp.sum(jnp.abs(error), axis=(1, 2))

    return error_step


@dataclass(frozen=True)
class ForecastingOptions(StudyOptions):
    """Train small models to forecast tables of values over time."""

    models: tuple[str, ...] = ("titans", "gated_deltanet", ATTENTION, DLINEAR)
    """Presets of memories, "attention", "mamba" and "dlinear"."""
    block: str = "lmm"
    """The block that holds the memories."""
    data: tuple[str, ...] = tuple(FILES)
    """Tables: ETTh1, ETTh2, ETTm1, Weather."""
    folder: str = "data"
    """The folder with ett/ and weather/."""
    look_backs: tuple[int, ...] = (96, 336)
    """Rows read; the papers' tables are for 96."""
    horizons: tuple[int, ...] = HORIZONS
    """Rows forecast."""
    epochs: int = 10
    """The most passes over the training windows."""
    batch_size: int = 32
    """Windows of a step."""
    learning_rate: float = 1e-3
    """Peak of the cosine schedule, for memories and attention."""
    dlinear_learning_rate: float = 5e-3
    """Peak of the cosine schedule, for DLinear."""
    patience: int = 3
    """Training ends after this many epochs without a better validation error."""
    dim: int = 128
    """Width of the residual stream."""
    depth: int = 2
    """Blocks."""
    head_dim: int = 32
    """Width of a head."""
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig(expansion=2, chunk_size=4))
    """The other fields of the memories; a look-back of 96 is 12 tokens, three chunks."""


@register_study("forecasting")
class ForecastingStudy(Study):
    """ETT and Weather at horizons of 96 to 720, next to the numbers that Titans prints."""

    options = ForecastingOptions

    def defaults(self, said: ForecastingOptions) -> ForecastingOptions:
        """See `Study`."""
        default = ForecastingOptions(quick=said.quick)
        if not said.quick:
            return default
        return dataclasses.replace(
            default, seeds=1, data=("ETTh1",), look_backs=(96,), horizons=(96, 192), epochs=2, dim=32, head_dim=16,
            depth=1, models=("titans", ATTENTION, DLINEAR),
        )  # fmt: skip

    def cells(self, options: ForecastingOptions) -> list[Cell]:
        """See `Study`."""
        at_least_one(
            options, "models", "data", "look_backs", "horizons", "epochs", "batch_size", "dim", "depth", "head_dim"
        )
        models.check_presets(options.models, others=(ATTENTION, MAMBA, DLINEAR))
        models.check_blocks([options.block])
        for name in options.data:
            if name not in FILES:
                raise ConfigError(f"data has {name!r}; use {', '.join(FILES)}")
        cells: list[Cell] = []
        for name, look_back, horizon in itertools.product(
            *map(dict.fromkeys, (options.data, options.look_backs, options.horizons))
        ):
            for model in dict.fromkeys(options.models):
                linear = model == DLINEAR
                task = Forecast(
                    batch_size=options.batch_size, data=name, path=file_or_place(options.folder, FILES[name]),
                    look_back=look_back, horizon=horizon, patience=options.patience,
                    learning_rate=options.dlinear_learning_rate if linear else options.learning_rate,
                )  # fmt: skip
                task = dataclasses.replace(task, steps=options.epochs * task.epoch)
                built = models.small_model(
                    ATTENTION if linear else model, options.block, options.dim, options.depth, options.head_dim,
                    options.memory,
                )  # fmt: skip
                built = dataclasses.replace(built, head=DLINEAR) if linear else built
                labels = {"data": name, "look_back": look_back, "horizon": horizon, "model": model}
                cells += with_seeds(options, [(labels, built)], task)
        return cells

    def columns(self, options: ForecastingOptions) -> list[Column]:
        """See `Study`."""
        return [Column("mse", "MSE"), Column("mae", "MAE")]

    def finish(self, options: ForecastingOptions, rows: list[Row]) -> list[Row]:
        """See `Study`: after the rows of all horizons, a row for each table and model with the means over horizons."""
        found = list(rows)
        if len(set(options.horizons)) == 1:
            return found
        for place in dict.fromkeys((r.labels["data"], r.labels["look_back"], r.labels["model"]) for r in rows):
            own = [r for r in rows if (r.labels["data"], r.labels["look_back"], r.labels["model"]) == place]
            numbers = {name: means_by_seed(row.numbers.get(name, []) for row in own) for name in ("mse", "mae")}
            found.append(joined_row(own[0].labels | {"horizon": "mean"}, own, numbers))
        return found

    def published(self, options: ForecastingOptions) -> list[Baseline]:
        """See `Study`; only if the mean is over the four horizons of the papers and look-back 96 is included."""
        if set(options.horizons) != set(HORIZONS) or 96 not in options.look_backs:
            return []
        return [
            (f"{model} as printed, {name} 96, mean", dict(zip(("mse", "mae"), PUBLISHED[model][name], strict=True)))
            for name, model in itertools.product(dict.fromkeys(options.data), PUBLISHED)
        ]

    def notes(self, options: ForecastingOptions) -> str:
        """See `Study`."""
        optimizer = Forecast(learning_rate=options.learning_rate).optimizer
        return (
            f"every window of the test part, scaled units; {options.epochs} epochs at most, patience "
            f"{options.patience}; Adam, {optimizer.learning_rate:g} (DLinear {options.dlinear_learning_rate:g}) by a "
            f"cosine to {optimizer.final_learning_rate_ratio:g} of it, gradients clipped at {optimizer.clip_norm:g} "
            "(iTransformer: 1e-4, halved every epoch); patches of 16 every 8, channels alone, instance norm (DLinear: "
            "none); not an exact reproduction, as Titans' code for this is not public"
        )

    def draw(self, options: ForecastingOptions, rows: list[Row], file: Path, note: str) -> None:
        """See `Study`: squared error against the horizon, a panel per table and look-back."""
        places = list(dict.fromkeys((row.labels["data"], row.labels["look_back"]) for row in rows))
        names = list(dict.fromkeys(row.labels["model"] for row in rows))
        across = min(len(places), 4)
        with plots.panels(file, len(places), 2 + 3.5 * across, 4 * -(-len(places) // 4), note=note) as panels:
            for axes, (data, look_back) in zip(panels, places, strict=True):
                for number, name in enumerate(names):
                    line = {
                        row.labels["horizon"]: row.spread("mse")
                        for row in rows
                        if (row.labels["data"], row.labels["look_back"], row.labels["model"]) == (data, look_back, name)
                        and row.labels["horizon"] != "mean"
                    }
                    draw_spreads(axes, line, color=f"C{number}", label=name)
                axes.set(title=f"{data}, look-back {look_back}", xlabel="horizon")
                axes.legend(fontsize="x-small")
            panels[0].set_ylabel("mean squared error, scaled")
