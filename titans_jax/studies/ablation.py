"""`titans study ablation`: the contribution of each part of Titans, as in table 5 of the paper (arXiv 2501.00663).

Each row takes one part of the full model away, or changes its depth or chunk size, and measures the cost: bits per byte
of language, accuracy of recall, and how the loss develops far beyond the training length.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from titans_jax import plots
from titans_jax.config import ConfigError, MemoryConfig, ModelConfig
from titans_jax.studies import models
from titans_jax.studies.generated import Recall
from titans_jax.studies.models import NEVER
from titans_jax.studies.study import Cell, Column, Study, StudyOptions, at_least_one, register_study, with_seeds
from titans_jax.studies.table import Row
from titans_jax.studies.tasks import Language

FULL = "full"

Change = Callable[[ModelConfig], ModelConfig]


@dataclass(frozen=True)
class AblationOptions(StudyOptions):
    """Train Titans without one of its parts at a time, on language and on recall."""

    variants: tuple[str, ...] = ()
    """Rows by name, in addition to the full model; empty: all rows."""
    block: str = "lmm"
    """The block that holds the memory."""
    head_dim: int = 32
    """Width of a head."""
    dim: int = 128
    """Width of the residual stream."""
    depth: int = 2
    """Blocks."""
    segment: int = 64
    """Segment of mac, and window of mag and mal."""
    num_persistent: int = 8
    """Persistent tokens of the full model."""
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig(preset="titans", depth=2, expansion=2))
    """The memory of the full model."""
    recall: Recall = field(default_factory=lambda: Recall(num_pairs=4, length=64, vocab_size=128, steps=1500))
    """Settings of recall."""
    language: Language = field(default_factory=Language)
    """Settings of language."""


def memory_with(**fields: object) -> Change:
    """The change of a model that sets these fields of its memory."""
    return lambda model: dataclasses.replace(model, memory=dataclasses.replace(model.memory, **fields))


def model_with(**fields: object) -> Change:
    """The change of a model that sets these fields."""
    return lambda model: dataclasses.replace(model, **fields)


VARIANTS: dict[str, Change] = {
    FULL: lambda model: model,
    "never written": memory_with(max_step_size=NEVER),
    "without momentum": memory_with(momentum=False),
    "without forgetting": memory_with(forget="never"),
    "without convolution": model_with(conv_size=1),
    "without persistent tokens": model_with(num_persistent=0),
    "linear memory": memory_with(architecture="linear"),
    "gate without predictions": memory_with(prediction_gate=False),
    **{f"depth {depth}": memory_with(depth=depth) for depth in (1, 2, 3, 4)},
    **{f"chunk {size}": memory_with(chunk_size=size) for size in (1, 4, 16, 64)},
}
"""The rows. "never written" is trained without writes, while the memory gain of the full model switches its writes off
after training. A convolution of one tap is a factor for each channel. A row equal to the full model is trained once."""


@register_study("ablation")
class AblationStudy(Study):
    """Titans without each of its parts: table 5 of the paper, in miniature."""

    options = AblationOptions

    def defaults(self, said: AblationOptions) -> AblationOptions:
        """See `Study`."""
        default = AblationOptions(quick=said.quick)
        if not said.quick:
            return default
        return dataclasses.replace(
            default, seeds=1, dim=64, head_dim=16,
            variants=(
                "never written", "without momentum", "without forgetting", "without convolution", "linear memory",
            ),
            recall=Recall(steps=400),
            language=Language(steps=60, batch_size=4, evaluation_batches=8, positions=4096, positions_rows=2),
        )  # fmt: skip

    def cells(self, options: AblationOptions) -> list[Cell]:
        """See `Study`."""
        at_least_one(options, "head_dim", "dim", "depth")
        models.check_presets([options.memory.preset])
        models.check_blocks([options.block])
        for name in options.variants:
            if name not in VARIANTS:
                *names, last = VARIANTS
                raise ConfigError(f"variants has {name!r}; use {', '.join(names)} or {last}")
        memory = options.memory
        sizes = options.dim, options.depth, options.head_dim
        full = models.small_model(memory.preset, options.block, *sizes, memory, segment=options.segment)
        full = dataclasses.replace(full, num_persistent=options.num_persistent)
        names = dict.fromkeys((FULL, *(options.variants or VARIANTS)))
        kinds = [({"variant": name}, VARIANTS[name](full)) for name in names]
        tasks = (options.language, options.recall)
        return [cell for task in tasks for cell in with_seeds(options, kinds, task)]

    def columns(self, options: AblationOptions) -> list[Column]:
        """See `Study`."""
        columns = [
            Column("bits_per_byte", "bits per byte"), Column("bits_per_byte_lost", "lost"),
            Column("memory_gain", "memory gain"),
            Column("accuracy", "recall"), Column("accuracy_lost", "lost"),
        ]  # fmt: skip
        far = [Column("last_over_best", f"loss at {options.language.positions:,} over best")]
        return columns + far * bool(options.language.positions)

    def finish(self, options: AblationOptions, rows: list[Row]) -> list[Row]:
        """See `Study`: the loss of each row against the full model with the same seed, where both have the number."""
        full = rows[0].numbers
        for row in rows:
            for name, sign in (("bits_per_byte", 1), ("accuracy", -1)):
                pairs = zip(row.numbers.get(name, []), full.get(name, []), strict=False)
                lost = [None if None in pair else sign * (pair[0] - pair[1]) for pair in pairs]
                row.numbers[f"{name}_lost"] = lost
        return rows

    def notes(self, options: AblationOptions) -> str:
        """See `Study`."""
        return '"lost" is against the full model with the same seed, above 0 where the part was worth something'

    def draw(self, options: AblationOptions, rows: list[Row], file: Path, note: str) -> None:
        """See `Study`: bars of the loss of each row against the full model, a panel per number."""
        shown = [c for c in self.columns(options) if c.number.endswith("_lost") or c.number == "last_over_best"]
        headings = {"bits_per_byte_lost": "bits per byte lost", "accuracy_lost": "recall accuracy lost"}
        names = [row.labels["variant"] for row in rows]
        with plots.panels(file, len(shown), 3 + 3.5 * len(shown), 1.5 + 0.3 * len(rows), note=note) as panels:
            for number, (axes, column) in enumerate(zip(panels, shown, strict=True)):
                spreads = [row.spread(column.number) for row in rows]
                places = [place for place, value in enumerate(spreads) if value.count]
                axes.barh(
                    places, [spreads[place].mean for place in places], xerr=[spreads[p].sd or 0 for p in places],
                    capsize=3, color=["tab:gray" if names[place] == FULL else "tab:blue" for place in places],
                )  # fmt: skip
                axes.set_yticks(range(len(rows)), names if number == 0 else [""] * len(rows))
                axes.invert_yaxis()
                axes.axvline(1 if column.number == "last_over_best" else 0, color="black", linewidth=0.8)
                axes.set_xlabel(headings.get(column.number, column.heading))
