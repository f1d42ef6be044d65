"""`titans study retrofit`: a memory given to a Transformer that was trained without one (TPTT, arXiv 2506.17671).

Transformer++ is trained on rows of text; then its attention is limited to the last `window` tokens, and a memory is
added beside it, in the block "retrofit". These are compared after the same number of further steps: the Transformer as
it was; the Transformer with the window and no memory; window and memory, with all parameters trained, or only those of
the memory and its share; the same with a memory that is never written, which measures the effect of its convolutions
and additional parameters; and a model that had the memory from its first step.
"""

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import jax

from titans_jax import plots
from titans_jax.config import ConfigError, MemoryConfig, ModelConfig
from titans_jax.models.loss import Batch
from titans_jax.models.retrofit import Retrofit
from titans_jax.studies import models
from titans_jax.studies.length import POSITION_COLUMNS, draw_positions
from titans_jax.studies.models import ATTENTION, NEVER, WINDOW
from titans_jax.studies.study import Cell, Column, Study, StudyOptions, at_least_one, register_study, with_seeds
from titans_jax.studies.table import Row
from titans_jax.studies.tasks import Language
from titans_jax.training.fit import fit

SECOND_ORDER = 1000
"""Added to the seed of the order of rows in the second training."""


@dataclass(frozen=True)
class Retrofitted(Language):
    """Text, for a model that starts from a Transformer already trained on it."""

    name: ClassVar[str] = "retrofit"

    before_steps: int = 1500
    """Training steps of the Transformer beforehand; 0 starts from random parameters instead."""
    train_only: tuple[str, ...] = ()
    """Parameters that are trained after that, as in `optimizer.train_only`; empty: all."""

    @property
    def optimizer(self) -> Any:
        """See `Task`."""
        return dataclasses.replace(super().optimizer, train_only=self.train_only)

    def check(self, model: ModelConfig) -> None:
        """See `Task`."""
        super().check(model)
        if self.before_steps < 0:
            raise ConfigError(f"before_steps is {self.before_steps}; use at least 0")

    @property
    def tokens_before(self) -> int:
        """See `Task`."""
        return self.before_steps * self.batch_size * self.sequence_length

    def batches(self, seed: int) -> Iterator[Batch]:
        """See `Task`: in another order than before."""
        return super().batches(seed + SECOND_ORDER)

    def start(self, model: ModelConfig, seed: int) -> Any:
        """See `Task`: the Transformer's parameters."""
        if not self.before_steps:
            return None
        before = dataclasses.replace(model, pattern=(ATTENTION,), memory=MemoryConfig())
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(Language)}
        return _transformer(Language(**values | {"steps": self.before_steps}), before, seed)


@functools.lru_cache(maxsize=8)
def _transformer(task: Language, model: ModelConfig, seed: int) -> Any:
    """The parameters of a Transformer of this seed, trained once for all rows of a table."""
    batches = task.batches(seed)
    try:
        return jax.device_get(fit(model, task.optimizer, batches, task.steps, seed).params)  # a fit takes its start
    finally:
        batches.close()


@dataclass(frozen=True)
class RetrofitOptions(StudyOptions):
    """Add a memory to Transformers that were trained on text, and limit their attention to a window."""

    equal_parameters: bool = False
    """Widen the feed-forward layers until models have as many parameters as the largest of them; each model then needs
    a Transformer of its own."""
    presets: tuple[str, ...] = ("titans", "gated_deltanet")
    """Memories."""
    head_dim: int = 32
    """Width of a head."""
    dim: int = 128
    """Width of the residual stream."""
    depth: int = 2
    """Blocks."""
    window: int = 64
    """Tokens that the attention sees beside a memory."""
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig(depth=2, expansion=2))
    """The other fields of the memories."""
    language: Retrofitted = field(default_factory=lambda: Retrofitted(steps=500))
    """Settings of the text."""


@register_study("retrofit")
class RetrofitStudy(Study):
    """A memory beside the attention of a trained Transformer, its own parameters trained or kept."""

    options = RetrofitOptions

    def defaults(self, said: RetrofitOptions) -> RetrofitOptions:
        """See `Study`."""
        default = RetrofitOptions(quick=said.quick)
        if not said.quick:
            return default
        text = Retrofitted(
            steps=120, before_steps=300, batch_size=4, evaluation_batches=8, positions=8192, positions_rows=2
        )
        memory = dataclasses.replace(default.memory, chunk_size=16)
        return dataclasses.replace(default, seeds=1, dim=64, presets=("titans",), memory=memory, language=text)

    def cells(self, options: RetrofitOptions) -> list[Cell]:
        """See `Study`."""
        at_least_one(options, "presets", "head_dim", "dim", "depth", "window")
        models.check_presets(options.presets)
        text, every = options.language, dict.fromkeys(options.presets)
        alone = dataclasses.replace(text, train_only=Retrofit.added)
        anew = dataclasses.replace(text, before_steps=0, steps=text.before_steps + text.steps)
        never = dataclasses.replace(options.memory, max_step_size=NEVER)
        kinds = [(ATTENTION, "all", options.memory, text), (WINDOW, "all", options.memory, text)]
        for preset in every:
            kinds += [(preset, "all", options.memory, text), (preset, "the memory", options.memory, alone)]
            if models.bounded(preset):
                kinds.append((preset, "all, never written", never, text))
            kinds.append((preset, "all, from the first step", options.memory, anew))
        cells: list[Cell] = []
        for preset, trained, memory, task in kinds:
            model = models.small_model(preset, "retrofit", options.dim, options.depth, options.head_dim, memory)
            model = dataclasses.replace(model, window=options.window)
            cells += with_seeds(options, [({"memory": preset, "trained": trained}, model)], task)
        return cells

    def columns(self, options: RetrofitOptions) -> list[Column]:
        """See `Study`."""
        return POSITION_COLUMNS

    def notes(self, options: RetrofitOptions) -> str:
        """See `Study`."""
        text = options.language
        return (
            f"Transformer++ after {text.before_steps:,} steps on rows of {text.sequence_length:,}, then {text.steps:,} "
            f"more, with a window of {options.window} but for itself; memory gain: bits per byte lost where nothing is "
            f"written; read to {text.positions:,}"
        )

    def draw(self, options: RetrofitOptions, rows: list[Row], file: Path, note: str) -> None:
        """See `Study`: loss by position, a line for each row of the table."""
        from matplotlib import colormaps

        with plots.panels(file, 1, 7.5, 5, note=note) as (axes,):
            for number, row in enumerate(rows):
                name = f"{row.labels['memory']}, {row.labels['trained']}"
                draw_positions(axes, row, name, colormaps["tab10"].colors[number % 10])
            axes.set_ylabel("loss, nats per token; dashed: state emptied")
            axes.legend(fontsize="x-small")
