"""`titans study step_size`: recall and language against the largest inner step, for every preset that has a bound.

The default of `MemoryConfig.max_step_size` is among the sizes tried and is marked. It is a good default if both tasks
are near their best at it, for every preset and width of a head.
"""

import dataclasses
import itertools
from dataclasses import dataclass, field
from pathlib import Path

from titans_jax import plots
from titans_jax.config import ConfigError, MemoryConfig
from titans_jax.memory.rule.presets import PRESETS
from titans_jax.studies import models
from titans_jax.studies.generated import Recall
from titans_jax.studies.study import Cell, Column, Study, StudyOptions, at_least_one, register_study, with_seeds
from titans_jax.studies.table import Row, draw_spreads
from titans_jax.studies.tasks import Language


@dataclass(frozen=True)
class StepSizeOptions(StudyOptions):
    """Train small models of each memory with several largest inner steps, on recall and on language."""

    presets: tuple[str, ...] = ()
    """Presets with a bounded step; empty: all such presets."""
    head_dims: tuple[int, ...] = (16, 64)
    """Widths of a head; each divides dim."""
    max_step_sizes: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0)
    """Largest step sizes tried, in addition to the default."""
    tasks: tuple[str, ...] = ("recall", "language")
    """Tasks that models are trained on: recall, language or both."""
    block: str = "lmm"
    """The block that holds the memory."""
    dim: int = 64
    """Width of the residual stream."""
    depth: int = 2
    """Blocks."""
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig(expansion=2, chunk_size=8))
    """The other fields of the memories; its max_step_size is the default that is marked."""
    recall: Recall = field(default_factory=Recall)
    """Settings of recall."""
    language: Language = field(default_factory=lambda: Language(positions=0))
    """Settings of language."""


@register_study("step_size")
class StepSizeStudy(Study):
    """Recall and language against the largest inner step, the default marked."""

    options = StepSizeOptions

    def defaults(self, said: StepSizeOptions) -> StepSizeOptions:
        """See `Study`."""
        default = StepSizeOptions(quick=said.quick)
        if not said.quick:
            return default
        return dataclasses.replace(
            default, seeds=1, head_dims=(16,), max_step_sizes=(0.3, 1.0, 3.0), tasks=("recall",),
            recall=Recall(steps=400), language=Language(steps=100, evaluation_batches=8, positions=0),
        )  # fmt: skip

    def cells(self, options: StepSizeOptions) -> list[Cell]:
        """See `Study`."""
        at_least_one(options, "head_dims", "max_step_sizes", "tasks", "dim", "depth")
        presets = options.presets or tuple(name for name in PRESETS if models.bounded(name))
        models.check_presets(presets)
        models.check_blocks([options.block])
        for preset in presets:
            if not models.bounded(preset):
                known = ", ".join(name for name in PRESETS if models.bounded(name))
                raise ConfigError(f"presets has {preset!r}, whose step has no largest size; use {known}")
        known = {"recall": options.recall, "language": options.language}
        for name in options.tasks:
            if name not in known:
                raise ConfigError(f"tasks has {name!r}; use recall, language or both")
        sizes = sorted({*options.max_step_sizes, options.memory.max_step_size})
        kinds = []
        for preset, head_dim, size in itertools.product(
            dict.fromkeys(presets), dict.fromkeys(options.head_dims), sizes
        ):
            memory = dataclasses.replace(options.memory, max_step_size=size)
            model = models.small_model(preset, options.block, options.dim, options.depth, head_dim, memory)
            mark = "default" if size == options.memory.max_step_size else ""
            kinds.append(({"preset": preset, "head_dim": head_dim, "max_step_size": size, "mark": mark}, model))
        return [cell for name in dict.fromkeys(options.tasks) for cell in with_seeds(options, kinds, known[name])]

    def columns(self, options: StepSizeOptions) -> list[Column]:
        """See `Study`."""
        columns = {"recall": Column("accuracy", "recall"), "language": Column("bits_per_byte", "bits per byte")}
        return [columns[name] for name in dict.fromkeys(options.tasks)]

    def notes(self, options: StepSizeOptions) -> str:
        """See `Study`."""
        return f"max_step_size is {options.memory.max_step_size:g} by default"

    def draw(self, options: StepSizeOptions, rows: list[Row], file: Path, note: str) -> None:
        """See `Study`: a panel per task, a line per preset and head_dim, the default a vertical line."""
        from matplotlib import colormaps

        colors, columns = colormaps["tab10"].colors, self.columns(options)
        presets = list(dict.fromkeys(row.labels["preset"] for row in rows))
        head_dims = list(dict.fromkeys(row.labels["head_dim"] for row in rows))
        with plots.panels(file, len(columns), 3 + 5 * len(columns), 5, note=note) as panels:
            for axes, column in zip(panels, columns, strict=True):
                for (number, preset), (style, head_dim) in itertools.product(enumerate(presets), enumerate(head_dims)):
                    line = [r for r in rows if (r.labels["preset"], r.labels["head_dim"]) == (preset, head_dim)]
                    draw_spreads(
                        axes, {row.labels["max_step_size"]: row.spread(column.number) for row in line},
                        marker="osD^"[style % 4], markersize=5,
                        linestyle=("-", "--", ":", "-.")[style % 4], color=colors[number % 10],
                        label=f"{preset}, head_dim {head_dim}",
                    )  # fmt: skip
                axes.axvline(options.memory.max_step_size, color="gray", linewidth=1, label="the default")
                if column.number == "accuracy":
                    axes.axhline(1 / options.recall.num_pairs, color="gray", linestyle=":", label="a value at random")
                axes.set_xscale("log")
                axes.set(xlabel="max_step_size", ylabel=column.heading)
            handles, names = panels[0].get_legend_handles_labels()
            panels[0].figure.legend(handles, names, loc="outside right upper", fontsize="small")
